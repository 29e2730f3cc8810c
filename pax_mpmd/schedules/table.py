"""Schedules written as tables: CSV files or text grids."""

from __future__ import annotations

from collections.abc import Sequence
import csv
import dataclasses
import io
import os

from pax_mpmd import errors
from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.layout import IDLE
from pax_mpmd.schedules.task import Task

__all__ = ['FromTable', 'to_csv']

_Rows = Sequence[Sequence[Task | str | None]]
_BLANKS = {'', IDLE, '-'}


@dataclasses.dataclass(frozen=True)
class FromTable(Schedule):
  """A schedule read from a table of tasks such as '2F0'.

  The number of stages, actors and microbatches and the placement are those of the table; it can
  only run with its own number of microbatches. Blank cells ('', '.', '-') are idle steps; they
  help the eye and change nothing.

  Attributes:
    table: the path of a CSV or text file; or its content, known by having a line break; or rows
      of cells, each a Task, a text or None. Text without commas is split at white space. A first
      line that starts with 'step' is a header, as `format_grid` prints it: rows are then time
      steps, their first cell is the step's number.
    rows_are: 'actors' or 'steps' (columns are then actors); None goes by the header, and without
      one takes a row for an actor.
    num_stages: if given, what the table's number of stages must be.
    num_actors: if given, what the table's number of actors must be.
    lists: for each actor, its tasks in order (made from `table`).
  """

  table: str | os.PathLike | _Rows = dataclasses.field(compare=False)
  rows_are: str | None = dataclasses.field(default=None, compare=False)
  num_stages: int | None = dataclasses.field(default=None, kw_only=True)
  num_actors: int | None = dataclasses.field(default=None, kw_only=True)
  lists: tuple[tuple[Task, ...], ...] = dataclasses.field(init=False, repr=False)

  def __post_init__(self):
    if self.rows_are not in (None, 'actors', 'steps'):
      raise errors.ScheduleError(
          f"FromTable: rows_are must be 'actors', 'steps' or None, but is "
          f'{errors.shown(self.rows_are)}.'
      )
    lists = _read(self.table, self.rows_are)
    if not all(lists) or not lists:
      empty = [a for a, tasks in enumerate(lists) if not tasks]
      raise errors.ScheduleError(
          f'FromTable: {_origin(self.table)} has no task'
          + (f' for actor {empty[0]}' if empty else '')
          + '. Every actor needs a row (or column) with at least one task such as 0F0.'
      )
    found = {
        'num_stages': 1 + max(task.stage for tasks in lists for task in tasks),
        'num_actors': len(lists),
    }
    for field, number in found.items():
      wanted = getattr(self, field)
      if wanted is not None and wanted != number:
        raise errors.ScheduleError(
            f'FromTable: {field} is {errors.shown(wanted)}, but {_origin(self.table)} has {number} '
            f'{field[4:]}. Leave {field} unset or use a table made for it.'
        )
      object.__setattr__(self, field, number)
    object.__setattr__(self, 'lists', lists)
    super().__post_init__()

  def placement(self) -> tuple[int, ...]:
    """The actor of each stage: where most of its tasks are, so that `validate` marks the others."""
    stages = {task.stage for tasks in self.lists for task in tasks}
    if len(stages) < self.num_stages:
      missing = next(stage for stage in range(self.num_stages) if stage not in stages)
      raise errors.ScheduleError(
          f'FromTable: {_origin(self.table)} has no task of stage {missing}, but tasks of stage '
          f'{self.num_stages - 1}. Stages are numbered from 0 without gaps.'
      )
    counts = [[0] * self.num_actors for _ in range(self.num_stages)]
    for actor, tasks in enumerate(self.lists):
      for task in tasks:
        counts[task.stage][actor] += 1
    return tuple(on_actor.index(max(on_actor)) for on_actor in counts)

  def tasks(self, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """For each actor, its tasks in the order it runs them; see `Schedule.tasks`."""
    made_for = 1 + max(task.microbatch for tasks in self.lists for task in tasks)
    if made_for != num_microbatches:
      raise errors.ScheduleError(
          f'FromTable: {_origin(self.table)} is made for {made_for} microbatches, but the step '
          f'has {num_microbatches}. Set the number of microbatches to {made_for} or use another '
          'table.'
      )
    return self.lists


def to_csv(schedule: Schedule, num_microbatches: int) -> str:
  """A schedule as CSV text, one row per actor, which `FromTable` reads.

  Args:
    schedule: any schedule.
    num_microbatches: number of microbatches in a step.

  Returns:
    The text; each row ends with a line break.
  """
  return ''.join(
      ','.join(map(str, tasks)) + '\n' for tasks in schedule.tasks(num_microbatches)
  )


def _origin(table) -> str:
  """How messages call the table."""
  is_path = isinstance(table, os.PathLike) or (isinstance(table, str) and '\n' not in table)
  return f'the table {os.fspath(table)}' if is_path else 'the table'


def _read(table, rows_are: str | None) -> tuple[tuple[Task, ...], ...]:
  """The tasks of each actor."""
  rows = _cells(table)
  is_grid = bool(rows) and bool(rows[0]) and str(rows[0][0]).strip().lower() == 'step'
  if is_grid:
    rows = [row[1:] for row in rows[1:]]
  if rows_are == 'steps' or (rows_are is None and is_grid):
    width = max(map(len, rows), default=0)
    rows = [[row[i] if i < len(row) else '' for row in rows] for i in range(width)]
  lists = []
  for actor, row in enumerate(rows):
    tasks = []
    for cell in row:
      if cell is None or (isinstance(cell, str) and cell.strip() in _BLANKS):
        continue
      try:
        tasks.append(cell if isinstance(cell, Task) else Task.parse(cell))
      except errors.ScheduleError as e:
        raise errors.ScheduleError(
            f'FromTable: actor {actor} of {_origin(table)}: {e}'
        ) from None
    lists.append(tuple(tasks))
  return tuple(lists)


def _cells(table) -> list[Sequence]:
  """The table as rows of cells; lines without any text are left out."""
  if not isinstance(table, (str, os.PathLike)):
    if not isinstance(table, Sequence) or any(
        isinstance(row, str) or not isinstance(row, Sequence) for row in table
    ):
      raise errors.ScheduleError(
          'FromTable: table must be a path, a text or rows of cells, but is '
          f'{errors.shown(table)}.'
      )
    return list(table)
  if isinstance(table, str) and '\n' in table:
    text = table
  else:
    try:
      with open(table, encoding='utf-8') as f:
        text = f.read()
    except (OSError, UnicodeDecodeError) as e:
      raise errors.ScheduleError(
          f"FromTable: can't read {_origin(table)}: {e}. What has no line break is taken for a"
          " path; end a table's text with one."
      ) from e
  if '\0' in text:  # only some versions of csv refuse it
    raise errors.ScheduleError(
        f'FromTable: {_origin(table)} is not text: it has NUL bytes. Write one row of tasks such as'
        ' 0F0,0B0 for each actor.'
    )
  lines = [line for line in text.splitlines() if line.strip()]
  if any(',' in line for line in lines):
    try:
      return list(csv.reader(io.StringIO('\n'.join(lines))))
    except csv.Error as e:
      raise errors.ScheduleError(
          f'FromTable: {_origin(table)} is not CSV text: {e}. Write one row of tasks such as '
          '0F0,0B0 for each actor.'
      ) from e
  return [line.split() for line in lines]
