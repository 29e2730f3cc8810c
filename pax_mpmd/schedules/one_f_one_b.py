"""1F1B, one forward, one backward, and its eager variant."""

from __future__ import annotations

import dataclasses

from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.task import Phase
from pax_mpmd.schedules.task import Task

__all__ = ['EagerOneFOneB', 'OneFOneB', 'alternate']


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

  "PipeDream-Flush" of Narayanan et al., arXiv 2006.09503. Actor p of P first runs
  P-1-p forwards, so that it never holds the activations of more than P-p microbatches, however
  many there are. Where an actor owns several (contiguous) stages they act as one larger stage.
  Any number of microbatches works, also fewer than stages.

  In unit time (B = 2F), with v stages on each actor, the bubble fraction is (P-1) / (M + P-1),
  that of GPipe; peak of live activations on actor p: v min(M, P-p).
  """

  def tasks(self, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """For each actor, its tasks in the order it runs them; see `Schedule.tasks`."""
    return _alternating(self, num_microbatches, 1)


@dataclasses.dataclass(frozen=True)
class EagerOneFOneB(Schedule):
  """1F1B with twice the forwards ahead, so that a message may take as long as a task.

  "Eager-1F1B" of Zhuang et al., arXiv 2211.05322: actor p of P first runs 2(P-1-p)
  forwards, twice as many as in 1F1B. Between the forward of a microbatch on one actor and that on
  the next there is then always room for another task, behind which the message can hide. Where an
  actor owns several (contiguous) stages they act as one larger stage. Any number of microbatches
  works.

  In unit time (messages take none there) the bubble fraction is (P-1) / (M + P-1), that of 1F1B;
  peak of live activations on actor p, with v stages on each: v min(M, 2(P-p) - 1).
  """

  def tasks(self, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """For each actor, its tasks in the order it runs them; see `Schedule.tasks`."""
    return _alternating(self, num_microbatches, 2)


def _alternating(
    schedule: Schedule, num_microbatches: int, ahead: int
) -> tuple[tuple[Task, ...], ...]:
  """1F1B in which each actor is `ahead` forwards further than the next when it starts to turn."""
  rows = []
  for actor in range(schedule.num_actors):
    stages = schedule.stages_of(actor)
    forwards = [tuple(Task(s, Phase.F, m) for s in stages) for m in range(num_microbatches)]
    backwards = [
        tuple(Task(s, Phase.B, m) for s in reversed(stages)) for m in range(num_microbatches)
    ]
    rows.append(alternate(forwards, backwards, ahead * (schedule.num_actors - 1 - actor)))
  return tuple(rows)
