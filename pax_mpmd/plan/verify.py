"""Checks a plan before anything starts: no value missing, none left over, no way to hang.

A plan is valid when
  * on each actor every slot is filled once, is filled before it is used, isn't used after a Free
    or after a Run that donates it, and has the shape and dtype its users expect;
  * at the end of an actor's list exactly its outputs and constants are left;
  * on each channel (pair of actors) the k-th Send and the k-th Recv agree in label, number of
    values, shapes and dtypes;
  * the lists can be run to the end on channels without capacity, where a Send is over only when
    the Recv is reached. Channels with room only make more possible: whatever runs to the end
    without room does so with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from pax_mpmd import errors
from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Executable
from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.plan.instructions import Free
from pax_mpmd.plan.instructions import Instruction
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.plan.instructions import Recv
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.plan.instructions import Slot
from pax_mpmd.plan.text import format_instruction

__all__ = ['verify', 'where']


def verify(plan: Plan) -> None:
  """Checks a plan. Takes time linear in the number of instructions.

  Args:
    plan: the plan.

  Raises:
    PlanError: it isn't valid; the message names the actor, the instruction and the slot, or the
      actors that wait for each other.
  """
  for actor, actor_plan in enumerate(plan.actors):
    if actor_plan.actor != actor:
      raise errors.PlanError(
          f'Plan.actors[{actor}] is the plan of actor {actor_plan.actor}; it must be that of actor '
          f'{actor}.'
      )
    _Slots(actor_plan, plan.executables).check(len(plan.actors))
  _check_channels(plan)
  _check_rendezvous(plan)


class _Slots:
  """Follows the state of one actor's slots through its list."""

  def __init__(self, plan: ActorPlan, executables: Mapping[str, Executable]):
    self._plan = plan
    self._executables = executables
    self._constants = {slot for slot, _ in plan.constants}
    # Slot -> None while it is readable, else the position of the instruction that took it.
    self._state: dict[Slot, int | None] = {}
    self._at: int | str = ''  # a position in the list, or what to call another place

  def check(self, num_actors: int) -> None:
    plan = self._plan
    self._at = 'at the start'
    if len(plan.inputs) != len(plan.input_values):
      self._fail(f'{len(plan.inputs)} inputs, but {len(plan.input_values)} input_values')
    if len(plan.outputs) != len(plan.output_values):
      self._fail(f'{len(plan.outputs)} outputs, but {len(plan.output_values)} output_values')
    for slot in plan.inputs:
      self._fill(slot, None)
    for slot, array in plan.constants:
      self._fill(slot, Aval(tuple(array.shape), array.dtype.name))
    for position, instruction in enumerate(plan.instructions):
      self._at = position
      if isinstance(instruction, Run):
        self._run(instruction)
      elif isinstance(instruction, Send):
        self._peer(instruction.dst, num_actors)
        self._not_empty(instruction.slots)
        for slot in instruction.slots:
          self._use(slot)
      elif isinstance(instruction, Recv):
        self._peer(instruction.src, num_actors)
        self._not_empty(instruction.slots)
        for slot in instruction.slots:
          self._fill(slot, None)
      elif isinstance(instruction, Free):
        for slot in instruction.slots:
          self._use(slot)
          if slot in self._constants:
            self._fail(f'frees slot %{slot}, which is a constant and must stay')
          self._state[slot] = position
      else:
        self._fail('is not a Run, Send, Recv or Free')
    self._at = 'at the end'
    for slot in plan.outputs:
      self._use(slot)
    left = {slot for slot, gone in self._state.items() if gone is None}
    leaked = sorted(left - set(plan.outputs) - self._constants)
    if leaked:
      self._fail(
          f'slots {", ".join(f"%{slot}" for slot in leaked[:8])} are still held, but are neither '
          'outputs nor constants; free them after their last use'
      )

  def _run(self, run: Run) -> None:
    executable = self._executables.get(run.executable)
    if executable is None:
      self._fail(f'runs the program {run.executable!r}, which the plan does not have')
    for what, slots, avals in (
        ('arguments', run.inputs, executable.inputs),
        ('results', run.outputs, executable.outputs),
    ):
      if len(slots) != len(avals):
        self._fail(f'has {len(slots)} slots for the {len(avals)} {what} of its program')
    for slot, aval in zip(run.inputs, executable.inputs, strict=True):
      self._use(slot, aval)
    for position in executable.donated:
      if not 0 <= position < len(run.inputs):
        self._fail(f'its program donates argument {position}, which it does not have')
      slot = run.inputs[position]
      if run.inputs.count(slot) > 1:
        self._fail(f'donates slot %{slot}, which it also reads as another argument')
      if slot in self._constants:
        self._fail(f'donates slot %{slot}, which is a constant and must stay')
      self._state[slot] = self._at
    for slot, aval in zip(run.outputs, executable.outputs, strict=True):
      self._fill(slot, aval)

  def _fill(self, slot: Slot, aval: Aval | None) -> None:
    if not 0 <= slot < len(self._plan.slots):
      self._fail(f'fills slot %{slot}, but slots are numbered 0 to {len(self._plan.slots) - 1}')
    if slot in self._state:
      self._fail(f'fills slot %{slot} a second time; a slot is filled once in a step')
    self._state[slot] = None
    self._agree(slot, aval)

  def _use(self, slot: Slot, aval: Aval | None = None) -> None:
    if slot not in self._state:
      self._fail(f'needs slot %{slot}, which has not been filled')
    taken = self._state[slot]
    if taken is not None:
      how = 'donated to' if isinstance(self._plan.instructions[taken], Run) else 'freed by'
      self._fail(f'needs slot %{slot}, which was {how} {where(self._plan, taken)}')
    self._agree(slot, aval)

  def _agree(self, slot: Slot, aval: Aval | None) -> None:
    if aval is not None and aval != self._plan.slots[slot]:
      self._fail(f'slot %{slot} is {self._plan.slots[slot]}, but {aval} is needed there')

  def _peer(self, actor: int, num_actors: int) -> None:
    if not 0 <= actor < num_actors or actor == self._plan.actor:
      self._fail(
          f'exchanges a message with actor {actor}; it must be another actor of 0 to '
          f'{num_actors - 1}'
      )

  def _not_empty(self, slots: Sequence[Slot]) -> None:
    if not slots:
      self._fail('is a message without values; leave it out')

  def _fail(self, what: str) -> NoReturn:
    if isinstance(self._at, int):
      raise errors.PlanError(f'{where(self._plan, self._at)}: {what}.')
    raise errors.PlanError(f'actor {self._plan.actor}, {self._at}: {what}.')


def _check_channels(plan: Plan) -> None:
  """The k-th Send and the k-th Recv of each channel agree."""
  sends: dict[tuple[int, int], list[int]] = {}
  recvs: dict[tuple[int, int], list[int]] = {}
  for actor_plan in plan.actors:
    for position, instruction in enumerate(actor_plan.instructions):
      if isinstance(instruction, Send):
        sends.setdefault((actor_plan.actor, instruction.dst), []).append(position)
      elif isinstance(instruction, Recv):
        recvs.setdefault((instruction.src, actor_plan.actor), []).append(position)
  for channel in sorted({*sends, *recvs}):
    src, dst = (plan.actors[actor] for actor in channel)
    name = f'channel from actor {channel[0]} to actor {channel[1]}'
    sent, received = sends.get(channel, []), recvs.get(channel, [])
    for k, (i, j) in enumerate(zip(sent, received, strict=False)):
      send, recv = src.instructions[i], dst.instructions[j]
      fault = None
      if send.label != recv.label:
        fault = 'their labels differ'
      elif [src.slots[s] for s in send.slots] != [dst.slots[s] for s in recv.slots]:
        fault = (
            f'the values are ({", ".join(str(src.slots[s]) for s in send.slots)}) and '
            f'({", ".join(str(dst.slots[s]) for s in recv.slots)})'
        )
      if fault:
        raise errors.PlanError(
            f'{name}: message {k} is {where(src, i)} against {where(dst, j)}, but {fault}. '
            'Every Send needs one Recv, in the same order.'
        )
    if len(sent) > len(received):
      raise errors.PlanError(
          f'{name}: {where(src, sent[len(received)])} has no Recv on actor {dst.actor} '
          f'({len(sent)} sends, {len(received)} receives).'
      )
    if len(received) > len(sent):
      raise errors.PlanError(
          f'{name}: {where(dst, received[len(sent)])} has no Send on actor {src.actor} '
          f'({len(sent)} sends, {len(received)} receives).'
      )


def _check_rendezvous(plan: Plan) -> None:
  """The lists can be run to the end when a Send waits for its Recv."""
  lists = [
      [
          (position, instruction)
          for position, instruction in enumerate(actor_plan.instructions)
          if isinstance(instruction, Send | Recv)
      ]
      for actor_plan in plan.actors
  ]
  at = [0] * len(lists)

  def head(actor: int) -> Instruction | None:
    return lists[actor][at[actor]][1] if at[actor] < len(lists[actor]) else None

  # A pair of heads that meet lets both go on; only those two can meet others then.
  todo = list(range(len(lists)))
  while todo:
    actor = todo.pop()
    instruction = head(actor)
    if instruction is None:
      continue
    other = _peer(instruction)
    answer = head(other)
    if (
        answer is not None
        and _peer(answer) == actor
        and isinstance(answer, Recv) == isinstance(instruction, Send)
    ):
      at[actor] += 1
      at[other] += 1
      todo += [actor, other]
  stuck = [actor for actor in range(len(lists)) if head(actor) is not None]
  if not stuck:
    return
  # The channels match, so each stuck actor's peer has its side still before it: it is stuck too.
  actor, seen = stuck[0], []
  while actor not in seen:
    seen.append(actor)
    actor = _peer(head(actor))
  waits = [
      f'{where(plan.actors[a], lists[a][at[a]][0])} waits for actor {_peer(head(a))}'
      for a in seen[seen.index(actor):]
  ]
  raise errors.PlanError(
      'The plan would hang when channels hold nothing; these wait for each other: '
      + '; '.join(waits) + '. Sends and receives must follow one order that all actors share.'
  )


def _peer(instruction: Send | Recv) -> int:
  return instruction.dst if isinstance(instruction, Send) else instruction.src


def where(plan: ActorPlan, position: int) -> str:
  """Names an instruction of an actor, for messages."""
  instruction = plan.instructions[position]
  known = isinstance(instruction, Run | Send | Recv | Free)
  text = format_instruction(instruction, max_slots=8) if known else repr(instruction)
  return f'actor {plan.actor}, instruction {position} ({text})'
