"""1F1B: one forward, one backward (Narayanan et al., arXiv 2006.09503, PipeDream-Flush)."""

from __future__ import annotations

import dataclasses

from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.task import Phase
from pax_mpmd.schedules.task import Task

__all__ = ['OneFOneB', 'alternate']


def alternate(
    forwards: list[tuple[Task, ...]], backwards: list[tuple[Task, ...]], warmup: int
) -> tuple[Task, ...]:
  """`warmup` forwards, then one forward and one backward in turn, then the other backwards."""
  warmup = min(warmup, len(forwards))
  groups = forwards[:warmup]
  for forward, backward in zip(forwards[warmup:], backwards, strict=False):
    groups += [forward, backward]
  groups += backwards[len(forwards) - warmup :]
  return tuple(task for group in groups for task in group)


@dataclasses.dataclass(frozen=True)
class OneFOneB(Schedule):
  """Each actor alternates forwards and backwards as soon as it can.

  Actor p of P first runs P-1-p forwards, so that it never holds the activations of more than P-p
  microbatches, however many there are. Where an actor owns several (contiguous) stages they act
  as one larger stage. Any number of microbatches works, also fewer than stages.
  """

  def tasks(self, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """For each actor, its tasks in the order it runs them; see `Schedule.tasks`."""
    rows = []
    for actor in range(self.num_actors):
      stages = self.stages_of(actor)
      forwards = [tuple(Task(s, Phase.F, m) for s in stages) for m in range(num_microbatches)]
      backwards = [
          tuple(Task(s, Phase.B, m) for s in reversed(stages)) for m in range(num_microbatches)
      ]
      rows.append(alternate(forwards, backwards, self.num_actors - 1 - actor))
    return tuple(rows)
