"""Plays a schedule with given task times: how long it takes, how idle, how much memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
import numbers

from pax_mpmd import errors
from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.graph import play
from pax_mpmd.schedules.task import Phase
from pax_mpmd.schedules.task import Task
from pax_mpmd.schedules.validate import checked_tasks

__all__ = ['UNIT_COSTS', 'Costs', 'Simulation', 'cost_function', 'simulate']

Costs = Mapping[Phase | tuple[int, Phase], float]

UNIT_COSTS: Costs = {Phase.F: 1, Phase.B: 2, Phase.I: 1, Phase.W: 1}


@dataclasses.dataclass(frozen=True)
class Simulation:
  """What a schedule does in time, in the unit of the costs.

  Attributes:
    makespan: when the last task ends.
    bubble_fraction: the part of actors x makespan in which no task runs.
    peak_live: for each actor, the most (stage, microbatch) activations it holds at a time; they
      are held from the start of F to the end of B or W.
    order: all tasks by start time, ties by actor; every task comes after those it needs.
    start: when each task starts.
    end: when each task ends.
  """

  makespan: float
  bubble_fraction: float
  peak_live: tuple[int, ...]
  order: tuple[Task, ...] = dataclasses.field(repr=False)
  start: Mapping[Task, float] = dataclasses.field(repr=False)
  end: Mapping[Task, float] = dataclasses.field(repr=False)


def simulate(
    schedule: Schedule,
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    need_backward: bool = True,
) -> Simulation:
  """Plays a schedule; each task starts as soon as its actor and what it needs are ready.

  Args:
    schedule: the schedule.
    num_microbatches: number of microbatches in a step.
    costs: time of a Phase, or of a (stage, Phase), which goes first; what is left out takes
      F 1, B 2, I 1, W 1. Messages take no time.
    need_backward: whether a schedule without backward tasks is refused.

  Returns:
    Times, idle fraction and peak memory.

  Raises:
    ScheduleError: the schedule isn't valid, or a cost is negative or of no task.
  """
  lists = checked_tasks(schedule, num_microbatches, need_backward=need_backward)
  cost = cost_function(costs, schedule.num_stages)
  played = play(lists, cost)
  makespan = max(played.end.values())
  busy = math.fsum(cost(task) for task in played.order)
  return Simulation(
      makespan=makespan,
      bubble_fraction=1 - busy / (len(lists) * makespan) if makespan else 0.0,
      peak_live=tuple(map(_peak_live, lists)),
      order=played.order,
      start=played.start,
      end=played.end,
  )


def cost_function(costs: Costs | None, num_stages: int):
  """The time of a task as a function of it. See `simulate` for the argument and the errors."""
  if costs is not None and not isinstance(costs, Mapping):
    raise errors.ScheduleError(
        f'costs must be a dict from a Phase, or a (stage, Phase), to a time, but is '
        f'{errors.shown(costs)}.'
    )
  table = {(s, phase): UNIT_COSTS[phase] for s in range(num_stages) for phase in Phase}
  for key, value in sorted((costs or {}).items(), key=lambda item: isinstance(item[0], tuple)):
    keys = [key] if isinstance(key, tuple) else [(s, key) for s in range(num_stages)]
    if any(k not in table for k in keys):
      raise errors.ScheduleError(
          f'costs has the key {errors.shown(key)}, which is neither a Phase (F, B, I, W) nor a '
          f'(stage, Phase) with a stage of 0 to {num_stages - 1}.'
      )
    if not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
      raise errors.ScheduleError(
          f'costs[{errors.shown(key)}] must be a finite time of at least 0, but is '
          f'{errors.shown(value)}.'
      )
    table.update(dict.fromkeys(keys, value))
  return lambda task: table[task.stage, task.phase]


def _peak_live(tasks: Sequence[Task]) -> int:
  """The most activations live at a time on an actor that runs these tasks in order."""
  releases = {Phase.B, Phase.W} if any(t.phase is not Phase.F for t in tasks) else {Phase.F}
  live = peak = 0
  for task in tasks:
    if task.phase is Phase.F:
      live += 1
      peak = max(peak, live)
    if task.phase in releases:
      live -= 1
  return peak
