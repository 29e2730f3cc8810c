"""Runs a plan on whole numbers, with channels that hold nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import random

from pax_mpmd.plan import Free
from pax_mpmd.plan import Plan
from pax_mpmd.plan import Recv
from pax_mpmd.plan import Run
from pax_mpmd.plan import Send


def evaluate_plan(
    plan: Plan,
    functions: Mapping[str, Callable[..., tuple[int, ...]]],
    inputs: Mapping[tuple[int, int], int],
    seed: int = 0,
) -> dict[tuple[int, int], int]:
  """The results of a plan, (result, piece) -> value; all copies of a piece must be equal.

  See `run_plan` for the arguments.
  """
  results: dict[tuple[int, int], int] = {}
  for actor_plan, held in zip(plan.actors, run_plan(plan, functions, inputs, seed), strict=True):
    for slot, where in zip(actor_plan.outputs, actor_plan.output_values, strict=True):
      assert results.setdefault(where, held[slot]) == held[slot]
  return results


def run_plan(
    plan: Plan,
    functions: Mapping[str, Callable[..., tuple[int, ...]]],
    inputs: Mapping[tuple[int, int], int],
    seed: int = 0,
) -> list[dict[int, int]]:
  """Runs a plan to its end; it must not get stuck.

  One actor at a time goes one instruction further, chosen at random; a message passes only when
  both its ends have come to it. Freed and donated slots are really gone.

  Args:
    plan: the plan.
    functions: executable -> function of its arguments.
    inputs: (argument, piece) -> value.
    seed: of the random choices.

  Returns:
    For each actor, the slots it holds at the end and their values.
  """
  rng = random.Random(seed)
  slots = []
  for actor_plan in plan.actors:
    held = {
        slot: inputs[where]
        for slot, where in zip(actor_plan.inputs, actor_plan.input_values, strict=True)
    }
    held.update((slot, int(array)) for slot, array in actor_plan.constants)
    slots.append(held)
  at = [0] * len(plan.actors)

  def head(actor):
    instructions = plan.actors[actor].instructions
    return instructions[at[actor]] if at[actor] < len(instructions) else None

  def advance(actor) -> bool:
    instruction, held = head(actor), slots[actor]
    if isinstance(instruction, Run):
      args = [held[slot] for slot in instruction.inputs]
      for position in plan.executables[instruction.executable].donated:
        del held[instruction.inputs[position]]
      results = functions[instruction.executable](*args)
      held.update(zip(instruction.outputs, results, strict=True))
    elif isinstance(instruction, Free):
      for slot in instruction.slots:
        del held[slot]
    elif isinstance(instruction, Send):
      answer = head(instruction.dst)
      if not isinstance(answer, Recv) or answer.src != actor:
        return False
      values = [held[slot] for slot in instruction.slots]
      slots[instruction.dst].update(zip(answer.slots, values, strict=True))
      at[instruction.dst] += 1
    else:
      return False  # a Recv goes on with its Send
    at[actor] += 1
    return True

  while True:
    actors = [a for a in range(len(plan.actors)) if head(a) is not None]
    if not actors:
      return slots
    rng.shuffle(actors)
    moved = any(advance(actor) for actor in actors)
    assert moved, f'stuck at {[head(actor) for actor in actors]}'
