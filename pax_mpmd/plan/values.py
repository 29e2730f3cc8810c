"""Checks that a plan computes what the step means: every run reads the values it should.

`verify` knows slots and messages, but not what should be in them. Here the value of each slot of a
valid plan is followed back to where it is made, and compared with what the step and the schedule
say (`work.py`):
  * each actor gets its pieces of the arguments, and gives back its pieces of the results;
  * each actor runs the schedule's list: the same programs in the same order;
  * each argument of a run, and each result of the step, is the value named there.
A value is named by its key. Runs that make the same key make the same value (a scalar may be
computed by several actors), so the plan computes what the tasks, run one after the other, compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from pax_mpmd import errors
from pax_mpmd.compile.program import StepProgram
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.plan.instructions import Recv
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.plan.instructions import Slot
from pax_mpmd.plan.lower import pieces_by_actor
from pax_mpmd.plan.verify import where
from pax_mpmd.plan.work import Key
from pax_mpmd.plan.work import KeyKind
from pax_mpmd.plan.work import Work
from pax_mpmd.plan.work import work_lists
from pax_mpmd.schedules import Schedule

__all__ = ['verify_values']


def verify_values(plan: Plan, step: StepProgram, schedule: Schedule) -> None:
  """Checks that a plan computes a step. Takes time linear in the number of instructions.

  Args:
    plan: a plan that `verify` has accepted.
    step: the compiled step.
    schedule: the schedule it was lowered with.

  Raises:
    PlanError: it doesn't; the message names the actor, the instruction and the slot.
    ScheduleError: the schedule isn't valid for the step.
  """
  lists = work_lists(step, schedule)
  inputs, input_values = pieces_by_actor(step, step.inputs)
  outputs, output_values = pieces_by_actor(step, step.outputs)
  if len(plan.actors) != step.num_actors:
    raise errors.PlanError(
        f'The plan has {len(plan.actors)} actors, but the step is for {step.num_actors}.'
    )
  for actor, actor_plan in enumerate(plan.actors):
    for what, found, wanted in (
        ('inputs', actor_plan.input_values, input_values[actor]),
        ('outputs', actor_plan.output_values, output_values[actor]),
    ):
      if list(found) != list(wanted):
        raise errors.PlanError(
            f'actor {actor}: the plan has other {what} than the step: {list(found)[:6]} ..., not '
            f'{list(wanted)[:6]} ...'
        )
  values = _Values(plan, lists, inputs)
  for actor, actor_plan in enumerate(plan.actors):
    works = iter(lists[actor])
    for position, instruction in enumerate(actor_plan.instructions):
      if isinstance(instruction, Run):
        wanted = zip(instruction.inputs, next(works).reads, strict=True)
        values.check(actor, wanted, position)
    values.check(actor, zip(actor_plan.outputs, outputs[actor], strict=True), None)


class _Values:
  """The key of what each slot holds.

  Raises:
    PlanError: an actor's runs aren't those of its list.
  """

  def __init__(self, plan: Plan, lists: Sequence[Sequence[Work]], inputs: Sequence[Sequence[Key]]):
    self._plan = plan
    self._made: list[dict[Slot, Key]] = []
    self._received: list[dict[Slot, tuple[int, Slot]]] = []  # slot -> (sender, its slot)
    sent: dict[tuple[int, int], list[Send]] = {}
    for actor, actor_plan in enumerate(plan.actors):
      self._made.append(dict(zip(actor_plan.inputs, inputs[actor], strict=True)))
      for slot, number in actor_plan.constants:
        self._made[actor][slot] = (KeyKind.INDEX, -1, int(number))
      self._match_runs(actor, lists[actor])
      for instruction in actor_plan.instructions:
        if isinstance(instruction, Send):
          sent.setdefault((actor, instruction.dst), []).append(instruction)
    for actor, actor_plan in enumerate(plan.actors):
      channels = {src: iter(sends) for (src, dst), sends in sent.items() if dst == actor}
      self._received.append({})
      for instruction in actor_plan.instructions:
        if isinstance(instruction, Recv):
          slots = next(channels[instruction.src]).slots
          self._received[actor].update(
              (slot, (instruction.src, other))
              for slot, other in zip(instruction.slots, slots, strict=True)
          )

  def _match_runs(self, actor: int, works: Sequence[Work]) -> None:
    plan = self._plan.actors[actor]
    runs = [(p, i) for p, i in enumerate(plan.instructions) if isinstance(i, Run)]
    for (position, run), work in zip(runs, works, strict=False):
      if (run.label, run.executable) != (work.label, work.executable):
        raise errors.PlanError(
            f'{where(plan, position)}: the schedule has {work.label} there, with the program '
            f'{work.executable!r}; the plan runs {run.executable!r}.'
        )
      self._made[actor].update(zip(run.outputs, work.writes, strict=True))
    if len(runs) != len(works):
      raise errors.PlanError(
          f'actor {actor}: the plan has {len(runs)} runs, but the schedule {len(works)}.'
      )

  def _of(self, actor: int, slot: Slot) -> Key:
    while slot in self._received[actor]:
      actor, slot = self._received[actor][slot]
    return self._made[actor][slot]

  def check(self, actor: int, wanted, position: int | None) -> None:
    """Compares slots of an actor with the keys they should hold at an instruction, or the end."""
    for slot, key in wanted:
      found = self._of(actor, slot)
      if found != key:
        plan = self._plan.actors[actor]
        place = f'actor {actor}, at the end' if position is None else where(plan, position)
        raise errors.PlanError(
            f'{place}: slot %{slot} holds {_named(found)}, but {_named(key)} is needed there.'
        )


def _named(key: Key) -> str:
  kind, number, n = key
  return {
      KeyKind.STEP: f'value {number} of the step',
      KeyKind.EDGE: f'edge {number} of microbatch {n}',
      KeyKind.CARRY: f'sum {number} after {n} tasks',
      KeyKind.INDEX: f'the number {n}',
  }[KeyKind(kind)]
