"""What happened, or is expected to happen, in a step: a flat list of events of all actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.plan.instructions import Recv
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.plan.operations import operations
from pax_mpmd.schedules.task import Task
from pax_mpmd.timeline.record import Span
from pax_mpmd.timeline.record import StepRecord

__all__ = [
    'COMPUTE',
    'RECEIVE',
    'SEND',
    'Event',
    'kind_of',
    'measured',
    'message_bytes',
    'message_numbers',
    'peer_of',
]

COMPUTE, SEND, RECEIVE = 'compute', 'send', 'receive'


@dataclasses.dataclass(frozen=True)
class Event:
  """Something that takes time on an actor.

  Attributes:
    actor: whose.
    lane: COMPUTE for programs and the time in which the actor waits, SEND and RECEIVE for the
      messages themselves.
    kind: F, B, I, W, prologue, epilogue, send, recv, or wait.
    label: for people: '2F0'; of a message, who made it.
    start: seconds.
    end: seconds.
    index: of the instruction in the actor's plan.
    nbytes: of a message, else 0.
    peer: the other actor of a message or of a wait, else None.
    number: of a message: which of the channel's messages in this step it is.
  """

  actor: int
  lane: str
  kind: str
  label: str
  start: float
  end: float
  index: int
  nbytes: int = 0
  peer: int | None = None
  number: int = 0

  @property
  def seconds(self) -> float:
    return self.end - self.start

  @property
  def task(self) -> Task | None:
    """The schedule's task that this program runs; None outside the microbatch loop."""
    return Task.parse(self.label) if self.kind in ('F', 'B', 'I', 'W') else None


def kind_of(run: Run) -> str:
  """The kind of a program's event: its phase, else 'prologue' or 'epilogue'."""
  if run.stage is None:
    return run.label.partition('.')[0]
  return str(Task.parse(run.label).phase)


def message_bytes(plan: ActorPlan, message: Send | Recv) -> int:
  """Bytes of the arrays in a message."""
  return sum(plan.slots[slot].nbytes for slot in message.slots)


def peer_of(message: Send | Recv) -> int:
  """The actor at the other end."""
  return message.dst if isinstance(message, Send) else message.src


def message_numbers(plan: ActorPlan) -> dict[int, int]:
  """For the index of each Send and Recv, which of its channel's messages it is."""
  numbers: dict[int, int] = {}
  counts: dict[tuple[type, int], int] = {}
  for index, instruction in enumerate(plan.instructions):
    if isinstance(instruction, (Send, Recv)):
      channel = type(instruction), peer_of(instruction)
      numbers[index] = counts.get(channel, 0)
      counts[channel] = numbers[index] + 1
  return numbers


def measured(plan: Plan, record: StepRecord) -> tuple[Event, ...]:
  """The events of a step that ran."""
  events: list[Event] = []
  for actor_plan, actor in zip(plan.actors, record.actors):
    rank = actor_plan.actor
    received = _messages(actor_plan, Recv, RECEIVE, actor.received)
    read_at = {event.index: event.start for event in received}
    for operation, (start, end) in zip(operations(actor_plan), actor.spans, strict=True):
      instruction = actor_plan.instructions[operation.index]
      if operation.recv is not None:
        # The actor itself reads what has come; until then it waits.
        end = min(end, read_at.get(operation.recv, end))
        recv = actor_plan.instructions[operation.recv]
        if end > start:
          events.append(
              Event(rank, COMPUTE, 'wait', recv.label, start, end, operation.recv, peer=recv.src)
          )
      elif isinstance(instruction, Run):
        kind = kind_of(instruction)
        events.append(Event(rank, COMPUTE, kind, instruction.label, start, end, operation.index))
    events += _messages(actor_plan, Send, SEND, actor.sent)
    events += received
  return tuple(events)


def _messages(
    plan: ActorPlan,
    which: type[Send | Recv],
    lane: str,
    spans_of: Mapping[int, Sequence[Span]],
) -> list[Event]:
  """The k-th message to (or from) a peer in the plan is the k-th that was written (or read)."""
  events = []
  for index, number in message_numbers(plan).items():
    message = plan.instructions[index]
    if not isinstance(message, which):
      continue
    peer = peer_of(message)
    spans = spans_of.get(peer, ())
    if number < len(spans):  # a channel within a process has no messages to be read
      start, end = spans[number]
      kind = 'send' if lane == SEND else 'recv'
      nbytes = message_bytes(plan, message)
      events.append(
          Event(plan.actor, lane, kind, message.label, start, end, index, nbytes, peer, number)
      )
  return events
