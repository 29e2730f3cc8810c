"""The verifier: what is refused, and what is said; test_mutations.py tries every mistake."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pax_mpmd import errors
from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Executable
from pax_mpmd.plan import ActorPlan
from pax_mpmd.plan import format_instruction
from pax_mpmd.plan import Free
from pax_mpmd.plan import lower
from pax_mpmd.plan import Plan
from pax_mpmd.plan import Recv
from pax_mpmd.plan import Run
from pax_mpmd.plan import Send
from pax_mpmd.plan import verify
from pax_mpmd.schedules import OneFOneB
from tests.plan.synthetic import synthetic_step

SCHEDULE = OneFOneB(3)
STEP = synthetic_step(SCHEDULE.placement(), 3).step
GOOD = lower(STEP, SCHEDULE)
PLACES = [
    (actor, position)
    for actor, actor_plan in enumerate(GOOD.actors)
    for position in range(len(actor_plan.instructions))
]


def with_instructions(actor, instructions, plan=GOOD):
  """The plan with another list for an actor."""
  actors = list(plan.actors)
  actors[actor] = dataclasses.replace(actors[actor], instructions=tuple(instructions))
  return dataclasses.replace(plan, actors=tuple(actors))


def with_fields(index, **changes):
  """The good plan with fields of one actor's plan changed."""
  actors = list(GOOD.actors)
  actors[index] = dataclasses.replace(actors[index], **changes)
  return dataclasses.replace(GOOD, actors=tuple(actors))


def refused(plan, *words):
  """The message with which a plan is refused; all words are in it."""
  with pytest.raises(errors.PlanError) as e:
    verify(plan)
  for word in words:
    assert word in str(e.value), str(e.value)
  return str(e.value)


def test_the_good_plan():
  """The plan that the other tests break is valid."""
  verify(GOOD)


def test_moving_a_message_is_harmless_or_refused():
  """A Send or Recv moved within its list is refused, or the plan still runs without capacity."""
  refusals = 0
  for actor, position in PLACES:
    instructions = list(GOOD.actors[actor].instructions)
    if not isinstance(instructions[position], Send | Recv):
      continue
    moved = instructions.pop(position)
    for to in range(len(instructions) + 1):
      plan = with_instructions(actor, [*instructions[:to], moved, *instructions[to:]])
      expected = runs_to_the_end(plan)
      try:
        verify(plan)
        assert expected
      except errors.PlanError:
        refusals += 1
        assert not expected
  assert refusals > 100


def runs_to_the_end(plan: Plan) -> bool:
  """Whether a plan can be run when channels hold nothing; a slow, separate way to find out.

  Also that every message is the one that its label says, and that nothing is left over.
  """
  slots = [{*a.inputs, *(slot for slot, _ in a.constants)} for a in plan.actors]
  todo = [list(a.instructions) for a in plan.actors]
  moved = True
  while moved:
    moved = False
    for actor, instructions in enumerate(todo):
      if not instructions:
        continue
      instruction = instructions[0]
      if isinstance(instruction, Recv):
        continue
      used = instruction.inputs if isinstance(instruction, Run) else instruction.slots
      if not slots[actor].issuperset(used):
        return False
      if isinstance(instruction, Run):
        donated = plan.executables[instruction.executable].donated
        slots[actor] -= {instruction.inputs[i] for i in donated}
        slots[actor] |= set(instruction.outputs)
      elif isinstance(instruction, Free):
        slots[actor] -= set(instruction.slots)
      else:
        answer = todo[instruction.dst][0] if todo[instruction.dst] else None
        if not isinstance(answer, Recv) or answer.src != actor:
          continue
        if answer.label != instruction.label:
          return False
        slots[instruction.dst] |= set(answer.slots)
        del todo[instruction.dst][0]
      del instructions[0]
      moved = True
  kept = [{*a.outputs, *(slot for slot, _ in a.constants)} for a in plan.actors]
  return not any(todo) and slots == kept


def test_the_instruction_is_named():
  """The message names actor, position and text, with the task."""
  position, run = next(
      (p, i)
      for p, i in enumerate(GOOD.actors[1].instructions)
      if isinstance(i, Run) and i.label == '1B1'
  )
  instructions = list(GOOD.actors[1].instructions)
  recv = next(
      p for p, i in enumerate(instructions) if isinstance(i, Recv) and i.label == '2B1'
  )
  slot = instructions[recv].slots[0]
  assert slot in run.inputs
  moved = [i for p, i in enumerate(instructions) if p != recv]
  moved.insert(position, instructions[recv])
  refused(
      with_instructions(1, moved), 'actor 1', f'instruction {position - 1}',
      format_instruction(run), f'%{slot}, which has not been filled',
  )


def test_swapped_messages_of_a_channel():
  """Two Recvs of a channel in the wrong order are named with the Send they meet."""
  instructions = list(GOOD.actors[1].instructions)
  first, second = (
      p for p, i in enumerate(instructions)
      if isinstance(i, Recv) and i.label in ('0F0', '0F1')
  )
  a, b = instructions[first], instructions[second]
  instructions[first] = dataclasses.replace(a, label=b.label)
  instructions[second] = dataclasses.replace(b, label=a.label)
  refused(with_instructions(1, instructions), 'from actor 0 to actor 1', '0F0', '0F1', 'labels')


def tiny(*lists, slots=1):
  """A plan of actors that only exchange float32 values, `slots` inputs each."""
  aval = Aval((), 'float32')
  plans = []
  for actor, instructions in enumerate(lists):
    made = [s for i in instructions if isinstance(i, Recv) for s in i.slots]
    count = 1 + max([slots - 1, *made])
    plans.append(
        ActorPlan(
            actor=actor,
            slots=(aval,) * count,
            inputs=tuple(range(slots)),
            input_values=tuple((s, 0) for s in range(slots)),
            constants=(),
            instructions=tuple(instructions),
            outputs=tuple(range(count)),
            output_values=tuple((s, 0) for s in range(count)),
        )
    )
  return Plan(tuple(plans), {})


def test_two_actors_that_both_send_first():
  """Send against send hangs when channels hold nothing, and is refused with both named."""
  lists = [[Send(1, (0,), 'a'), Recv(1, (1,), 'b')], [Send(0, (0,), 'b'), Recv(0, (1,), 'a')]]
  refused(
      tiny(*lists), 'hang', 'actor 0, instruction 0 (send a to actor 1: %0) waits for actor 1',
      'actor 1, instruction 0 (send b to actor 0: %0) waits for actor 0',
  )
  verify(tiny(lists[0], lists[1][::-1]))


def test_a_cycle_of_three_with_a_bystander():
  """Only the actors of the cycle are named, though another waits for one of them."""
  ring = [[Send((a + 1) % 3, (0,), f's{a}'), Recv((a - 1) % 3, (1,), f's{(a - 1) % 3}')]
          for a in range(3)]
  ring[0].append(Recv(3, (2,), 'late'))
  message = refused(
      tiny(*ring, [Send(0, (0,), 'late')]), *(f'waits for actor {a}' for a in range(3))
  )
  assert 'late' not in message


@pytest.mark.parametrize(
    'lists, words',
    [
        ([[Send(0, (0,), 'a')]], ['actor 0', 'another actor']),
        ([[Send(2, (0,), 'a')], []], ['actor 2', '0 to 1']),
        ([[Send(1, (), 'a')], [Recv(0, (), 'a')]], ['without values']),
        ([[Send(1, (0,), 'a')], []], ['from actor 0 to actor 1', 'no Recv', '1 sends, 0 rec']),
        ([[], [Recv(0, (1,), 'a')]], ['from actor 0 to actor 1', 'no Send', '0 sends, 1 rec']),
        ([[Send(1, (0,), 'a')], [Recv(0, (1, 2), 'a')]], ['(float32[])', '(float32[], float32[])']),
        ([[Send(1, (5,), 'a')], [Recv(0, (1,), 'a')]], ['%5', 'not been filled']),
        ([[Send(1, (0,), 'a')], [Recv(0, (0,), 'a')]], ['%0', 'second time']),
        ([['send']], ["'send'", 'not a Run']),
        ([[Free((0,))]], ['at the end', '%0', 'was freed by actor 0, instruction 0']),
        ([[Run('x', (0,), (), 'r')]], ["'x'", 'does not have']),
    ],
)
def test_wrong_instructions(lists, words):
  """Wrong peers, slots, values and programs are refused."""
  refused(tiny(*lists), *words)


@pytest.mark.parametrize(
    'executable, run, words',
    [
        ((((1,),), (), ()), Run('p', (0,), (), 'r'), ['%0 is float32[]', 'float32[1]']),
        (((), ((1,),), ()), Run('p', (), (1,), 'r'), ['%1 is float32[]', 'float32[1]']),
        ((((),), (), ()), Run('p', (), (), 'r'), ['0 slots for the 1 arguments']),
        (((), ((),), ()), Run('p', (), (), 'r'), ['0 slots for the 1 results']),
        ((((), ()), (), (0,)), Run('p', (0, 0), (), 'r'), ['donates slot %0', 'also reads']),
        ((((),), (), (1,)), Run('p', (0,), (), 'r'), ['donates argument 1']),
        ((((),), (), (0,)), Run('p', (0,), (), 'r'), ['at the end', '%0', 'was donated to']),
        (((), ((),), ()), Run('p', (), (9,), 'r'), ['%9', '0 to 1']),
    ],
)
def test_runs_must_fit_their_program(executable, run, words):
  """Numbers, shapes and donations of a run must be those of its program."""
  ins, outs, donated = executable
  program = Executable(
      'p', tuple(Aval(s, 'float32') for s in ins), tuple(Aval(s, 'float32') for s in outs),
      donated, b'',
  )
  plan = tiny([run])
  actor_plan = dataclasses.replace(plan.actors[0], slots=(Aval((), 'float32'),) * 2)
  refused(Plan((actor_plan,), {'p': program}), 'actor 0', *words)


def test_constants_stay():
  """A constant can neither be freed nor donated, and has its slot's dtype."""
  one = Aval((), 'int32')
  program = Executable('p', (one,), (), (0,), b'')
  plan = ActorPlan(0, (one,), (), (), ((0, np.int32(3)),), (), (), ())
  verify(Plan((plan,), {}))
  for instruction, word in ((Free((0,)), 'frees'), (Run('p', (0,), (), 'r'), 'donates')):
    broken = dataclasses.replace(plan, instructions=(instruction,))
    refused(Plan((broken,), {'p': program}), word, 'constant')
  wrong = dataclasses.replace(plan, constants=((0, np.int64(3)),))
  refused(Plan((wrong,), {}), 'int64[]', 'int32[]')


def test_headers():
  """The numbers of inputs, outputs and their values agree; actors stand at their own index."""
  refused(with_fields(1, actor=0), 'Plan.actors[1]', 'actor 0')
  refused(with_fields(0, input_values=()), 'input_values')
  refused(with_fields(0, output_values=()), 'output_values')
  refused(with_fields(0, outputs=(), output_values=()), 'still held')
  refused(with_fields(0, inputs=(), input_values=()), 'not been filled')
