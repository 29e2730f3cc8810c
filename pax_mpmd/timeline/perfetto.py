"""Events as a trace that chrome://tracing and ui.perfetto.dev open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pax_mpmd.timeline.events import COMPUTE
from pax_mpmd.timeline.events import Event
from pax_mpmd.timeline.events import RECEIVE
from pax_mpmd.timeline.events import SEND

__all__ = ['Group', 'to_trace']

_LANES = (COMPUTE, SEND, RECEIVE)
# Names of Perfetto's own palette: what they look like is its business, that they differ is ours.
_COLOURS = {
    'F': 'thread_state_running',
    'B': 'rail_animation',
    'I': 'rail_response',
    'W': 'rail_load',
    'wait': 'grey',
}

Counter = tuple[float, int]  # time, bytes


class Group:
  """Processes of a trace that belong together: one for each actor.

  Attributes:
    suffix: stands behind 'actor 0' in the names of its processes; '' for what was measured.
    events: of one or several steps.
    counters: by actor, the live bytes from a time on.
  """

  def __init__(
      self,
      suffix: str,
      events: Sequence[Event],
      counters: Mapping[int, Sequence[Counter]] | None = None,
  ):
    self.suffix = suffix
    self.events = events
    self.counters = counters or {}


def to_trace(groups: Sequence[Group]) -> dict:
  """The trace, ready for `json.dump`.

  Args:
    groups: what to show, the first on top. Their times may have any origin, one for all.

  Returns:
    A dict with 'traceEvents': a process per actor and group, threads for compute, send and receive,
    an arrow per message, and a counter of live bytes. Times are microseconds from the first event.
  """
  starts = [event.start for group in groups for event in group.events]
  origin = min(starts, default=0.0)
  out: list[dict] = []
  for number, group in enumerate(groups):
    actors = sorted({event.actor for event in group.events})
    for actor in actors:
      pid = _pid(number, actor)
      out += _names(pid, f'actor {actor}{group.suffix}')
      out += [
          {
              'ph': 'C', 'pid': pid, 'name': 'live bytes', 'ts': _us(at - origin),
              'args': {'bytes': nbytes},
          }
          for at, nbytes in group.counters.get(actor, ())
      ]
    out += [_slice(event, _pid(number, event.actor), origin) for event in group.events]
    out += _arrows(group.events, number, origin)
  return {'traceEvents': out, 'displayTimeUnit': 'ms'}


def _pid(group: int, actor: int) -> int:
  return 1 + 1000 * group + actor


def _us(seconds: float) -> float:
  return round(seconds * 1e6, 3)


def _names(pid: int, name: str) -> list[dict]:
  out = [
      {'ph': 'M', 'pid': pid, 'name': 'process_name', 'args': {'name': name}},
      {'ph': 'M', 'pid': pid, 'name': 'process_sort_index', 'args': {'sort_index': pid}},
  ]
  for tid, lane in enumerate(_LANES):
    out.append(
        {'ph': 'M', 'pid': pid, 'tid': tid, 'name': 'thread_name', 'args': {'name': lane}}
    )
  return out


def _slice(event: Event, pid: int, origin: float) -> dict:
  args: dict[str, Any] = {'instruction': event.index}
  name = event.label
  if event.task is not None:
    args.update(stage=event.task.stage, microbatch=event.task.microbatch)
  if event.peer is not None:
    args['peer'] = event.peer
    direction = 'to' if event.kind == 'send' else 'from'
    name = f'{event.kind} {event.label} {direction} {event.peer}'
  if event.lane != COMPUTE:
    args['bytes'] = event.nbytes
  out = {
      'ph': 'X', 'pid': pid, 'tid': _LANES.index(event.lane), 'name': name, 'cat': event.kind,
      'ts': _us(event.start - origin), 'dur': _us(event.seconds), 'args': args,
  }
  if event.kind in _COLOURS:
    out['cname'] = _COLOURS[event.kind]
  return out


def _arrows(events: Sequence[Event], group: int, origin: float) -> list[dict]:
  """From where a message began to be written to where it has been read."""
  out: list[dict] = []
  # Steps follow one another, so the k-th send of a number on a channel belongs to the k-th receive.
  waiting: dict[tuple, list[Event]] = {}
  for event in events:
    if event.lane == SEND:
      waiting.setdefault((event.actor, event.peer, event.number), []).append(event)
  taken: dict[tuple, int] = {}
  for event in events:
    key = event.peer, event.actor, event.number
    if event.lane != RECEIVE or key not in waiting:
      continue
    turn = taken.get(key, 0)
    taken[key] = turn + 1
    if turn >= len(waiting[key]):
      continue
    sent = waiting[key][turn]
    common = {
        'cat': 'message', 'name': event.label,
        'id': f'{group}/{sent.actor}/{event.actor}/{event.number}/{turn}',
    }
    start = {'ph': 's', 'pid': _pid(group, sent.actor), 'tid': 1, 'ts': _us(sent.start - origin)}
    end = {
        'ph': 'f', 'bp': 'e', 'pid': _pid(group, event.actor), 'tid': 2,
        'ts': _us(event.end - origin),
    }
    out += [{**common, **start}, {**common, **end}]
  return out
