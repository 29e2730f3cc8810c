"""Prints schedules as a grid: one row per step, one column per actor."""

from __future__ import annotations

from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.graph import play
from pax_mpmd.schedules.layout import format_columns
from pax_mpmd.schedules.layout import IDLE
from pax_mpmd.schedules.validate import checked_tasks

__all__ = ['format_grid']


def format_grid(
    schedule: Schedule,
    num_microbatches: int,
    *,
    max_steps: int | None = None,
    max_actors: int | None = None,
) -> str:
  """A schedule as a grid in which every task takes one step and '.' is an idle step.

  `FromTable` reads what this prints, as long as nothing was left out.

  Args:
    schedule: a valid schedule; one without backward tasks may be printed too.
    num_microbatches: number of microbatches in a step.
    max_steps: the most rows to print; the middle is left out. None prints all.
    max_actors: the most columns to print. None prints all.

  Returns:
    The lines, without a newline at the end.

  Raises:
    ScheduleError: the schedule isn't valid.
  """
  lists = checked_tasks(schedule, num_microbatches, need_backward=False)
  played = play(lists, lambda task: 1)
  num_steps = max(played.end.values())
  columns = []
  for tasks in lists:
    column = [IDLE] * num_steps
    for task in tasks:
      column[played.start[task]] = str(task)
    columns.append(column)
  return format_columns(columns, max_rows=max_steps, max_actors=max_actors)
