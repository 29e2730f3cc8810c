"""The table under a timeline: where the time of a step goes, and what decides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import statistics

from pax_mpmd.timeline.events import COMPUTE
from pax_mpmd.timeline.events import Event
from pax_mpmd.timeline.events import RECEIVE
from pax_mpmd.timeline.events import SEND
from pax_mpmd.timeline.simulate import Played

__all__ = ['ActorFigures', 'StepFigures', 'figures', 'median_step', 'to_text']


@dataclasses.dataclass(frozen=True)
class ActorFigures:
  """Where an actor's time goes in a step, in seconds.

  Computing, waiting, reading and other add up to the step time.

  Attributes:
    computing: in programs.
    waiting: for messages that weren't there.
    reading: messages that were.
    transfers: in messages that aren't hidden: reading, and of the waiting the part in which the
      message was being written already.
    other: everything else between the first actor's begin and the last one's end: what the
      interpreter costs, writing small messages, being done before others.
    bubble: the part of the step time in which no program runs.
  """

  computing: float
  waiting: float
  reading: float
  transfers: float
  other: float
  bubble: float


@dataclasses.dataclass(frozen=True)
class StepFigures:
  """A step in numbers.

  Attributes:
    seconds: from the first actor's begin to the last one's end.
    actors: by rank.
  """

  seconds: float
  actors: tuple[ActorFigures, ...]


def figures(events: Sequence[Event], span: tuple[float, float] | None = None) -> StepFigures:
  """The numbers of one step.

  Args:
    events: the step's.
    span: when it began and ended; None: with the first and the last event.
  """
  start = min(e.start for e in events) if span is None else span[0]
  end = max(e.end for e in events) if span is None else span[1]
  seconds = end - start
  actors = []
  sent = {(e.actor, e.peer, e.number): e.start for e in events if e.lane == SEND}
  number_of = {(e.actor, e.index): e.number for e in events if e.lane == RECEIVE}
  for actor in sorted({event.actor for event in events}):
    mine = [event for event in events if event.actor == actor]
    waiting = _sum(e for e in mine if e.kind == 'wait')
    computing = _sum(e for e in mine if e.lane == COMPUTE) - waiting
    reading = _sum(e for e in mine if e.lane == RECEIVE)
    transfers = reading
    for event in mine:
      if event.kind == 'wait':
        number = number_of.get((actor, event.index))
        began = sent.get((event.peer, actor, number), event.end)
        transfers += max(0.0, event.end - max(event.start, began))
    other = seconds - computing - waiting - reading
    bubble = 1 - computing / seconds if seconds else 0.0
    actors.append(ActorFigures(computing, waiting, reading, transfers, other, bubble))
  return StepFigures(seconds, tuple(actors))


def _sum(events) -> float:
  return sum(event.seconds for event in events)


def median_step(steps: Sequence[StepFigures]) -> int:
  """Which of several steps took the median time (the lower one of two)."""
  order = sorted(range(len(steps)), key=lambda i: steps[i].seconds)
  return order[(len(order) - 1) // 2]


def to_text(
    steps: Sequence[StepFigures],
    played: Played,
    peaks: Sequence[tuple[int, int | None]],
    overheads: Sequence[float],
    dispatch: Sequence[float],
) -> str:
  """The table.

  Args:
    steps: the measured ones.
    played: the plan with the measured times.
    peaks: for each actor the plan's peak of live bytes, and the measured one.
    overheads: for each actor, median seconds per instruction outside programs, messages and waits.
    dispatch: for each step, seconds from when the driver began to send it until the last actor
      began it; of steps that were sent ahead it says nothing.
  """
  seconds = sorted(step.seconds for step in steps)
  step = steps[median_step(steps)]
  planned = figures(played.events)
  lines = [
      f'step time        {_ms(statistics.median(seconds))} (median of {len(seconds)},'
      f' {_ms(seconds[0])} to {_ms(seconds[-1])})',
      f'plan, same times {_ms(played.makespan)}'
      f' (measured / planned {statistics.median(seconds) / (played.makespan or 1.0):.3f})',
      f'dispatch         {_ms(statistics.median(dispatch))} from the driver\'s send to the last'
      " actor's begin",
      '',
      'actor  computing  waiting  reading  transfers    other  bubble (planned)  per instr.'
      '  peak live bytes (planned)',
  ]
  for actor, (mine, plan, (planned_peak, peak), overhead) in enumerate(
      zip(step.actors, planned.actors, peaks, overheads)
  ):
    measured_peak = '-' if peak is None else f'{peak:,}'
    lines.append(
        f'{actor:5}  {_ms(mine.computing):>9}  {_ms(mine.waiting):>7}  {_ms(mine.reading):>7}  '
        f'{_ms(mine.transfers):>9}  '
        f'{_ms(mine.other):>7}  {mine.bubble:6.1%}  ({plan.bubble:6.1%})  {overhead * 1e6:7.1f} us'
        f'  {measured_peak} ({planned_peak:,})'
    )
  lines += ['', 'critical path of the plan, by kind:']
  for kind, (count, total) in _by_kind(played.critical).items():
    share = total / played.makespan if played.makespan else 0.0
    lines.append(f'  {kind:10} {count:4} x  {_ms(total):>9}  {share:6.1%}')
  return '\n'.join(lines) + '\n'


def _by_kind(events: Sequence[Event]) -> Mapping[str, tuple[int, float]]:
  """kind -> (how many, seconds in all), the longest first."""
  totals: dict[str, tuple[int, float]] = {}
  for event in events:
    count, total = totals.get(event.kind, (0, 0.0))
    totals[event.kind] = (count + 1, total + event.seconds)
  return dict(sorted(totals.items(), key=lambda item: -item[1][1]))


def _ms(seconds: float) -> str:
  return f'{seconds * 1e3:.2f} ms'
