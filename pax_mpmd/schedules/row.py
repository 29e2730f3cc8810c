"""Writes the task list of one actor, for schedules that are told as steps."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from pax_mpmd.schedules.task import Phase
from pax_mpmd.schedules.task import Task

__all__ = ['Row']


class Row:
  """The task list of one actor while it is being written.

  Each call appends the next microbatch of a phase, so a schedule says only how the phases follow
  one another and every stage goes through its microbatches in ascending order. A microbatch that
  the step doesn't have is counted but not written: leaving out all tasks of some microbatches
  keeps an order valid, so steps that are told for many microbatches also serve for fewer.
  """

  def __init__(self, chunks: Sequence[Sequence[int]], num_microbatches: int):
    """Constructor.

    Args:
      chunks: the actor's stages in groups of neighbours, each in ascending order; a group acts as
        one larger stage.
      num_microbatches: number of microbatches in a step.
    """
    self._chunks = tuple(map(tuple, chunks))
    self._num_microbatches = num_microbatches
    self._forwards = [0] * len(self._chunks)
    self._backwards = [0] * len(self._chunks)
    self._due: collections.deque[tuple[int, int]] = collections.deque()
    self._tasks: list[Task] = []

  @property
  def tasks(self) -> tuple[Task, ...]:
    """What has been written."""
    return tuple(self._tasks)

  def forward(self, chunk: int = 0) -> None:
    """F of a chunk for its next microbatch."""
    self._append(self._chunks[chunk], Phase.F, self._forwards[chunk])
    self._forwards[chunk] += 1

  def backward(self, chunk: int = 0, *, split: bool = False) -> None:
    """B of a chunk for its next microbatch; with `split` only I, and its W becomes due."""
    microbatch = self._backwards[chunk]
    self._backwards[chunk] += 1
    phase = Phase.I if split else Phase.B
    self._append(reversed(self._chunks[chunk]), phase, microbatch)
    if split:
      self._due.append((chunk, microbatch))

  def weights(self) -> None:
    """The W that has been due for longest."""
    chunk, microbatch = self._due.popleft()
    self._append(reversed(self._chunks[chunk]), Phase.W, microbatch)

  def all_weights(self) -> None:
    """Every W that is due, the oldest first."""
    while self._due:
      self.weights()

  def _append(self, stages, phase: Phase, microbatch: int) -> None:
    if microbatch < self._num_microbatches:
      self._tasks += [Task(stage, phase, microbatch) for stage in stages]
