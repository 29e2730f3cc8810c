"""The language model of Python source as Pax writes it without pipelining.

Nothing in here says anything about stages. Stock Pax trains it on one device; with `--mpmd
--mpmd_num_stages=4 --mpmd_num_microbatches=8` it trains in four stages, on the same variables and
checkpoints.
"""

from __future__ import annotations

from jax import numpy as jnp
from paxml import experiment_registry
from paxml import tasks_lib
from paxml.tasks.lm import model_params
from praxis import layers
from praxis import pax_fiddle

from configs import stdlib_lm
from configs import stdlib_task


@experiment_registry.register
class StdlibLmFlat(model_params.TransformerLmSpmdAdafactor, stdlib_lm.StdlibDataset):
  """A Transformer of 10 repeated layers on one device.

  Global batch size = 32 rows of 128 bytes.
  """

  PERCORE_BATCH_SIZE = 32

  NUM_LAYERS = 10
  USE_REPEATED_LAYER = True
  MODEL_DIMS = 128
  HIDDEN_DIMS = MODEL_DIMS * 4
  DIMS_PER_HEAD = 32
  VOCAB_SIZE = stdlib_task.VOCABULARY.vocab_size
  ACTIVATION_CLS = layers.GELU
  FPROP_DTYPE = jnp.float32
  ICI_MESH_SHAPE = [1, 1, 1]

  TRAIN_STEPS = 120
  LEARNING_RATE = 2e-3
  WARMUP_STEPS = 20
  WEIGHT_DECAY = 1e-3

  EVAL_INTERVAL_STEPS = 40
  CHECKPOINT_EVERY_N_STEPS = 20
  SUMMARY_INTERVAL_STEPS = 5

  def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
    """Returns the task parameters, with Adam and a warm-up."""
    task_p = super().task()
    model_params.set_default_adam(
        task_p,
        self.LEARNING_RATE,
        self.WEIGHT_DECAY,
        warmup_steps=self.WARMUP_STEPS,
        decay_start=self.WARMUP_STEPS + 1,
        decay_end=2 * self.TRAIN_STEPS,
    )
    task_p.train.num_train_steps = self.TRAIN_STEPS
    task_p.train.eval_skip_train = True
    return task_p
