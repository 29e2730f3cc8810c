"""Which task waits for which, and playing task lists through in dependency order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import heapq

from pax_mpmd.schedules.task import Phase
from pax_mpmd.schedules.task import Task

__all__ = ['Played', 'dependencies', 'phases_of_stages', 'play']


def phases_of_stages(
    lists: Sequence[Sequence[Task]], num_stages: int
) -> tuple[frozenset[Phase], ...]:
  """The phases that occur for each stage, over all microbatches.

  A stage may have B for some microbatches and I and W for others.
  """
  phases: list[set[Phase]] = [set() for _ in range(num_stages)]
  for tasks in lists:
    for task in tasks:
      phases[task.stage].add(task.phase)
  return tuple(map(frozenset, phases))


def dependencies(task: Task, present: Collection[Task]) -> tuple[Task, ...]:
  """The tasks that a task directly waits for.

  Args:
    task: the task.
    present: all tasks of the schedule, as a set. It decides, microbatch by microbatch, whether a
      backward waits for the B or for the I of the next stage.

  Returns:
    At most two tasks.
  """
  s, m = task.stage, task.microbatch
  if task.phase is Phase.F:
    return (Task(s - 1, Phase.F, m),) if s > 0 else ()
  if task.phase is Phase.W:
    return (Task(s, Phase.I, m),)
  forward = Task(s, Phase.F, m)
  for phase in (Phase.B, Phase.I):
    after = Task(s + 1, phase, m)
    if after in present:
      return (forward, after)
  return (forward,)


@dataclasses.dataclass(frozen=True)
class Played:
  """How far task lists could be played.

  Attributes:
    order: the tasks that ran, by start time, ties by actor.
    start: when each started.
    end: when each ended.
    positions: for each actor, how many of its tasks ran; less than all where it got stuck.
  """

  order: tuple[Task, ...]
  start: Mapping[Task, float]
  end: Mapping[Task, float]
  positions: tuple[int, ...]


def play(lists: Sequence[Sequence[Task]], cost: Callable[[Task], float]) -> Played:
  """Runs each actor's list in order, each task as soon as its actor and its inputs are ready.

  Args:
    lists: for each actor, its tasks in order.
    cost: the time a task takes, not negative. Messages take no time.

  Returns:
    The times and the order, up to where the lists can be played. Takes time linear in the number
    of tasks (and logarithmic in the number of actors).
  """
  present = {task for tasks in lists for task in tasks}
  order: list[Task] = []
  start: dict[Task, float] = {}
  end: dict[Task, float] = {}
  positions = [0] * len(lists)
  free_at: list[float] = [0] * len(lists)
  waiting: dict[Task, list[int]] = {}  # a task that has not run -> actors whose next task needs it
  ready: list[tuple[float, int]] = []  # (start time, actor) of next tasks that can run

  def consider(actor: int) -> None:
    if positions[actor] == len(lists[actor]):
      return
    time = free_at[actor]
    for needed in dependencies(lists[actor][positions[actor]], present):
      if needed not in end:
        waiting.setdefault(needed, []).append(actor)
        return
      time = max(time, end[needed])
    heapq.heappush(ready, (time, actor))

  for actor in range(len(lists)):
    consider(actor)
  while ready:
    time, actor = heapq.heappop(ready)
    task = lists[actor][positions[actor]]
    order.append(task)
    start[task] = time
    end[task] = free_at[actor] = time + cost(task)
    positions[actor] += 1
    consider(actor)
    for other in waiting.pop(task, ()):
      consider(other)
  return Played(tuple(order), start, end, tuple(positions))
