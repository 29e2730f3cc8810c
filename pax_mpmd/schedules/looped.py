"""Looped placement: the stages go round the actors several times."""

from __future__ import annotations

import dataclasses

from pax_mpmd import errors
from pax_mpmd.schedules.base import Schedule

__all__ = ['Looped']


@dataclasses.dataclass(frozen=True)
class Looped(Schedule):
  """Base of the schedules in which actor p owns the stages p, P+p, 2P+p, ...

  `num_stages` must be a multiple of `num_actors`.
  """

  def __post_init__(self):
    super().__post_init__()
    if self.num_stages % self.num_actors:
      rounds = self.num_stages // self.num_actors + 1
      raise errors.ScheduleError(
          f'{type(self).__name__}: num_stages is {self.num_stages} and num_actors is '
          f'{self.num_actors}, but every actor must own equally many stages. Make num_stages a '
          f'multiple of num_actors, for example {rounds} x {self.num_actors} = '
          f'{rounds * self.num_actors}.'
      )

  def placement(self) -> tuple[int, ...]:
    """The actor of each stage."""
    return tuple(s % self.num_actors for s in range(self.num_stages))
