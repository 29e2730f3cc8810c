"""The experiments of `configs` under the same names, with few steps: same model, same data."""

from __future__ import annotations

from paxml import experiment_registry

from configs import stdlib_flat
from configs import stdlib_lm
from configs import stdlib_lm_mpmd


class _Short:
  TRAIN_STEPS = 4
  WARMUP_STEPS = 2
  EVAL_BATCHES = 1
  EVAL_INTERVAL_STEPS = 2
  CHECKPOINT_EVERY_N_STEPS = 2
  SUMMARY_INTERVAL_STEPS = 1


@experiment_registry.register
class StdlibLm(_Short, stdlib_lm.StdlibLm):
  """4 steps."""


@experiment_registry.register
class StdlibLmCircular(_Short, stdlib_lm.StdlibLmCircular):
  """4 steps."""


@experiment_registry.register
class StdlibLmMpmd(_Short, stdlib_lm_mpmd.StdlibLmMpmd):
  """4 steps."""


@experiment_registry.register
class StdlibLmInterleaved(_Short, stdlib_lm_mpmd.StdlibLmInterleaved):
  """4 steps."""


@experiment_registry.register
class StdlibLmFlat(_Short, stdlib_flat.StdlibLmFlat):
  """4 steps."""
