"""Small experiments for the tests that compare runs with stock Pax, pipelined by it or not."""

from __future__ import annotations

from paxml import experiment_registry
from paxml import tasks_lib
from paxml.tasks.lm.params import lm_cloud
from praxis import base_input
from praxis import decoder_hparams
from praxis import pax_fiddle

from configs import stdlib_flat
from configs import stdlib_lm
from integration import inputs


@experiment_registry.register
class TinyPipelined(stdlib_lm.StdlibLm):
  """10 steps of a narrow model on 16 packed rows, 4 stages of 2 layers, 8 microbatches.

  Adam, a tied embedding and a gradient norm that is clipped in every step; no evaluation; all
  summaries of each step; one checkpoint, after the last step.
  """

  MODEL_DIMS = 32
  HIDDEN_DIMS = MODEL_DIMS * 4
  DIMS_PER_HEAD = 8
  MAX_SEQ_LEN = 32
  PERCORE_BATCH_SIZE = 4

  TRAIN_STEPS = 10
  WARMUP_STEPS = 2
  CLIP_GRADIENT_NORM_TO_VALUE = 0.5

  SUMMARY_INTERVAL_STEPS = 1
  CHECKPOINT_EVERY_N_STEPS = 10
  EVAL_INTERVAL_STEPS = 10

  def datasets(self) -> list[pax_fiddle.Config[base_input.BaseInput]]:
    """Returns the training input alone."""
    return [self._dataset_common(is_training=True)]


@experiment_registry.register
class TinyCircular(TinyPipelined):
  """The same layers as 8 stages of one layer, two stages and two devices a rank."""

  CIRCULAR_REPEAT = 2
  ICI_MESH_SHAPE = [4, 1, 2, 1]
  PERCORE_BATCH_SIZE = 2


@experiment_registry.register
class TinyEvaluated(TinyPipelined):
  """Evaluates two batches of the test split after steps 5 and 10, and saves there too."""

  EVAL_BATCHES = 2
  EVAL_INTERVAL_STEPS = 5
  CHECKPOINT_EVERY_N_STEPS = 5

  def datasets(self) -> list[pax_fiddle.Config[base_input.BaseInput]]:
    """Returns the inputs for training and for evaluation during training."""
    return [self._dataset_common(is_training=True), self._dataset_common(is_training=False)]


@experiment_registry.register
class TinyTo4(TinyPipelined):
  """TinyPipelined up to step 4, with the learning rates of all 10."""

  LAST_STEP = 4

  def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
    """Returns the task parameters, with an earlier end."""
    task_p = super().task()
    task_p.train.num_train_steps = self.LAST_STEP
    return task_p


@experiment_registry.register
class TinyTo7(TinyTo4):
  """TinyPipelined up to step 7."""

  LAST_STEP = 7


@experiment_registry.register
class TinyEndless(TinyPipelined):
  """Trains until it is stopped, in steps long enough to be hit; saves often."""

  MODEL_DIMS = 64
  HIDDEN_DIMS = MODEL_DIMS * 4
  MAX_SEQ_LEN = 64
  TRAIN_STEPS = 1_000_000
  CHECKPOINT_EVERY_N_STEPS = 5
  EVAL_INTERVAL_STEPS = 1_000_000


@experiment_registry.register
class TwoKindsOfMicrobatches(TinyPipelined):
  """A mistake: of these two exactly one is to be set."""

  NUM_MICROBATCHES = 8
  MICROBATCH_SIZE = 2


@experiment_registry.register
class TinyFlat(stdlib_flat.StdlibLmFlat):
  """6 steps of 5 repeated layers, not pipelined, on 16 packed rows; saves after steps 3 and 6.

  It can decode, which pipelined models can't in Pax: 8 bytes after each of 4 beginnings.
  """

  NUM_LAYERS = 5
  MODEL_DIMS = 32
  HIDDEN_DIMS = MODEL_DIMS * 4
  DIMS_PER_HEAD = 8
  MAX_SEQ_LEN = 32
  PERCORE_BATCH_SIZE = 16

  TRAIN_STEPS = 6
  LAST_STEP = TRAIN_STEPS
  WARMUP_STEPS = 2

  SUMMARY_INTERVAL_STEPS = 1
  CHECKPOINT_EVERY_N_STEPS = 3
  EVAL_INTERVAL_STEPS = 6

  def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
    """Returns the task parameters, with an earlier end."""
    task_p = super().task()
    task_p.train.num_train_steps = self.LAST_STEP
    task_p.model.decoder_tpl = decoder_hparams.GreedyDecoderHParams(
        seqlen=24, max_decode_steps=8, eos_id=-1, fprop_for_prefix=True
    )
    return task_p

  def datasets(self) -> list[pax_fiddle.Config[base_input.BaseInput]]:
    """Returns the training input alone."""
    return [self._dataset_common(is_training=True)]

  def decoder_datasets(self) -> list[pax_fiddle.Config[base_input.BaseInput]]:
    """Returns the input for decoding."""
    return [pax_fiddle.Config(inputs.Prompts, name='prompts', batch_size=4, reset_for_eval=True)]


@experiment_registry.register
class TinyFlatTo3(TinyFlat):
  """TinyFlat up to step 3, with the learning rates of all 6."""

  LAST_STEP = 3


@experiment_registry.register
class TinyBusy(lm_cloud.LmCloudSpmdPipeline):
  """All that a task's settings of training ask of the train loop, in 8 steps of 2 stages.

  Evaluation on test and on train, with the moving averages of the variables; summaries accumulated
  over steps and written in the same thread; the position of the input in the checkpoints; early
  stopping after step 6.
  """

  NUM_LAYERS = 2
  NUM_STAGES = 2
  NUM_MICROBATCHES = 4
  MICROBATCH_SIZE = None
  ICI_MESH_SHAPE = [2, 1, 1, 1]
  MODEL_DIMS = 16
  HIDDEN_DIMS = 32
  NUM_HEADS = 2
  DIMS_PER_HEAD = 8
  VOCAB_SIZE = inputs.VOCABULARY
  MAX_SEQ_LEN = 16
  FPROP_DTYPE = 'float32'
  PERCORE_BATCH_SIZE = 4

  SUMMARY_INTERVAL_STEPS = 2
  CHECKPOINT_EVERY_N_STEPS = 4
  EVAL_INTERVAL_STEPS = 2

  def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
    """Returns the task parameters."""
    task_p = super().task()
    task_p.early_stopping_fn = pax_fiddle.Config(inputs.StopsAfter, step=6)
    train_p = task_p.train
    train_p.num_train_steps = 8
    train_p.learner.optimizer.ema_decay = 0.5
    train_p.eval_use_ema_states = True
    train_p.eval_skip_train = False
    train_p.summary_accumulate_interval_steps = 1
    train_p.async_summary_writing = False
    train_p.enable_input_checkpointing = True
    train_p.enforce_input_specs = True
    train_p.max_inflight_steps = 1
    train_p.profiler_capture_step = 1
    train_p.report_progress_hook = True
    return task_p

  def datasets(self) -> list[pax_fiddle.Config[base_input.BaseInput]]:
    """Returns the inputs for training and for evaluation."""
    batch_size = self.PERCORE_BATCH_SIZE * self.NUM_STAGES
    common = dict(batch_size=batch_size, length=self.MAX_SEQ_LEN)
    return [
        pax_fiddle.Config(inputs.Rows, name='train', is_training=True, **common),
        pax_fiddle.Config(inputs.Rows, name='test', first=100, eval_loop_num_batches=2, **common),
    ]


class _ToStep1(TinyTo4):
  """A model of whose state nearly all is in one kind of layer; saves before and after a step."""

  MODEL_DIMS = 256
  DIMS_PER_HEAD = 64
  PERCORE_BATCH_SIZE = 2
  MAX_SEQ_LEN = 16
  NUM_LAYERS = 4
  SUMMARY_INTERVAL_STEPS = 100
  CHECKPOINT_EVERY_N_STEPS = 1
  LAST_STEP = 1


@experiment_registry.register
class NarrowTo1(_ToStep1):
  """200 MB of state."""

  HIDDEN_DIMS = 8192


@experiment_registry.register
class NarrowTo2(NarrowTo1):
  """The same, for another step."""

  LAST_STEP = 2


@experiment_registry.register
class WideTo1(_ToStep1):
  """Twice the state."""

  HIDDEN_DIMS = 16384


@experiment_registry.register
class WideTo2(WideTo1):
  """The same, for another step."""

  LAST_STEP = 2
