"""Breadth-first: GPipe over a looped placement (Lamy-Poirier, arXiv 2211.05953)."""

from __future__ import annotations

import dataclasses

from pax_mpmd.schedules.looped import Looped
from pax_mpmd.schedules.task import Phase
from pax_mpmd.schedules.task import Task

__all__ = ['LoopedBFS']


@dataclasses.dataclass(frozen=True)
class LoopedBFS(Looped):
  """Interleaved GPipe: all microbatches through a stage before any goes through the next round.

  "Breadth-first pipeline parallelism" of Lamy-Poirier, arXiv 2211.05953: actor p of P owns the v
  stages p, P+p, 2P+p, ... and runs all M forwards of the first of them, then all of the second,
  and so on; then all backwards, from its last stage to its first. Each weight is used in one
  stretch for the forward and one for the backward, which lets its gathering and the reduction of
  its gradient overlap with computation; the price is memory. `num_stages` must be a multiple of
  `num_actors`; with one stage per actor this is GPipe. Any number of microbatches works.

  In unit time (B = 2F) a step takes 3 x ((v-1) max(M, P) + M + P-1). For M >= P that is a bubble
  fraction of (P-1) / (v M + P-1), the paper's: GPipe's bubble over v. With fewer microbatches
  each round waits for the one before. Peak of live activations on every actor: v M.
  """

  def tasks(self, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """For each actor, its tasks in the order it runs them; see `Schedule.tasks`."""
    return tuple(
        tuple(Task(s, Phase.F, m) for s in stages for m in range(num_microbatches))
        + tuple(Task(s, Phase.B, m) for s in reversed(stages) for m in range(num_microbatches))
        for stages in map(self.stages_of, range(self.num_actors))
    )
