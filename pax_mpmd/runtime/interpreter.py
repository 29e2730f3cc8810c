"""Runs one actor's instruction list.

`prepare` turns an ActorPlan into a flat list of small callables once, when the plan is loaded;
`PreparedPlan.run` walks it every step. Where it waits, `plan/operations.py` says: a Recv only posts
the receive, and a wait stands in front of the first instruction that reads one of its slots. A Send
never waits for the receiver (unless a channel is made so), also where a later Run takes over the
memory that is sent: such an array is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
import dataclasses
import operator
import time
import traceback
from typing import Any

import numpy as np

from pax_mpmd.compile.program import Executable
from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.plan.instructions import Instruction
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.plan.instructions import Recv
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.plan.operations import Operation
from pax_mpmd.plan.operations import operations
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.channels import ChannelClosed
from pax_mpmd.runtime.channels import Transport
from pax_mpmd.runtime.devices import ActorDevices
from pax_mpmd.runtime.executables import CompiledProgram
from pax_mpmd.runtime.failure import brief
from pax_mpmd.runtime.failure import Failure
from pax_mpmd.runtime.failure import FailureKind
from pax_mpmd.runtime.failure import StepFailed
from pax_mpmd.runtime.recorder import StepRecorder

__all__ = [
    'PreparedPlan',
    'Progress',
    'actor_executables',
    'donated_inputs',
    'inline_outputs',
    'instruction_text',
    'prepare',
    'stage_of',
]


_INLINE_BYTES = 64
_INLINE_TOTAL_BYTES = 16 << 10


def instruction_text(instruction: Instruction) -> str:
  """One line for people."""
  try:
    from pax_mpmd.plan.text import format_instruction
  except ImportError:
    return repr(instruction)
  return format_instruction(instruction, max_slots=8)


def donated_inputs(plan: ActorPlan, executables: Mapping[str, Executable]) -> tuple[int, ...]:
  """Positions in `plan.inputs` whose arrays the step uses up."""
  donated = {
      instruction.inputs[position]
      for instruction in plan.instructions
      if isinstance(instruction, Run)
      for position in executables[instruction.executable].donated
  }
  return tuple(i for i, slot in enumerate(plan.inputs) if slot in donated)


def inline_outputs(plan: ActorPlan) -> tuple[slice | None, ...]:
  """Where each output's bytes stand in the reply to a step message; None: not in it.

  Small results (a loss, a count) come with the reply, so that reading them needs no message of
  its own, which would have to queue behind the steps that were sent since.
  """
  places: list[slice | None] = []
  end = 0
  for slot in plan.outputs:
    nbytes = plan.slots[slot].nbytes
    if nbytes > _INLINE_BYTES or end + nbytes > _INLINE_TOTAL_BYTES:
      places.append(None)
    else:
      places.append(slice(end, end + nbytes))
      end += nbytes
  return tuple(places)


class Progress:
  """Where the interpreter is; written by it, read by other threads and, `words`, by the driver.

  Attributes:
    words: int64[3]: handle + 1 of the plan that runs (0: none), step, instruction index. May be
      memory shared with the driver, who can then still read it when this process is gone.
    at: (step, instruction index or -1, since when by time.monotonic, what it waits for or ''),
      replaced as a whole.
    longest: seconds of the longest instruction so far, waits for other actors not counted.
    steps: number of steps finished.
  """

  def __init__(self, words: MutableSequence[int] | None = None):
    self.words = words if words is not None else [0, 0, -1]
    self.at: tuple[int, int, float, str] = (-1, -1, time.monotonic(), '')
    self.longest = 0.0
    self.steps = 0

  @property
  def handle(self) -> int | None:
    """Of the plan that runs; None between steps."""
    return self.words[0] - 1 if self.words[0] else None

  @handle.setter
  def handle(self, handle: int | None) -> None:
    self.words[2] = -1
    self.words[0] = 0 if handle is None else handle + 1


@dataclasses.dataclass
class _Frame:
  """The state of one step: values by slot, tickets by instruction index."""

  slots: list[Any]
  tickets: dict[int, Any]


@dataclasses.dataclass(frozen=True)
class _Op:
  """An operation, how to do it and, for a wait, what is waited for.

  `overwrites`: slots whose memory it takes over.
  """

  operation: Operation
  do: Callable[[_Frame], None]
  waits_for: str = ''
  overwrites: tuple[int, ...] = ()


def _getter(slots: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
  """slots table -> the values of `slots`, in C where there is more than one."""
  if not slots:
    return lambda table: ()
  if len(slots) == 1:
    slot = slots[0]
    return lambda table: (table[slot],)
  return operator.itemgetter(*slots)


def _run(run: Run, program: CompiledProgram, block: bool) -> Callable[[_Frame], None]:
  read = _getter(run.inputs)
  execute = program.execute
  outputs = run.outputs
  donated = tuple(run.inputs[position] for position in program.donated)

  def do(frame: _Frame) -> None:
    slots = frame.slots
    results = execute(list(read(slots)))
    for slot in donated:
      slots[slot] = None
    for slot, result in zip(outputs, results):
      slots[slot] = result
    if block and results:
      xla.block(results[0])

  return do


def _send(send: Send, transport: Transport, largest: int, taken_over: frozenset[int]):
  channel = transport.outgoing(send.dst, largest)
  read = _getter(send.slots)
  label = send.label

  def do(frame: _Frame) -> None:
    channel.send(read(frame.slots), label, taken_over)

  return do


def _free(slots: tuple[int, ...]) -> Callable[[_Frame], None]:
  def do(frame: _Frame) -> None:
    for slot in slots:
      frame.slots[slot] = None

  return do


def _wait_recv(index: int, slots: tuple[int, ...]) -> Callable[[_Frame], None]:
  def do(frame: _Frame) -> None:
    for slot, array in zip(slots, frame.tickets.pop(index).wait()):
      frame.slots[slot] = array

  return do


class PreparedPlan:
  """An ActorPlan bound to an actor's devices, its compiled programs and its channels."""

  def __init__(self, plan: ActorPlan, ops: tuple[_Op, ...], constants, donated: tuple[int, ...]):
    self.plan = plan
    self.donated_inputs = donated
    self._inline = tuple(i for i, place in enumerate(inline_outputs(plan)) if place is not None)
    self._ops = ops
    self._constants = constants
    self._take_outputs = _getter(plan.outputs)

  def run(
      self,
      step: int,
      inputs: list[xla.Array],
      progress: Progress,
      held: dict[int, Callable[[], None]] | None = None,
      recording: StepRecorder | None = None,
  ) -> list[xla.Array]:
    """Runs the step.

    Args:
      step: its number, for messages.
      inputs: device arrays, one for each of `plan.inputs`; the list is emptied, so that a Free
        gives the memory back.
      progress: kept up to date while running.
      held: by input slot, what waits until its array may be overwritten, where that isn't yet so.
      recording: where to write down when each operation began and ended.

    Returns:
      Device arrays, one for each of `plan.outputs`.

    Raises:
      StepFailed: an instruction raised, or another actor is gone.
    """
    slots: list[Any] = [None] * len(self.plan.slots)
    for slot, array in self._constants:
      slots[slot] = array
    for slot, array in zip(self.plan.inputs, inputs):
      slots[slot] = array
    inputs.clear()
    frame = _Frame(slots, {})
    now = time.monotonic
    longest = progress.longest
    index = -1
    words = progress.words
    words[1] = step
    try:
      for op in self._ops:
        words[2] = index = op.operation.index
        if held and op.overwrites:
          progress.at = (step, index, now(), 'a checkpoint to be written')
          for slot in op.overwrites:
            if slot in held:
              held.pop(slot)()
        start = now()
        progress.at = (step, index, start, op.waits_for)
        op.do(frame)
        if not op.waits_for:
          took = now() - start
          if took > longest:
            longest = progress.longest = took
        if recording is not None:
          recording.spans.append((start, now()))
          if recording.after is not None:
            recording.after()
      return list(self._take_outputs(slots))
    except Exception as error:
      raise StepFailed(self._failure(step, index, error)) from error

  def reply(self, outputs: Sequence[xla.Array]) -> bytes:
    """The bytes of the small outputs, as `inline_outputs` says; waits for all of them."""
    for output in outputs:
      xla.block(output)
    return b''.join(np.asarray(outputs[i]).tobytes() for i in self._inline)

  def instruction_at(self, index: int) -> Instruction | None:
    instructions = self.plan.instructions
    return instructions[index] if 0 <= index < len(instructions) else None

  def describe(self, index: int) -> tuple[int | None, str | None]:
    """The stage and the text of an instruction of the plan."""
    instruction = self.instruction_at(index)
    if instruction is None:
      return None, None
    return stage_of(instruction), instruction_text(instruction)

  def _failure(self, step: int, index: int, error: Exception) -> Failure:
    stage, text = self.describe(index)
    lost = isinstance(error, ChannelClosed)
    return Failure(
        kind=FailureKind.LOST_PEER if lost else FailureKind.EXCEPTION,
        actor=self.plan.actor,
        message=f'{error}.' if lost else brief(error),
        step=step,
        stage=stage,
        instruction=text,
        traceback=''.join(traceback.format_exception(error)),
        peer=error.peer if lost else None,
    )


def stage_of(instruction: Instruction) -> int | None:
  """A Run's own stage; for a Send or Recv the stage its label starts with, as in '2F0'."""
  if isinstance(instruction, Run):
    return instruction.stage
  label = getattr(instruction, 'label', '')
  digits = label[: len(label) - len(label.lstrip('0123456789'))]
  return int(digits) if digits and label[len(digits) :][:1].isalpha() else None


def largest_messages(plan: ActorPlan) -> dict[int, int]:
  """Bytes of the largest message this actor sends, by receiving actor."""
  largest: dict[int, int] = {}
  for instruction in plan.instructions:
    if isinstance(instruction, Send):
      nbytes = sum(plan.slots[slot].nbytes for slot in instruction.slots)
      largest[instruction.dst] = max(largest.get(instruction.dst, 0), nbytes)
  return largest


def prepare(
    plan: ActorPlan,
    executables: Mapping[str, Executable],
    programs: Mapping[str, CompiledProgram],
    transport: Transport,
    devices: ActorDevices,
) -> PreparedPlan:
  """Binds a plan. Opens the channels it sends on first, then waits for those it receives on."""
  largest = largest_messages(plan)
  for dst in sorted(largest):
    transport.outgoing(dst, largest[dst])
  block = devices.is_cpu
  donated_ever = {
      instruction.inputs[position]
      for instruction in plan.instructions
      if isinstance(instruction, Run)
      for position in executables[instruction.executable].donated
  }
  incoming = {
      instruction.src: transport.incoming(instruction.src)
      for instruction in plan.instructions
      if isinstance(instruction, Recv)
  }
  ops = []
  for operation in operations(plan, strict=lambda src: incoming[src].strict):
    index = operation.index
    instruction = plan.instructions[index]
    if operation.recv is not None:
      recv = plan.instructions[operation.recv]
      waits_for = f'{instruction_text(recv)}, asked of actor {recv.src}'
      ops.append(_Op(operation, _wait_recv(operation.recv, recv.slots), waits_for))
    elif isinstance(instruction, Run):
      program = programs[instruction.executable]
      overwrites = tuple(instruction.inputs[position] for position in program.donated)
      ops.append(_Op(operation, _run(instruction, program, block), overwrites=overwrites))
    elif isinstance(instruction, Send):
      taken_over = frozenset(i for i, slot in enumerate(instruction.slots) if slot in donated_ever)
      do = _send(instruction, transport, largest[instruction.dst], taken_over)
      # A Send over a channel without capacity is also a wait, for the peer's Recv.
      waits_for = f'actor {instruction.dst} to take {instruction_text(instruction)}'
      ops.append(_Op(operation, do, waits_for))
    elif isinstance(instruction, Recv):
      avals = tuple(plan.slots[slot] for slot in instruction.slots)
      post = _post(index, incoming[instruction.src], avals, instruction.label)
      ops.append(_Op(operation, post))
    else:
      ops.append(_Op(operation, _free(instruction.slots)))
  constants = tuple(
      (slot, devices.to_device(np.asarray(a), plan.slots[slot])) for slot, a in plan.constants
  )
  return PreparedPlan(plan, tuple(ops), constants, donated_inputs(plan, executables))


def _post(index: int, channel, avals, label: str) -> Callable[[_Frame], None]:
  def do(frame: _Frame) -> None:
    frame.tickets[index] = channel.post(avals, label)

  return do


def actor_executables(plan: Plan, actor: int) -> dict[str, Executable]:
  """The programs one actor runs, by key."""
  keys = dict.fromkeys(
      instruction.executable
      for instruction in plan.actors[actor].instructions
      if isinstance(instruction, Run)
  )
  return {key: plan.executables[key] for key in keys}
