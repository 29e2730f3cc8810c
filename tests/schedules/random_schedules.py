"""Random valid schedules, for tests of everything that must work with any of them."""

from __future__ import annotations

import random

from pax_mpmd.schedules import FromTable
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import Schedule
from pax_mpmd.schedules import Task
from pax_mpmd.schedules.graph import dependencies


def random_schedule(
    seed: int, num_stages: int, num_actors: int, num_microbatches: int, phases: str = 'FB'
) -> Schedule:
  """A schedule with random placement and order, valid for `num_microbatches` only.

  Args:
    seed: equal seeds give equal schedules.
    num_stages: number of stages.
    num_actors: number of actors; each owns a stage.
    num_microbatches: number of microbatches.
    phases: 'FB', 'FIW', 'F', or 'mixed' where each stage has either B, or I and W, or 'each'
      where each microbatch of each stage has.

  Returns:
    The schedule: a random walk through the tasks, always to one whose needs are met.
  """
  rng = random.Random(seed)
  placement = [*range(num_actors), *rng.choices(range(num_actors), k=num_stages - num_actors)]
  rng.shuffle(placement)
  by_stage = [rng.choice(['FB', 'FIW']) if phases == 'mixed' else phases for _ in placement]
  todo = [
      Task(s, Phase(letter), m)
      for s, letters in enumerate(by_stage)
      for m in range(num_microbatches)
      for letter in (rng.choice(['FB', 'FIW']) if letters == 'each' else letters)
  ]
  present = frozenset(todo)
  done: set[Task] = set()
  lists: list[list[Task]] = [[] for _ in range(num_actors)]
  while todo:
    ready = [task for task in todo if done.issuperset(dependencies(task, present))]
    task = rng.choice(ready)
    todo.remove(task)
    done.add(task)
    lists[placement[task.stage]].append(task)
  return FromTable(lists)


def ascending(schedule: Schedule, num_microbatches: int) -> Schedule:
  """The schedule with each stage's forwards and backwards in the order of the microbatches.

  For schedules in which a stage splits the backwards of all its microbatches or of none. Valid if
  `schedule` is: whenever a stage's k-th task of a phase is due, at least k tasks that it
  could need are done.
  """
  seen: dict[tuple[int, Phase], int] = {}
  lists: list[list[Task]] = []
  for tasks in schedule.tasks(num_microbatches):
    lists.append([])
    for task in tasks:
      k = seen.get((task.stage, task.phase), 0)
      seen[task.stage, task.phase] = k + 1
      lists[-1].append(Task(task.stage, task.phase, k))
  return FromTable(lists)
