"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965)."""

from __future__ import annotations

import dataclasses

from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.task import Phase
from pax_mpmd.schedules.task import Task

__all__ = ['GPipe']


@dataclasses.dataclass(frozen=True)
class GPipe(Schedule):
  """All forwards, then all backwards; every microbatch's activations are live at once.

  Huang et al., arXiv 1811.06965, section 2.3. The backwards go through the microbatches in
  ascending order, as in 1F1B, so that gradients are summed in the same order as there. Where an
  actor owns several (contiguous) stages they act as one larger stage. Any number of microbatches
  works.

  In unit time, with v stages on each of P actors, the bubble fraction is (P-1) / (M + P-1), the
  paper's; peak of live activations on every actor: v M.
  """

  def tasks(self, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """For each actor, its tasks in the order it runs them; see `Schedule.tasks`."""
    return tuple(
        tuple(Task(s, Phase.F, m) for m in range(num_microbatches) for s in stages)
        + tuple(Task(s, Phase.B, m) for m in range(num_microbatches) for s in reversed(stages))
        for stages in map(self.stages_of, range(self.num_actors))
    )
