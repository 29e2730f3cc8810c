"""Every way to get one task of a schedule wrong, and a slow, separate judge of the results."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import Schedule
from pax_mpmd.schedules import Task

Rows = tuple[tuple[Task, ...], ...]


@dataclasses.dataclass(frozen=True)
class Given(Schedule):
  """A schedule that returns the given lists."""

  rows: Rows = ()
  where: tuple[int, ...] = ()

  def placement(self) -> tuple[int, ...]:
    """See the base class."""
    return self.where

  def tasks(self, num_microbatches: int) -> Rows:
    """See the base class."""
    return self.rows


def swaps(rows: Rows) -> Iterator[tuple[Rows, tuple[Task, ...]]]:
  """Any two tasks of an actor exchanged; with each result the tasks that were touched."""
  for actor, row in enumerate(rows):
    for i in range(len(row)):
      for j in range(i + 1, len(row)):
        new = list(row)
        new[i], new[j] = new[j], new[i]
        yield _with(rows, actor, new), (row[i], row[j])


def drops(rows: Rows) -> Iterator[tuple[Rows, tuple[Task, ...]]]:
  """Any one task left out."""
  for actor, row in enumerate(rows):
    for i, task in enumerate(row):
      yield _with(rows, actor, [*row[:i], *row[i + 1 :]]), (task,)


def doubles(rows: Rows) -> Iterator[tuple[Rows, tuple[Task, ...]]]:
  """Any one task a second time, anywhere."""
  for row in rows:
    for task in row:
      for actor, other in enumerate(rows):
        for i in range(len(other) + 1):
          yield _with(rows, actor, [*other[:i], task, *other[i:]]), (task,)


def moves(rows: Rows) -> Iterator[tuple[Rows, tuple[Task, ...]]]:
  """Any one task at any other place of its own or another actor."""
  for actor, row in enumerate(rows):
    for i, task in enumerate(row):
      without = _with(rows, actor, [*row[:i], *row[i + 1 :]])
      for to, other in enumerate(without):
        for j in range(len(other) + 1):
          if (to, j) != (actor, i):
            yield _with(without, to, [*other[:j], task, *other[j:]]), (task,)


def renames(rows: Rows, num_stages: int, num_microbatches: int):
  """Any one task with another stage, phase or microbatch, in range or just outside."""
  for actor, row in enumerate(rows):
    for i, task in enumerate(row):
      others = [dataclasses.replace(task, stage=s) for s in range(-1, num_stages + 1)]
      others += [dataclasses.replace(task, phase=p) for p in Phase]
      others += [dataclasses.replace(task, microbatch=m) for m in range(-1, num_microbatches + 1)]
      for other in others:
        if other != task:
          yield _with(rows, actor, [*row[:i], other, *row[i + 1 :]]), (task, other)


def _with(rows: Rows, actor: int, row) -> Rows:
  return (*rows[:actor], tuple(row), *rows[actor + 1 :])


def can_run(schedule: Given, num_microbatches: int) -> bool:
  """Whether a schedule is valid, found by trying: no graph, no code of the validator."""
  present = [task for row in schedule.rows for task in row]
  for s in range(schedule.num_stages):
    for m in range(num_microbatches):
      phases = sorted(t.phase.value for t in present if (t.stage, t.microbatch) == (s, m))
      if phases not in (['B', 'F'], ['F', 'I', 'W']):
        return False
  if sum(len(row) for row in schedule.rows) != len(set(present)):
    return False
  for actor, row in enumerate(schedule.rows):
    for t in row:
      if not (0 <= t.stage < schedule.num_stages and 0 <= t.microbatch < num_microbatches):
        return False
      if schedule.where[t.stage] != actor:
        return False
  todo = [list(row) for row in schedule.rows]
  done: set[str] = set()
  moved = True
  while moved:
    moved = False
    for row in todo:
      while row and _is_ready(row[0], done, schedule.num_stages):
        done.add(str(row.pop(0)))
        moved = True
  return not any(todo)


def _is_ready(task: Task, done: set[str], num_stages: int) -> bool:
  s, m = task.stage, task.microbatch
  if task.phase is Phase.F:
    return s == 0 or f'{s - 1}F{m}' in done
  if task.phase is Phase.W:
    return f'{s}I{m}' in done
  after = s + 1 == num_stages or f'{s + 1}B{m}' in done or f'{s + 1}I{m}' in done
  return after and f'{s}F{m}' in done
