"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

import dataclasses

from pax_mpmd.schedules.looped import Looped
from pax_mpmd.schedules.one_f_one_b import alternate
from pax_mpmd.schedules.task import Phase
from pax_mpmd.schedules.task import Task

__all__ = ['InterleavedOneFOneB']


@dataclasses.dataclass(frozen=True)
class InterleavedOneFOneB(Looped):
  """1F1B in which actor p owns the stages p, P+p, 2P+p, ...: a smaller bubble, more messages.

  The "schedule with interleaved stages" of Narayanan et al., arXiv 2104.04473, section 2.2.2.
  Microbatches go in groups of P through an actor's v stages: the whole group through the first,
  then through the second, and so on; backwards the other way. Actor p runs 2(P-1-p) + (v-1)P
  forwards before it alternates. `num_stages` must be a multiple of `num_actors`; with one stage
  per actor this is plain 1F1B.

  In unit time (B = 2F), for M a multiple of P, the bubble fraction is (P-1) / (v M + P-1), the
  bubble of 1F1B over v; peak of live activations on actor p: min(v M, 2(P-1-p) + (v-1)P + 1)
  where v > 1. The paper asks for such M. Other numbers of microbatches work too: an incomplete
  last group is a complete one with tasks left out, which keeps the order valid and takes at most
  the time and memory of the complete one.
  """

  def tasks(self, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """For each actor, its tasks in the order it runs them; see `Schedule.tasks`."""
    num_actors = self.num_actors
    num_rounds = self.num_stages // num_actors
    padded = -(-num_microbatches // num_actors) * num_actors
    rows = []
    for actor in range(num_actors):
      stages = self.stages_of(actor)
      forwards, backwards = [], []
      for first in range(0, padded, num_actors):
        group = range(first, first + num_actors)
        forwards += [(Task(s, Phase.F, m),) for s in stages for m in group]
        backwards += [(Task(s, Phase.B, m),) for s in reversed(stages) for m in group]
      warmup = num_actors - 1 - actor
      if num_rounds > 1:
        warmup = 2 * warmup + (num_rounds - 1) * num_actors
      row = alternate(forwards, backwards, warmup)
      rows.append(tuple(task for task in row if task.microbatch < num_microbatches))
    return tuple(rows)
