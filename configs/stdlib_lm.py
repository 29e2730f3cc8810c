"""Byte-level language models of Python source, pipelined the way Pax does it.

There is no pax_mpmd in this file: these are ordinary Pax experiments, which run both under
`python -m paxml.main` and, unchanged, under `python -m pax_mpmd.main --mpmd`. Stock Pax evaluates
during training only when it is given `--eval_on_test`.
"""

from __future__ import annotations

import jax
from jax import numpy as jnp
from paxml import base_experiment
from paxml import experiment_registry
from paxml import seqio_input
from paxml import tasks_lib
from paxml.tasks.lm import model_params
from praxis import base_input
from praxis import layers
from praxis import optimizers
from praxis import pax_fiddle
from praxis import schedules

from configs import stdlib_task


class ResumingInput(seqio_input.SeqIOInput):
  """Goes on after the batches that the steps up to the restored checkpoint have seen.

  Without it a restored run begins with the first batch again: Paxml 1.4.0 can't save the position
  of a `SeqIOInput` with the TensorFlow it is pinned to. Batches are the same in each run, so the
  number of steps says the position; Pax sets that number for its deterministic inputs.
  """

  def __post_init__(self):
    if self.is_training and self.num_batches_to_skip is None:
      self.num_batches_to_skip = self.deterministic_input_start_index._latest_model_step or None
    super().__post_init__()


class StdlibDataset(base_experiment.BaseExperiment):
  """Rows packed with pieces of the standard library's source code."""

  PERCORE_BATCH_SIZE = 8
  MAX_SEQ_LEN = 128
  TRAIN_SEED = 1234
  EVAL_BATCHES = 4

  def _dataset_common(self, is_training: bool) -> pax_fiddle.Config[base_input.BaseInput]:
    """Returns the input of one split; evaluation takes the same rows each time."""
    return pax_fiddle.Config(
        ResumingInput,
        name='stdlib',
        mixture_name=stdlib_task.TASK_NAME,
        split_name='train' if is_training else 'test',
        task_feature_lengths={'targets': self.MAX_SEQ_LEN},
        feature_converter=seqio_input.LanguageModelFeatures(pack=True),
        is_training=is_training,
        input_random_seed=self.TRAIN_SEED if is_training else None,
        batch_size=self.PERCORE_BATCH_SIZE * jax.local_device_count(),
        eval_loop_num_batches=1 if is_training else self.EVAL_BATCHES,
        eval_auto_pad=False,
        reset_for_eval=not is_training,
    )

  def datasets(self) -> list[pax_fiddle.Config[base_input.BaseInput]]:
    """Returns the inputs for training and for evaluation during training."""
    return [self._dataset_common(is_training=True), self._dataset_common(is_training=False)]


@experiment_registry.register
class StdlibLm(model_params.TransformerLmSpmdPipelineAdafactor, StdlibDataset):
  """A Transformer of 8 layers in 4 pipeline stages; trains in minutes on two CPU cores.

  Global batch size = 4 devices * 8 = 32 rows of 128 bytes, in 8 microbatches.
  """

  NUM_LAYERS = 8
  MODEL_DIMS = 128
  HIDDEN_DIMS = MODEL_DIMS * 4
  DIMS_PER_HEAD = 32
  VOCAB_SIZE = stdlib_task.VOCABULARY.vocab_size
  ACTIVATION_CLS = layers.GELU
  FPROP_DTYPE = jnp.float32
  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_NOTHING

  NUM_STAGES = 4
  NUM_MICROBATCHES = 8
  # 4-way pipeline.
  ICI_MESH_SHAPE = [4, 1, 1, 1]

  TRAIN_STEPS = 120
  LEARNING_RATE = 2e-3
  WARMUP_STEPS = 20
  WEIGHT_DECAY = 1e-3
  CLIP_GRADIENT_NORM_TO_VALUE = 1.0

  EVAL_INTERVAL_STEPS = 40
  CHECKPOINT_EVERY_N_STEPS = 40
  CHECKPOINT_MAX_TO_KEEP = 2
  SUMMARY_INTERVAL_STEPS = 5

  def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
    """Returns the task parameters, with Adam and a warm-up."""
    task_p = super().task()
    task_p.train.num_train_steps = self.TRAIN_STEPS
    # Evaluation is on the test split alone (with --eval_on_test), not also on a training batch.
    task_p.train.eval_skip_train = True
    learner_p = task_p.train.learner
    learner_p.optimizer = pax_fiddle.Config(
        optimizers.Adam,
        beta1=0.9,
        beta2=0.99,
        weight_decay=self.WEIGHT_DECAY,
        clip_gradient_norm_to_value=self.CLIP_GRADIENT_NORM_TO_VALUE,
        learning_rate=self.LEARNING_RATE,
        lr_schedule=pax_fiddle.Config(
            schedules.LinearRampupCosineDecay,
            warmup_steps=self.WARMUP_STEPS,
            decay_start=self.WARMUP_STEPS + 1,
            decay_end=2 * self.TRAIN_STEPS,
            min_ratio=0.1,
            max=1.0,
        ),
    )
    return task_p


@experiment_registry.register
class StdlibLmCircular(StdlibLm):
  """The same, with two stages a device: the stages go round the devices twice."""

  CIRCULAR_REPEAT = 2
