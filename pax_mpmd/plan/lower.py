"""Joins a compiled step and a schedule into a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Leaf
from pax_mpmd.compile.program import StepProgram
from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.plan.instructions import Instruction
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.plan.instructions import Recv
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.plan.instructions import Slot
from pax_mpmd.plan.liveness import insert_frees
from pax_mpmd.plan.order import Message
from pax_mpmd.plan.order import messages
from pax_mpmd.plan.order import total_order
from pax_mpmd.plan.work import Key
from pax_mpmd.plan.work import KeyKind
from pax_mpmd.plan.work import step_keys
from pax_mpmd.plan.work import Work
from pax_mpmd.plan.work import work_lists
from pax_mpmd.schedules import Schedule
from pax_mpmd.schedules.simulate import Costs

__all__ = ['lower', 'pieces_by_actor']


def lower(step: StepProgram, schedule: Schedule, costs: Costs | None = None) -> Plan:
  """Lowers a compiled step to the instructions of each actor.

  1. Each actor's runs are listed: its prologue programs, its tasks in the schedule's order, its
     epilogue programs (`work.py`).
  2. Values that are read where they aren't made become messages, and all runs and messages are
     put into one order, which each actor then follows (`order.py` says why this can't deadlock,
     also when channels hold nothing).
  3. Slots are given out, and freed after their last use (`liveness.py`).

  Takes time linear in the number of tasks, up to a logarithm of the number of actors. The caller
  runs `verify` on the result.

  Args:
    step: the compiled step; if it has no backward programs (evaluation, for example), only the
      forward tasks of the schedule are used.
    schedule: the schedule; its placement must be the one the step was compiled for.
    costs: times of the tasks as `schedules.simulate` takes them; they decide only how messages
      are ordered relative to the runs of the receiver.

  Returns:
    The plan.

  Raises:
    ScheduleError: the schedule isn't valid for the step's number of microbatches.
    PlanError: the step was compiled for another placement or other phases.
  """
  lists = work_lists(step, schedule, costs)
  inputs, input_values = pieces_by_actor(step, step.inputs)
  outputs, output_values = pieces_by_actor(step, step.outputs)
  builders = [_Builder(step, keys) for keys in inputs]
  for event in total_order(lists, messages(lists, inputs, outputs)):
    if isinstance(event, Message):
      slots = builders[event.src].send(event)
      avals = [builders[event.src].slots[slot] for slot in slots]
      builders[event.dst].recv(event, avals)
    else:
      builders[event.actor].run(event)
  return Plan(
      actors=tuple(
          builder.finish(actor, input_values[actor], outputs[actor], output_values[actor])
          for actor, builder in enumerate(builders)
      ),
      executables=dict(step.executables),
  )


class _Builder:
  """One actor's plan as it grows. Slots are given out in the order in which they are filled."""

  def __init__(self, step: StepProgram, inputs: Sequence[Key]):
    self._step = step
    self.slots: list[Aval] = []
    self._slot_of: dict[Key, Slot] = {}
    self._instructions: list[Instruction] = []
    self._constants: list[tuple[Slot, np.ndarray]] = []
    self._inputs = tuple(self._define(key, step.values[key[1]]) for key in inputs)

  def run(self, work: Work) -> None:
    executable = self._step.executables[work.executable]
    assert len(work.writes) == len(executable.outputs), f'{work} does not fit {executable}'
    slots = tuple(map(self._read, work.reads))
    outputs = tuple(map(self._define, work.writes, executable.outputs))
    self._instructions.append(Run(work.executable, slots, outputs, work.label, work.stage))

  def send(self, message: Message) -> tuple[Slot, ...]:
    slots = tuple(self._slot_of[key] for key in message.keys)
    self._instructions.append(Send(message.dst, slots, message.label))
    return slots

  def recv(self, message: Message, avals: Sequence[Aval]) -> None:
    slots = tuple(map(self._define, message.keys, avals))
    self._instructions.append(Recv(message.src, slots, message.label))

  def finish(
      self,
      actor: int,
      input_values: Sequence[tuple[int, int]],
      outputs: Sequence[Key],
      output_values: Sequence[tuple[int, int]],
  ) -> ActorPlan:
    """The plan, with Free instructions."""
    output_slots = tuple(self._slot_of[key] for key in outputs)
    kept = {*output_slots, *(slot for slot, _ in self._constants)}
    return ActorPlan(
        actor=actor,
        slots=tuple(self.slots),
        inputs=self._inputs,
        input_values=tuple(input_values),
        constants=tuple(self._constants),
        instructions=insert_frees(
            self._instructions, self._inputs, kept, self._step.executables
        ),
        outputs=output_slots,
        output_values=tuple(output_values),
    )

  def _define(self, key: Key, aval: Aval) -> Slot:
    assert key not in self._slot_of, f'{key} is made twice'
    self._slot_of[key] = len(self.slots)
    self.slots.append(aval)
    return self._slot_of[key]

  def _read(self, key: Key) -> Slot:
    if key[0] == KeyKind.INDEX and key not in self._slot_of:
      number = np.asarray(key[2], dtype=np.int32)
      self._constants.append((self._define(key, Aval((), 'int32')), number))
    return self._slot_of[key]


def pieces_by_actor(
    step: StepProgram, leaves: Sequence[Leaf]
) -> tuple[list[list[Key]], list[list[tuple[int, int]]]]:
  """For each actor, the values of the pieces that it holds and their (leaf, piece) positions."""
  key_of = step_keys(step)
  keys: list[list[Key]] = [[] for _ in range(step.num_actors)]
  positions: list[list[tuple[int, int]]] = [[] for _ in range(step.num_actors)]
  for i, leaf in enumerate(leaves):
    for j, piece in enumerate(leaf.pieces):
      for actor in piece.actors:
        keys[actor].append(key_of(piece.value))
        positions[actor].append((i, j))
  return keys, positions
