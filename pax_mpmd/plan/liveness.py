"""When values die: inserts Free instructions, and counts the bytes that are live."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from pax_mpmd.compile.program import Executable
from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.plan.instructions import Free
from pax_mpmd.plan.instructions import Instruction
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.plan.instructions import Recv
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.plan.instructions import Slot
from pax_mpmd.plan.operations import operations

__all__ = ['insert_frees', 'live_bytes', 'peak_bytes']


def insert_frees(
    instructions: Sequence[Instruction],
    inputs: Sequence[Slot],
    kept: Collection[Slot],
    executables: Mapping[str, Executable],
) -> tuple[Instruction, ...]:
  """Frees each slot directly after its last use, or after it is made if there is none.

  Args:
    instructions: one actor's list, without Free.
    inputs: slots that are there at the start.
    kept: slots that are never freed (results and constants).
    executables: the plan's programs.

  Returns:
    The list with at most one Free after each instruction (and one at the very beginning).
  """
  last: dict[Slot, int] = dict.fromkeys(inputs, -1)
  donated: dict[Slot, int] = {}
  for i, instruction in enumerate(instructions):
    used = (*_used(instruction), *_made(instruction))
    for slot in used:
      # The compiler donates only what has no other use.
      assert slot not in donated, f'{instruction} uses slot {slot}, which was donated before'
      last[slot] = i
    donated.update((slot, i) for slot in donated_slots(instruction, executables))
  assert not set(kept) & set(donated), f'results are donated: {set(kept) & set(donated)}'

  dying: dict[int, list[Slot]] = {}
  for slot, i in last.items():
    if slot not in donated and slot not in kept:
      dying.setdefault(i, []).append(slot)
  result: list[Instruction] = []
  for i in range(-1, len(instructions)):
    if i >= 0:
      result.append(instructions[i])
    if i in dying:
      result.append(Free(tuple(sorted(dying[i]))))
  return tuple(result)


def peak_bytes(plan: Plan) -> tuple[int, ...]:
  """For each actor, the most bytes that its slots hold at a time during the step.

  A program's arguments and results are counted together while it runs, except that results take
  the memory of donated arguments. What a program needs for itself isn't counted.
  """
  return tuple(
      max(live_bytes(actor_plan, plan.executables), default=0) for actor_plan in plan.actors
  )


def live_bytes(plan: ActorPlan, executables: Mapping[str, Executable]) -> tuple[int, ...]:
  """The bytes of an actor's slots after each of its `operations`, before them first."""

  def size(slots: Iterable[Slot]) -> int:
    return sum(plan.slots[slot].nbytes for slot in slots)

  live = [size(plan.inputs) + size(slot for slot, _ in plan.constants)]
  for operation in operations(plan):
    instruction = plan.instructions[operation.index]
    change = 0
    if operation.recv is not None:
      # Only now the arrays of the message are made.
      change = size(plan.instructions[operation.recv].slots)
    elif isinstance(instruction, Run):
      change = size(instruction.outputs) - size(donated_slots(instruction, executables))
    elif isinstance(instruction, Free):
      change = -size(instruction.slots)
    live.append(live[-1] + change)
  return tuple(live)


def donated_slots(
    instruction: Instruction, executables: Mapping[str, Executable]
) -> tuple[Slot, ...]:
  """The slots whose memory an instruction takes over."""
  if not isinstance(instruction, Run):
    return ()
  return tuple(instruction.inputs[i] for i in executables[instruction.executable].donated)


def _used(instruction: Instruction) -> tuple[Slot, ...]:
  if isinstance(instruction, Run):
    return instruction.inputs
  return instruction.slots if isinstance(instruction, Send) else ()


def _made(instruction: Instruction) -> tuple[Slot, ...]:
  if isinstance(instruction, Run):
    return instruction.outputs
  return instruction.slots if isinstance(instruction, Recv) else ()
