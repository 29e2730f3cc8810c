"""Small experiments for the tests that compare runs with stock Pax, pipelined by it or not."""

from __future__ import annotations

from paxml import experiment_registry
from paxml import tasks_lib
from praxis import base_input
from praxis import pax_fiddle

from configs import stdlib_flat
from configs import stdlib_lm


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
  MAX_SEQ_LEN = 128
  TRAIN_STEPS = 1_000_000
  CHECKPOINT_EVERY_N_STEPS = 10
  EVAL_INTERVAL_STEPS = 1_000_000


@experiment_registry.register
class TwoKindsOfMicrobatches(TinyPipelined):
  """A mistake: of these two exactly one is to be set."""

  NUM_MICROBATCHES = 8
  MICROBATCH_SIZE = 2


@experiment_registry.register
class TinyFlat(stdlib_flat.StdlibLmFlat):
  """6 steps of 5 repeated layers, not pipelined, on 16 packed rows; saves after steps 3 and 6."""

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
    return task_p

  def datasets(self) -> list[pax_fiddle.Config[base_input.BaseInput]]:
    """Returns the training input alone."""
    return [self._dataset_common(is_training=True)]


@experiment_registry.register
class TinyFlatTo3(TinyFlat):
  """TinyFlat up to step 3, with the learning rates of all 6."""

  LAST_STEP = 3
