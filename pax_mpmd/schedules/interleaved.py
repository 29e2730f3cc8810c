"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

import dataclasses

from pax_mpmd import errors
from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.one_f_one_b import alternate
from pax_mpmd.schedules.task import Phase
from pax_mpmd.schedules.task import Task

__all__ = ['InterleavedOneFOneB']


@dataclasses.dataclass(frozen=True)
class InterleavedOneFOneB(Schedule):
  """1F1B in which actor p owns the stages p, P+p, 2P+p, ...: a smaller bubble, more messages.

  Microbatches go in groups of P through an actor's stages: the whole group through the first,
  then through the second, and so on; backwards the other way. `num_stages` must be a multiple of
  `num_actors`; with one stage per actor this is plain 1F1B. Any number of microbatches works: an
  incomplete last group is a complete one with tasks left out, which keeps the order valid.
  """

  def __post_init__(self):
    super().__post_init__()
    if self.num_stages % self.num_actors:
      raise errors.ScheduleError(
          f'InterleavedOneFOneB: num_stages is {self.num_stages} and num_actors is '
          f'{self.num_actors}, but every actor must own equally many stages. Make num_stages a '
          f'multiple of num_actors, for example {self.num_stages // self.num_actors + 1} x '
          f'{self.num_actors} = {(self.num_stages // self.num_actors + 1) * self.num_actors}.'
      )

  def placement(self) -> tuple[int, ...]:
    """The actor of each stage."""
    return tuple(s % self.num_actors for s in range(self.num_stages))

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
