"""The runs of a step, actor by actor, and the values that each reads and makes.

The first half of lowering: a schedule and a compiled step become, for each actor, the list of the
programs it runs. Every value gets a key that is made once per actor, also the successive values
of a carry, so that what follows need not know about microbatches, carries or phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import enum
from typing import Any

from pax_mpmd import errors
from pax_mpmd.compile.program import Carry
from pax_mpmd.compile.program import Operand
from pax_mpmd.compile.program import OperandKind
from pax_mpmd.compile.program import OuterProgram
from pax_mpmd.compile.program import StepProgram
from pax_mpmd.compile.program import ValueId
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import Schedule
from pax_mpmd.schedules import Task
from pax_mpmd.schedules.graph import phases_of_stages
from pax_mpmd.schedules.simulate import cost_function
from pax_mpmd.schedules.simulate import Costs
from pax_mpmd.schedules.validate import checked_tasks

__all__ = ['Key', 'KeyKind', 'Work', 'step_keys', 'work_lists']

_OUTER_COST = 1  # of a prologue or epilogue program, in the unit of a forward task


class KeyKind(enum.IntEnum):
  """What a key names."""

  STEP = 0  # a step value; n is 0
  EDGE = 1  # an edge of microbatch n
  CARRY = 2  # a carry after n of the tasks that touch it, neither its first nor its last value
  INDEX = 3  # the constant n, a microbatch's number


# Looking up an enum's member takes longer than most of what is done with it here.
_EDGE, _CARRY, _INDEX = KeyKind.EDGE, KeyKind.CARRY, KeyKind.INDEX

# (KeyKind, id of the value or carry, n)
Key = tuple[int, int, int]


def step_keys(step: StepProgram) -> Callable[[ValueId], Key]:
  """The key of a step value, as a function of it.

  Where no task touches a carry, its final value is its initial one and has the same key.
  """
  touched = {
      operand.id
      for program in step.tasks.values()
      for operand in program.inputs
      if operand.kind is OperandKind.CARRY
  }
  same = {carry.final: carry.initial for carry in step.carries if carry.id not in touched}
  return lambda value: (KeyKind.STEP, same.get(value, value), 0)


@dataclasses.dataclass(frozen=True)
class Work:
  """One run of a program on an actor.

  Attributes:
    actor: where it runs.
    label: the task's text or the outer program's name.
    stage: the task's stage, None outside the microbatch loop.
    executable: key into StepProgram.executables.
    reads: one key per argument.
    writes: one key per result.
    cost: the time it is taken to need.
  """

  actor: int
  label: str
  stage: int | None
  executable: str
  reads: tuple[Key, ...]
  writes: tuple[Key, ...]
  cost: float


def work_lists(
    step: StepProgram, schedule: Schedule, costs: Costs | None = None
) -> tuple[tuple[Work, ...], ...]:
  """For each actor, what it runs in a step, in order.

  Args:
    step: the compiled step. If none of its tasks is a backward one (evaluation, for example), the
      schedule's forward tasks alone are used.
    schedule: the schedule, for as many stages and actors as the step is cut for. Stages that it
      splits (I, W) must be split in the step; where they are, its B tasks run I and then W.
    costs: see `schedules.simulate`.

  Returns:
    Prologue programs, tasks, epilogue programs. A task without a program is left out.

  Raises:
    ScheduleError: the schedule isn't valid for the step's number of microbatches.
    PlanError: the step was cut for another placement or other phases than the schedule's.
  """
  _check_step(step)
  lists = _scheduled(step, schedule)
  cost = cost_function(costs, step.num_stages)
  step_key = step_keys(step)
  keys = _TaskKeys(step)
  result = []
  for actor, tasks in enumerate(lists):
    works = [_outer_work(program, step_key) for program in step.prologue if program.actor == actor]
    for task in _expanded(tasks, step):
      program = step.tasks.get((task.stage, task.phase.value))
      if program is None:
        continue
      reads, writes = keys.reads_and_writes(task)
      works.append(
          Work(actor, str(task), task.stage, program.executable, reads, writes, cost(task))
      )
    works += [_outer_work(program, step_key) for program in step.epilogue if program.actor == actor]
    result.append(tuple(works))
  return tuple(result)


def _expanded(tasks: Sequence[Task], step: StepProgram) -> Iterator[Task]:
  """The tasks, with I and then W in place of B where the step has programs for these.

  A schedule may split a stage's backward for some microbatches only, but its programs are the same
  for all of them.
  """
  for task in tasks:
    if task.phase is Phase.B and (task.stage, Phase.B.value) not in step.tasks:
      yield dataclasses.replace(task, phase=Phase.I)
      yield dataclasses.replace(task, phase=Phase.W)
    else:
      yield task


def _outer_work(program: OuterProgram, step_key: Callable[[ValueId], Key]) -> Work:
  return Work(
      program.actor,
      program.name,
      None,
      program.executable,
      tuple(map(step_key, program.inputs)),
      tuple(map(step_key, program.outputs)),
      _OUTER_COST,
  )


class _TaskKeys:
  """Gives the operands of tasks their keys; counts how often each carry has been touched.

  It is asked for every operand of every task, so what doesn't depend on the microbatch is found
  once for each program.
  """

  def __init__(self, step: StepProgram):
    self._step_key = step_keys(step)
    self._carries: dict[int, Carry] = {carry.id: carry for carry in step.carries}
    self._touched = dict.fromkeys(self._carries, 0)
    self._touches = dict.fromkeys(self._carries, 0)
    for program in step.tasks.values():
      for operand in program.inputs:
        if operand.kind is OperandKind.CARRY:
          carry = self._carries[operand.id]
          actor = step.placement[program.stage]
          assert carry.actor == actor, f'{program.name} on actor {actor} touches carry {carry}'
          self._touches[operand.id] += step.num_microbatches
    self._patterns = {
        key: (self._pattern(program.inputs), self._pattern(program.outputs))
        for key, program in step.tasks.items()
    }

  def reads_and_writes(self, task: Task) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """The keys of what the next run, of `task`, reads and writes."""
    inputs, outputs = self._patterns[task.stage, task.phase.value]
    reads = self._filled_in(inputs, task.microbatch)
    for kind, carry in inputs:
      if kind is _CARRY:
        self._touched[carry] += 1
    return reads, self._filled_in(outputs, task.microbatch)

  def _pattern(self, operands: Sequence[Operand]) -> list[tuple[KeyKind | None, Any]]:
    """Per operand (None, its key) where that is always the same, else (kind, id)."""
    kinds = {OperandKind.EDGE: _EDGE, OperandKind.CARRY: _CARRY, OperandKind.INDEX: _INDEX}
    return [
        (None, self._step_key(operand.id))
        if operand.kind is OperandKind.STEP
        else (kinds[operand.kind], operand.id)
        for operand in operands
    ]

  def _filled_in(self, pattern: list[tuple[KeyKind | None, Any]], microbatch: int) -> tuple:
    keys: list[Key] = []
    for kind, x in pattern:
      if kind is None:
        keys.append(x)
      elif kind is _CARRY:
        keys.append(self._carried(x))
      else:
        keys.append((kind, x, microbatch))
    return tuple(keys)

  def _carried(self, carry: int) -> Key:
    touched = self._touched[carry]
    if touched == 0:
      return self._step_key(self._carries[carry].initial)
    if touched == self._touches[carry]:
      return self._step_key(self._carries[carry].final)
    return (_CARRY, carry, touched)


def _scheduled(step: StepProgram, schedule: Schedule) -> tuple[tuple[Task, ...], ...]:
  """Each actor's tasks, once schedule and step are known to fit each other."""
  forward_only = all(phase == Phase.F.value for _, phase in step.tasks)
  lists = checked_tasks(schedule, step.num_microbatches, need_backward=not forward_only)
  name = type(schedule).__name__
  for field in ('num_stages', 'num_actors'):
    if getattr(step, field) != getattr(schedule, field):
      raise errors.PlanError(
          f'{name} has {field}={getattr(schedule, field)}, but the step was compiled for {field}='
          f'{getattr(step, field)}. Compile it with this schedule.'
      )
  if tuple(step.placement) != tuple(schedule.placement()):
    raise errors.PlanError(
        f'{name} places the stages on the actors {tuple(schedule.placement())}, but the step was '
        f'compiled for the placement {tuple(step.placement)}. Compile it with this schedule.'
    )
  phases = phases_of_stages(lists, step.num_stages)
  for stage, letter in sorted(step.tasks):
    if Phase(letter) is Phase.B and phases[stage] & {Phase.I, Phase.W}:
      raise errors.PlanError(
          f'{name} splits the backward pass of stage {stage} into I and W, but the step was'
          ' compiled with a whole one (B). Compile it with this schedule.'
      )
  if forward_only:
    lists = tuple(tuple(t for t in tasks if t.phase is Phase.F) for tasks in lists)
  return lists


def _check_step(step: StepProgram) -> None:
  """Asserts what the compiler promises about carries."""
  carried = {carry.id for carry in step.carries}
  initials = [carry.initial for carry in step.carries]
  assert len(set(initials)) == len(initials), f'carries share an initial value: {step.carries}'
  for program in step.tasks.values():
    ins = [operand.id for operand in program.inputs if operand.kind is OperandKind.CARRY]
    outs = [operand.id for operand in program.outputs if operand.kind is OperandKind.CARRY]
    assert sorted(ins) == sorted(outs) and len(set(ins)) == len(ins) and carried.issuperset(ins), (
        f'{program.name} takes the carries {ins} and gives back {outs}'
    )
