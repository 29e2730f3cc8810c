"""One order of all runs and messages of all actors.

The plan's freedom from deadlock rests on this order. Each actor's instruction list is the part of
it in which the actor takes part, in the same order, and a message is one event that both its ends
take part in. Suppose the actors are stuck. Of the events that have not happened, take the first.
Everything before it has happened, so each actor that takes part in it has come to it in its own
list: a run has the values it reads, for these were made by earlier events, and for a message both
ends are there at the same time, so that it needs no room in the channel. So it happens, and they
were not stuck.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import heapq

from pax_mpmd import errors
from pax_mpmd.plan.work import Key
from pax_mpmd.plan.work import KeyKind
from pax_mpmd.plan.work import Work

__all__ = ['Message', 'messages', 'total_order']


@dataclasses.dataclass(frozen=True)
class Message:
  """Values that go from one actor to another at one time.

  Attributes:
    src: the sending actor.
    dst: the receiving actor.
    work: (actor, position in its list) of the run that makes the values; None for step inputs.
    keys: the values, in the order in which they are made.
    label: the label of the run that makes them.
  """

  src: int
  dst: int
  work: tuple[int, int] | None
  keys: tuple[Key, ...]
  label: str


def messages(
    lists: Sequence[Sequence[Work]],
    inputs: Sequence[Sequence[Key]],
    wanted: Sequence[Iterable[Key]],
) -> list[Message]:
  """The messages that bring every value to where it is read and isn't made.

  A value goes to an actor at most once; all that one run makes for an actor is one message.

  Args:
    lists: for each actor, its runs in order.
    inputs: for each actor, the step inputs it gets from the driver.
    wanted: for each actor, values that must be there at the end of the step.

  Returns:
    The messages; those of step inputs first.
  """
  # Where each value is made: actor -> position in its list, -1 for a step input. The first actor
  # is the one that sends, so step inputs go in first and then runs in list order.
  makers: dict[Key, dict[int, int]] = {}
  for actor, keys in enumerate(inputs):
    for key in keys:
      assert actor not in makers.setdefault(key, {}), f'actor {actor} gets {key} twice'
      makers[key][actor] = -1
  for actor, works in enumerate(lists):
    for position, work in enumerate(works):
      for key in work.writes:
        assert actor not in makers.setdefault(key, {}), f'actor {actor} makes {key} twice'
        makers[key][actor] = position

  needed: dict[tuple[int, int, int], set[Key]] = {}  # (src, position, dst) -> values
  index = KeyKind.INDEX

  def need(key: Key, dst: int, reader: str) -> None:
    if key[0] == index:
      return
    where = makers.get(key)
    assert where, f'{reader} on actor {dst} reads {key}, which nobody makes'
    if dst not in where:
      src, position = next(iter(where.items()))
      needed.setdefault((src, position, dst), set()).add(key)

  for actor, works in enumerate(lists):
    for position, work in enumerate(works):
      for key in work.reads:
        need(key, actor, work.label)
        made = makers[key].get(actor, -1) if key in makers else -1
        assert made < position, f'{work.label} on actor {actor} reads {key} before it is made'
  for actor, keys in enumerate(wanted):
    for key in keys:
      need(key, actor, 'the result')

  found = []
  for (src, position, dst), keys in sorted(needed.items(), key=lambda item: item[0]):
    work = lists[src][position] if position >= 0 else None
    made = work.writes if work else inputs[src]
    found.append(
        Message(
            src=src,
            dst=dst,
            work=(src, position) if work else None,
            keys=tuple(key for key in made if key in keys),
            label=work.label if work else 'input',
        )
    )
  found.sort(key=lambda message: message.work is not None)
  return found


def total_order(
    lists: Sequence[Sequence[Work]], sent: Sequence[Message]
) -> list[Work | Message]:
  """Orders runs by the time they start and messages by the time their values are ready.

  The times are those of a simulation in which each actor runs its list in order. A message comes
  directly after the run that makes its values, before any run that starts when that one ends. It
  isn't put before runs that start while that one is still running: their actors would wait for
  the message, though they have something to do.

  Args:
    lists: for each actor, its runs in order.
    sent: all messages.

  Returns:
    Every run and every message once, each after what it needs.

  Raises:
    PlanError: there is no such order; the message names the runs that wait for each other.
  """
  by_work: dict[tuple[int, int] | None, list[int]] = {}
  arrival: dict[tuple[int, Key], int] = {}  # (actor, value) -> the message that brings it
  for i, message in enumerate(sent):
    by_work.setdefault(message.work, []).append(i)
    arrival.update(((message.dst, key), i) for key in message.keys)

  events: list[Work | Message] = []
  arrived = [False] * len(sent)
  positions = [0] * len(lists)
  free_at: list[float] = [0] * len(lists)
  waiting: dict[int, int] = {}  # message -> the actor whose next run can't start without it
  # (time, 0, message number) or (time, 1, actor): messages go before runs of the same time.
  heap: list[tuple[float, int, int]] = [(0, 0, i) for i in by_work.get(None, ())]
  heapq.heapify(heap)

  def next_missing(actor: int) -> int | None:
    """The first message that the actor's next run lacks."""
    for key in lists[actor][positions[actor]].reads:
      i = arrival.get((actor, key))
      if i is not None and not arrived[i]:
        return i
    return None

  def consider(actor: int, time: float) -> None:
    if positions[actor] == len(lists[actor]):
      return
    missing = next_missing(actor)
    if missing is None:
      heapq.heappush(heap, (max(time, free_at[actor]), 1, actor))
    else:
      waiting[missing] = actor

  for actor in range(len(lists)):
    consider(actor, 0)
  while heap:
    time, kind, number = heapq.heappop(heap)
    if kind == 0:
      together = [number]
      while heap and heap[0][:2] == (time, 0):
        together.append(heapq.heappop(heap)[2])
      for i in _sends_first(together, sent):
        events.append(sent[i])
        arrived[i] = True
        if i in waiting:
          consider(waiting.pop(i), time)
      continue
    work = lists[number][positions[number]]
    events.append(work)
    free_at[number] = time + work.cost
    for i in by_work.get((number, positions[number]), ()):
      heapq.heappush(heap, (free_at[number], 0, i))
    positions[number] += 1
    consider(number, free_at[number])

  if len(events) < len(sent) + sum(map(len, lists)):
    # Each stuck actor waits for a message of another stuck one, so the waits close a cycle.
    message_of = {actor: sent[i] for i, actor in waiting.items()}
    actor, seen = min(message_of), []
    while actor not in seen:
      seen.append(actor)
      actor = message_of[actor].src
    waits = [
        f'{lists[a][positions[a]].label} (actor {a}) reads what {message_of[a].label} (actor '
        f'{message_of[a].src}) makes'
        for a in seen[seen.index(actor):]
    ]
    raise errors.PlanError(
        "The schedule's order can't run with this step's programs; they wait for each other: "
        + '; '.join(waits)
        + '. A stage may read values of earlier stages in the forward, and of later ones in the '
        'backward.'
    )
  return events


def _sends_first(together: Sequence[int], sent: Sequence[Message]) -> list[int]:
  """Orders messages of the same time so that actors send, where they can, before they receive.

  Else an actor in the middle of the pipeline would pass its result on only after it got its next
  input.
  """
  to_send: dict[int, int] = {}
  to_receive: dict[int, list[int]] = {}
  for i in together:
    to_send[sent[i].src] = to_send.get(sent[i].src, 0) + 1
    to_receive.setdefault(sent[i].dst, []).append(i)
  free = [i for i in reversed(together) if sent[i].dst not in to_send]
  rest = list(reversed(together))
  ordered: dict[int, None] = {}
  while len(ordered) < len(together):
    i = free.pop() if free else rest.pop()
    if i in ordered:
      continue
    ordered[i] = None
    src = sent[i].src
    to_send[src] -= 1
    if not to_send[src]:
      free += reversed(to_receive.get(src, ()))
  return list(ordered)
