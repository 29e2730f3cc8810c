"""What an actor does with its instructions, in order: where it only asks, and where it waits."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.plan.instructions import Free
from pax_mpmd.plan.instructions import Instruction
from pax_mpmd.plan.instructions import Recv
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.plan.instructions import Slot

__all__ = ['Operation', 'operations']


@dataclasses.dataclass(frozen=True)
class Operation:
  """One thing to do.

  Attributes:
    index: of the instruction that it is done for.
    recv: None: the instruction itself (of a Recv, asking for its message). Else the index of a
      Recv whose message is waited for here.
  """

  index: int
  recv: int | None = None


def operations(
    plan: ActorPlan, strict: Callable[[int], bool] = lambda src: False
) -> tuple[Operation, ...]:
  """Puts each wait for a message directly before the first instruction that reads of it.

  So an actor waits for less than its plan's own order would have it, and what has been proved of
  that order still holds.

  Args:
    plan: one actor's plan.
    strict: whether a Recv from that actor waits at its place instead.

  Returns:
    Every instruction once, in order, and one wait for each Recv.
  """
  result: list[Operation] = []
  waiting: dict[Slot, int] = {}  # slot -> index of the Recv that fills it

  def wait(index: int, recv: int) -> None:
    for slot in plan.instructions[recv].slots:
      waiting.pop(slot, None)
    result.append(Operation(index, recv))

  for index, instruction in enumerate(plan.instructions):
    for slot in _reads(instruction):
      if slot in waiting:
        wait(index, waiting[slot])
    result.append(Operation(index))
    if isinstance(instruction, Recv):
      waiting.update(dict.fromkeys(instruction.slots, index))
      if strict(instruction.src) or not instruction.slots:
        wait(index, index)
  for recv in sorted(set(waiting.values())):
    wait(recv, recv)
  return tuple(result)


def _reads(instruction: Instruction) -> tuple[Slot, ...]:
  if isinstance(instruction, Run):
    return instruction.inputs
  if isinstance(instruction, (Send, Free)):
    # A Free counts: the message must be taken off the channel before its slot is forgotten.
    return instruction.slots
  return ()
