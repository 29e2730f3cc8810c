"""`python -m pax_mpmd.schedules show`: a schedule as text and as a picture, without running it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import json
from pathlib import Path
import statistics

from pax_mpmd import errors
from pax_mpmd.schedules import svg
from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.grid import format_grid
from pax_mpmd.schedules.registry import get
from pax_mpmd.schedules.registry import NAMES
from pax_mpmd.schedules.simulate import Costs
from pax_mpmd.schedules.simulate import simulate
from pax_mpmd.schedules.simulate import Simulation
from pax_mpmd.schedules.task import Phase

__all__ = ['main', 'measured_costs', 'parse_costs', 'picture']


def main(args: Sequence[str]) -> None:
  """Reads the command line and prints.

  Args:
    args: what stands behind `show`.

  Raises:
    SystemExit: they make no sense; the message says why.
  """
  parser = argparse.ArgumentParser('python -m pax_mpmd.schedules show', description=__doc__)
  parser.add_argument('schedule', help=f'{", ".join(NAMES)}, or the path of a .csv table')
  parser.add_argument('--stages', type=int, help='number of stages; a table says itself')
  parser.add_argument('--actors', type=int, help='number of actors; default: what the schedule has')
  parser.add_argument('--microbatches', type=int, default=8, help='default: 8')
  parser.add_argument(
      '--costs', default='', help='times of tasks, e.g. F=1,B=2 or 3B=2.5 for one stage alone'
  )
  parser.add_argument(
      '--measured', metavar='TRACE', help='take the times from a trace (the .json file), in ms'
  )
  parser.add_argument('--svg', metavar='FILE', help='draw it into this file')
  options = parser.parse_args(args)
  if options.stages is None and options.schedule in NAMES:
    parser.error(f'--stages is missing; {options.schedule} needs it: --stages 4, for example')
  try:
    schedule = get(options.schedule, options.stages, options.actors)
    costs = measured_costs(options.measured) if options.measured else {}
    costs.update(parse_costs(options.costs))
    result = simulate(schedule, options.microbatches, costs, need_backward=False)
    grid = format_grid(schedule, options.microbatches)
  except errors.MpmdError as error:
    parser.error(str(error))
  unit = 'ms' if options.measured else ''
  print(grid)
  print()
  print(_summary(schedule, result, unit))
  if options.svg:
    title = f'{options.schedule}: {schedule.num_stages} stages on {schedule.num_actors} actors,'
    title += f' {options.microbatches} microbatches; bubble {result.bubble_fraction:.1%}'
    Path(options.svg).write_text(picture(schedule, result, title, unit))
    print(f'picture: {options.svg}')


def _summary(schedule: Schedule, result: Simulation, unit: str) -> str:
  return (
      f'time of a step: {result.makespan:g} {unit}'.rstrip()
      + f'\nbubble: {result.bubble_fraction:.1%}\n'
      + 'peak live activations of a stage, by actor: '
      + ', '.join(map(str, result.peak_live))
      + '\nstages, by actor: '
      + '; '.join(
          ' '.join(str(s) for s, owner in enumerate(schedule.placement()) if owner == actor)
          for actor in range(schedule.num_actors)
      )
  )


def picture(schedule: Schedule, result: Simulation, title: str, unit: str = '') -> str:
  """A simulated schedule as SVG: a row for each actor."""
  placement = schedule.placement()
  boxes = [
      svg.Box(
          placement[task.stage], result.start[task], result.end[task], str(task.phase), str(task)
      )
      for task in result.order
  ]
  rows = [f'actor {actor}' for actor in range(schedule.num_actors)]
  return svg.draw(rows, boxes, title, unit)


def parse_costs(text: str) -> dict:
  """Times of tasks from a text such as 'F=1,B=2,3B=2.5'.

  Raises:
    ConfigError: it isn't of that form.
  """
  costs: dict = {}
  for part in filter(None, text.replace(' ', '').split(',')):
    key, _, value = part.partition('=')
    stage, letter = key[:-1], key[-1:]
    try:
      phase = Phase(letter)
      costs[(int(stage), phase) if stage else phase] = float(value)
    except ValueError:
      raise errors.ConfigError(
          f'--costs has {errors.shown(part)}; it is a comma-separated list of a phase (F, B, I or'
          ' W) or a stage and a phase, and a time: F=1,B=2,3B=2.5, for example.'
      ) from None
  return costs


def measured_costs(path: str) -> Costs:
  """Median times of each stage's phases in a trace of `mpmd_jit`, in milliseconds.

  Raises:
    ConfigError: there is no such trace.
  """
  try:
    events = json.loads(Path(path).read_text())['traceEvents']
    names = {
        e['pid']: e['args']['name']
        for e in events
        if e['ph'] == 'M' and e['name'] == 'process_name'
    }
    times: dict = {}
    for event in events:
      args = event.get('args', {})
      if event['ph'] == 'X' and 'stage' in args and 'planned' not in names[event['pid']]:
        key = args['stage'], Phase(event['cat'])
        times.setdefault(key, []).append(event['dur'] / 1e3)
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise errors.ConfigError(
        f'--measured={path}: it is no trace ({type(error).__name__}: {error}). Give the .json file'
        ' that --mpmd_trace_steps, or mpmd_jit(trace_steps=), has written.'
    ) from error
  return {key: statistics.median(values) for key, values in times.items()}
