"""What every schedule is: a placement of stages and an order of tasks for each actor."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import operator

from pax_mpmd import errors
from pax_mpmd.schedules.task import Task

__all__ = ['Schedule', 'positive']


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Base class of schedules: a pure value, no arrays in it.

  A schedule of your own is a subclass that writes `tasks`, and `placement` where stages are not
  to lie on the actors in contiguous blocks. A task may only stand after what it needs: the
  forward of stage s after that of stage s-1, the backward of stage s after its own forward and
  after the backward (or input gradient) of stage s+1, a weight gradient after its stage's input
  gradient. `schedules.validate` checks all of it.

  Attributes:
    num_stages: number of stages of the model.
    num_actors: number of pipeline ranks; None means one for each stage, unless the class says
      otherwise.
  """

  num_stages: int
  num_actors: int | None = None

  def __post_init__(self):
    name = type(self).__name__
    num_stages = positive(name, 'num_stages', self.num_stages)
    num_actors = num_stages
    if self.num_actors is not None:
      num_actors = positive(name, 'num_actors', self.num_actors)
    if num_actors > num_stages:
      raise errors.ScheduleError(
          f'{name}: num_actors is {num_actors}, but num_stages is {num_stages}, so '
          f'{num_actors - num_stages} of the actors would own no stage. num_actors must be at most '
          'num_stages; lower it, or cut the model into more stages.'
      )
    object.__setattr__(self, 'num_stages', num_stages)
    object.__setattr__(self, 'num_actors', num_actors)

  def placement(self) -> tuple[int, ...]:
    """The actor of each stage; by default contiguous blocks whose sizes differ by at most one."""
    return tuple(s * self.num_actors // self.num_stages for s in range(self.num_stages))

  def tasks(self, num_microbatches: int) -> Sequence[Sequence[Task]]:
    """For each actor, its tasks in the order it runs them.

    Args:
      num_microbatches: number of microbatches in a step.

    Returns:
      One sequence of tasks per actor.
    """
    raise errors.ScheduleError(
        f'{type(self).__name__} does not say in which order tasks run. Define tasks(self, '
        'num_microbatches), or use one of the schedules there are, such as OneFOneB.'
    )

  def stages_of(self, actor: int) -> tuple[int, ...]:
    """The stages that an actor owns, in ascending order."""
    return tuple(s for s, a in enumerate(self.placement()) if a == actor)


def positive(owner: str, field: str, value) -> int:
  """The value as an int of at least 1; what can't be one is refused in `owner`'s name."""
  try:
    number = 0 if isinstance(value, bool) else operator.index(value)
  except TypeError:
    number = 0
  if number < 1:
    raise errors.ScheduleError(
        f'{owner}: {field} must be a whole number of at least 1, but is '
        f'{errors.shown(value)}.'
    )
  return number
