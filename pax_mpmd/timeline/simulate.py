"""Plays a plan with given times: when each program, message and wait would be, and what decides.

In: a plan and how long each of its programs and messages takes. Out: the events that an actor makes
of them which does its operations in order, waits for messages only, and sends without waiting.
What must hold: no event of an actor's own lane begins before the one before it has ended, and no
message is read before it has been written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import statistics

from pax_mpmd.plan.instructions import Plan
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.plan.operations import operations
from pax_mpmd.timeline.events import COMPUTE
from pax_mpmd.timeline.events import Event
from pax_mpmd.timeline.events import kind_of
from pax_mpmd.timeline.events import message_bytes
from pax_mpmd.timeline.events import message_numbers
from pax_mpmd.timeline.events import RECEIVE
from pax_mpmd.timeline.events import SEND

__all__ = ['Played', 'Times', 'play', 'times_of']


@dataclasses.dataclass(frozen=True)
class Times:
  """How long things take, in seconds.

  Attributes:
    run: of a program on an actor, by (actor, executable).
    write: of writing a message to the channel, by (actor, instruction index).
    read: of reading one, by (actor, index of its Recv).
  """

  run: Mapping[tuple[int, str], float]
  write: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)
  read: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Played:
  """A plan as it would run.

  Attributes:
    events: in the order in which they start on their actor.
    makespan: seconds from the start of all actors to the end of the last event.
    critical: the events that the makespan is the sum of, from first to last.
  """

  events: tuple[Event, ...]
  makespan: float
  critical: tuple[Event, ...]


def times_of(plan: Plan, steps: Sequence[Sequence[Event]]) -> Times:
  """Medians over measured steps: of each program over all its runs, of each message."""
  runs: dict[tuple[int, str], list[float]] = {}
  messages: dict[str, dict[tuple[int, int], list[float]]] = {SEND: {}, RECEIVE: {}}
  for events in steps:
    for event in events:
      if event.lane in messages:
        spans = messages[event.lane].setdefault((event.actor, event.index), [])
        spans.append(event.seconds)
      elif event.kind != 'wait':
        run = plan.actors[event.actor].instructions[event.index]
        runs.setdefault((event.actor, run.executable), []).append(event.seconds)

  def medians(spans: Mapping) -> dict:
    return {key: statistics.median(values) for key, values in spans.items()}

  return Times(medians(runs), medians(messages[SEND]), medians(messages[RECEIVE]))


class _Actor:
  """Where an actor is while the plan is played."""

  def __init__(self) -> None:
    self.next = 0  # of its operations
    self.now = 0.0
    self.last: int | None = None  # the event that ended last on it
    self.wrote = 0.0  # when the thread that writes its messages is free again
    self.last_write: int | None = None


def play(plan: Plan, times: Times) -> Played:
  """Plays a plan.

  Messages are written one after the other by a thread of the sender, from when the send is reached;
  read by the receiver when it waits for them, after those before them on the channel.

  Args:
    plan: a verified plan.
    times: how long each thing takes; what is missing takes no time.

  Returns:
    The events, times counted from the start of the step.
  """
  events: list[Event] = []
  causes: list[int | None] = []  # for each event the one whose end it began at
  written: dict[tuple[int, int, int], int] = {}  # (src, dst, number) -> event
  numbers = {(p.actor, i): n for p in plan.actors for i, n in message_numbers(p).items()}
  actors = {p.actor: _Actor() for p in plan.actors}
  todo = {p.actor: operations(p) for p in plan.actors}

  def add(event: Event, cause: int | None) -> int:
    events.append(event)
    causes.append(cause)
    return len(events) - 1

  def advance(actor_plan) -> bool:
    """Plays an actor until it has to wait for a message that isn't written."""
    rank = actor_plan.actor
    state, ops = actors[rank], todo[rank]
    begin = state.next
    while state.next < len(ops):
      operation = ops[state.next]
      instruction = actor_plan.instructions[operation.index]
      if operation.recv is not None:
        recv = actor_plan.instructions[operation.recv]
        number = numbers[rank, operation.recv]
        source = written.get((recv.src, rank, number))
        if source is None:
          break
        late = events[source].end > state.now
        ready = max(state.now, events[source].end)
        cause = source if late else state.last
        if late:
          add(
              Event(
                  rank, COMPUTE, 'wait', recv.label, state.now, ready, operation.recv, peer=recv.src
              ),
              state.last,
          )
        end = ready + times.read.get((rank, operation.recv), 0.0)
        nbytes = message_bytes(actor_plan, recv)
        state.last = add(
            Event(
                rank, RECEIVE, 'recv', recv.label, ready, end, operation.recv, nbytes, recv.src,
                number,
            ),
            cause,
        )
        state.now = end
      elif isinstance(instruction, Run):
        end = state.now + times.run.get((rank, instruction.executable), 0.0)
        state.last = add(
            Event(
                rank, COMPUTE, kind_of(instruction), instruction.label, state.now, end,
                operation.index,
            ),
            state.last,
        )
        state.now = end
      elif isinstance(instruction, Send):
        number = numbers[rank, operation.index]
        busy = state.wrote > state.now
        start = max(state.now, state.wrote)
        end = start + times.write.get((rank, operation.index), 0.0)
        nbytes = message_bytes(actor_plan, instruction)
        state.last_write = written[rank, instruction.dst, number] = add(
            Event(
                rank, SEND, 'send', instruction.label, start, end, operation.index, nbytes,
                instruction.dst, number,
            ),
            state.last_write if busy else state.last,
        )
        state.wrote = end
      state.next += 1
    return state.next > begin

  # Of a verified plan some actor can always go on until all have come to their end.
  while any(advance(p) for p in plan.actors):
    pass
  assert all(actors[rank].next == len(ops) for rank, ops in todo.items()), 'the plan hangs'
  last = max(range(len(events)), key=lambda i: events[i].end, default=None)
  path: list[Event] = []
  at = last
  while at is not None:
    path.append(events[at])
    at = causes[at]
  makespan = events[last].end if last is not None else 0.0
  return Played(tuple(events), makespan, tuple(reversed(path)))
