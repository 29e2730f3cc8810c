"""Writes a trace: for Perfetto, as a picture, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
from pathlib import Path
import statistics

from pax_mpmd.plan.instructions import Plan
from pax_mpmd.plan.liveness import live_bytes
from pax_mpmd.plan.liveness import peak_bytes
from pax_mpmd.plan.operations import operations
from pax_mpmd.schedules import svg
from pax_mpmd.timeline import events as events_lib
from pax_mpmd.timeline import perfetto
from pax_mpmd.timeline import report
from pax_mpmd.timeline import simulate
from pax_mpmd.timeline.record import ActorRecord
from pax_mpmd.timeline.record import StepRecord

__all__ = ['write']


def write(
    plan: Plan,
    steps: Sequence[StepRecord],
    memory: Sequence[ActorRecord],
    folder: str,
    name: str,
) -> Path:
  """Writes NAME.json, NAME.svg and NAME.txt.

  Args:
    plan: what ran.
    steps: records of some of its steps, in order.
    memory: for each actor, its record of a step that counted bytes.
    folder: where to; made if it isn't there.
    name: of the files.

  Returns:
    The path of the .json file.
  """
  measured = [events_lib.measured(plan, step) for step in steps]
  times = simulate.times_of(plan, measured)
  played = simulate.play(plan, times)
  found = [report.figures(e, _span(s)) for e, s in zip(measured, steps)]
  median = report.median_step(found)

  out = Path(folder)
  out.mkdir(parents=True, exist_ok=True)
  # As counted in one step, or as planned where nobody could.
  live = [m.live or live_bytes(p, plan.executables)[1:] for m, p in zip(memory, plan.actors)]
  counters = {
      a: [
          (end, nbytes)
          for step in steps
          for (_, end), nbytes in zip(step.actors[a].spans, live[a])
      ]
      for a in range(len(plan.actors))
  }
  flat = [event for events in measured for event in events]
  start = min((e.start for e in flat), default=0.0)
  planned = [
      dataclasses.replace(e, start=e.start + start, end=e.end + start) for e in played.events
  ]
  trace = perfetto.to_trace([
      perfetto.Group('', flat, counters),
      perfetto.Group(' (planned)', planned),
  ])
  path = out / f'{name}.json'
  path.write_text(json.dumps(trace))
  title = f'{name}: a step of {found[median].seconds * 1e3:.1f} ms; planned with the same times:'
  title += f' {played.makespan * 1e3:.1f} ms'
  (out / f'{name}.svg').write_text(
      _picture(measured[median], _span(steps[median])[0], played.events, len(plan.actors), title)
  )
  table = report.to_text(
      found,
      played,
      [(peak, max(m.live, default=None)) for peak, m in zip(peak_bytes(plan), memory)],
      _overheads(plan, found),
      _dispatch(steps),
  )
  (out / f'{name}.txt').write_text(table)
  return path


def _span(step: StepRecord) -> tuple[float, float]:
  return min(a.began for a in step.actors), max(a.ended for a in step.actors)


def _picture(measured, origin: float, planned, num_actors: int, title: str) -> str:
  rows = [f'actor {a}{suffix}' for suffix in ('', ' planned') for a in range(num_actors)]
  boxes = [
      svg.Box(
          event.actor + offset,
          (event.start - zero) * 1e3,
          (event.end - zero) * 1e3,
          event.kind,
          event.label,
      )
      for events, zero, offset in ((measured, origin, 0), (planned, 0.0, num_actors))
      for event in events
      if event.kind in svg.COLOURS and event.lane == events_lib.COMPUTE
  ]
  return svg.draw(rows, boxes, title, 'ms')


def _overheads(plan: Plan, steps: Sequence[report.StepFigures]) -> list[float]:
  return [
      statistics.median(step.actors[a].other for step in steps) / max(1, len(operations(p)))
      for a, p in enumerate(plan.actors)
  ]


def _dispatch(steps: Sequence[StepRecord]) -> list[float]:
  """For each step how long its last actor was idle before it, the message being under way."""
  seconds = []
  before = [0.0] * len(steps[0].actors)
  for step in steps:
    seconds.append(max(a.began - max(step.sent, b) for a, b in zip(step.actors, before)))
    before = [actor.ended for actor in step.actors]
  return seconds
