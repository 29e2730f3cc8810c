"""The experiments of stdlib_lm with their schedule in the config, to be run by any Pax launcher.

With the mixin they run on pipeline actors also under the stock `python -m paxml.main --exp=...`.
"""

from __future__ import annotations

from paxml import experiment_registry
from praxis import pax_fiddle

from configs import stdlib_lm
from pax_mpmd import schedules
from pax_mpmd.pax import MpmdPipelineMixin


@experiment_registry.register
class StdlibLmMpmd(MpmdPipelineMixin, stdlib_lm.StdlibLm):
  """4 stages on 4 actors, each a stage's forward and backward in turn (1F1B)."""

  SCHEDULE = '1f1b'


@experiment_registry.register
class StdlibLmInterleaved(MpmdPipelineMixin, stdlib_lm.StdlibLmCircular):
  """8 stages of one layer on 4 actors, two a piece, which halves the pipeline's bubble."""

  SCHEDULE = pax_fiddle.Config(schedules.InterleavedOneFOneB)
  NUM_ACTORS = 4
