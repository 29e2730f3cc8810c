"""V placement: down the actors and up again."""

from __future__ import annotations

import dataclasses

from pax_mpmd import errors
from pax_mpmd.schedules.base import positive
from pax_mpmd.schedules.base import Schedule

__all__ = ['VShaped']


@dataclasses.dataclass(frozen=True)
class VShaped(Schedule):
  """Base of the schedules in which actor p of P owns the stages p and 2P-1-p.

  The first stage and the last are on actor 0; between the two in the middle nothing is sent.

  Attributes:
    num_stages: number of stages of the model, twice `num_actors`.
    num_actors: number of pipeline ranks; None means half as many as stages.
  """

  def __post_init__(self):
    name = type(self).__name__
    num_stages = positive(name, 'num_stages', self.num_stages)
    if self.num_actors is None:
      num_actors = max(1, num_stages // 2)
      got = f'num_stages is {num_stages}'
    else:
      num_actors = positive(name, 'num_actors', self.num_actors)
      got = f'num_stages is {num_stages} and num_actors is {num_actors}'
    if num_stages != 2 * num_actors:
      fixes = [f'num_stages={2 * num_actors} with num_actors={num_actors}']
      half = (num_stages + 1) // 2
      if half != num_actors:
        fixes.append(f'num_stages={2 * half} with num_actors={half}')
      raise errors.ScheduleError(
          f'{name}: {got}, but every actor must own two stages, so that num_stages is 2 x '
          f'num_actors. Set {", or ".join(fixes)}.'
      )
    object.__setattr__(self, 'num_actors', num_actors)
    super().__post_init__()

  def placement(self) -> tuple[int, ...]:
    """The actor of each stage."""
    return tuple(min(s, self.num_stages - 1 - s) for s in range(self.num_stages))
