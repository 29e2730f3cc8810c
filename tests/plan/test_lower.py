"""Lowering: plans give what the step's definition gives, for any schedule."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import time

import pytest

from pax_mpmd import errors
from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Leaf
from pax_mpmd.compile.program import Piece
from pax_mpmd.plan import Free
from pax_mpmd.plan import lower
from pax_mpmd.plan import Recv
from pax_mpmd.plan import Run
from pax_mpmd.plan import Send
from pax_mpmd.plan import verify
from pax_mpmd.schedules import FromTable
from pax_mpmd.schedules import GPipe
from pax_mpmd.schedules import InterleavedOneFOneB
from pax_mpmd.schedules import OneFOneB
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import Schedule
from pax_mpmd.schedules.graph import phases_of_stages
from tests.plan.evaluate import evaluate_plan
from tests.plan.synthetic import evaluate_step
from tests.plan.synthetic import synthetic_step
from tests.schedules.random_schedules import random_schedule


def phases_of(schedule: Schedule, num_microbatches: int) -> list[str]:
  """For each stage 'FB', 'FIW' or 'F', as `synthetic_step` takes them."""
  found = phases_of_stages(schedule.tasks(num_microbatches), schedule.num_stages)
  return ['FIW' if Phase.I in p else 'FB' if Phase.B in p else 'F' for p in found]


def check(schedule: Schedule, num_microbatches: int):
  """Lowers the synthetic step, verifies the plan and compares its results; returns the plan."""
  synthetic = synthetic_step(
      schedule.placement(), num_microbatches, phases_of(schedule, num_microbatches)
  )
  plan = lower(synthetic.step, schedule)
  verify(plan)
  want = evaluate_step(synthetic)
  for seed in range(3):
    assert evaluate_plan(plan, synthetic.functions, synthetic.inputs, seed) == want
  return plan


def runs(plan, actor):
  """The labels of an actor's runs."""
  return [i.label for i in plan.actors[actor].instructions if isinstance(i, Run)]


@pytest.mark.parametrize(
    'schedule, m',
    [
        (GPipe(1), 3),
        (GPipe(4), 8),
        (GPipe(4), 1),
        (GPipe(5, 2), 3),
        (OneFOneB(2), 2),
        (OneFOneB(4), 8),
        (OneFOneB(8), 3),
        (OneFOneB(4, 1), 3),
        (InterleavedOneFOneB(8, 4), 8),
        (InterleavedOneFOneB(6, 2), 5),
        (FromTable('0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1F1 1I1 1W0 1W1\n'), 2),
        (FromTable('0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1I1 1W0 1W1\n'), 2),
    ],
)
def test_same_result_as_the_definition(schedule, m):
  """Every family gives the step's results, whichever actor is faster."""
  plan = check(schedule, m)
  for actor, tasks in enumerate(schedule.tasks(m)):
    labels = runs(plan, actor)
    assert [label for label in labels if label[0].isdigit()] == list(map(str, tasks))


@pytest.mark.parametrize('phases', ['FB', 'FIW', 'mixed', 'each'])
def test_100_random_schedules(phases):
  """100 random valid schedules over 3 actors, 3 stages, 4 microbatches: none hangs, all equal."""
  for seed in range(100):
    check(random_schedule(seed, 3, 3, 4, phases), 4)


def test_random_schedules_with_several_stages_per_actor():
  """Random orders and placements of 6 stages on 3 actors give the step's results."""
  for seed in range(30):
    check(random_schedule(seed, 6, 3, 3, 'each'), 3)


def test_opposite_sends_between_actors_that_are_not_neighbours():
  """Actors 0 and 2 send to each other, in opposite orders, while channels hold nothing."""
  schedule = FromTable('0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2B0 2F1 2B1\n')
  plan = check(schedule, 2)
  peers = {
      actor: {
          (type(i).__name__, i.dst if isinstance(i, Send) else i.src)
          for i in plan.actors[actor].instructions
          if isinstance(i, Send | Recv)
      }
      for actor in (0, 2)
  }
  assert {('Send', 2), ('Recv', 2)} <= peers[0]
  assert {('Send', 0), ('Recv', 0)} <= peers[2]


def test_forward_only_step_uses_the_forward_tasks():
  """A step without backward programs runs the schedule's forward tasks in its order."""
  schedule = OneFOneB(3)
  synthetic = synthetic_step(schedule.placement(), 4, ['F'] * 3)
  plan = lower(synthetic.step, schedule)
  verify(plan)
  got = evaluate_plan(plan, synthetic.functions, synthetic.inputs)
  assert got == evaluate_step(synthetic)
  assert runs(plan, 1)[-4:] == ['1F0', '1F1', '1F2', '1F3']
  table = FromTable([[f'{s}F{m}' for m in range(4)] for s in range(3)])
  assert lower(synthetic.step, table).actors == plan.actors


def test_an_empty_task_has_no_instruction():
  """Where a stage has nothing to do in a phase, nothing runs, and its carry stays as it was."""
  schedule = FromTable('0F0 0I0 0W0 0F1 0I1 0W1\n')
  synthetic = synthetic_step((0,), 2, ['FIW'], empty=[(0, 'W')])
  plan = lower(synthetic.step, schedule)
  verify(plan)
  got = evaluate_plan(plan, synthetic.functions, synthetic.inputs)
  assert got == evaluate_step(synthetic)
  assert [label for label in runs(plan, 0) if label[0].isdigit()] == ['0F0', '0I0', '0F1', '0I1']


def test_one_message_for_all_that_a_run_makes_for_an_actor():
  """The skip edge and the activation go to the same actor of two stages in one message."""
  schedule = FromTable('0F0 0B0\n1F0 2F0 2B0 1B0\n')
  plan = check(schedule, 1)
  sends = [i for i in plan.actors[0].instructions if isinstance(i, Send) and i.label == '0F0']
  assert [len(send.slots) for send in sends] == [2]


def test_a_value_goes_to_an_actor_once():
  """The learning rate is read by the updates of two stages on an actor, but sent there once."""
  plan = check(GPipe(4, 2), 2)
  sends = [i for i in plan.actors[0].instructions if isinstance(i, Send)]
  assert [send.label for send in sends].count('prologue.rate') == 1


def test_sends_follow_the_run_that_makes_their_values():
  """Nothing but messages and frees stands between a run and the sends of its results."""
  for seed in range(20):
    schedule = random_schedule(seed, 4, 3, 3, 'mixed')
    plan = check(schedule, 3)
    for actor_plan in plan.actors:
      label = 'input'
      for instruction in actor_plan.instructions:
        if isinstance(instruction, Run):
          label = instruction.label
        elif isinstance(instruction, Send):
          assert instruction.label == label


def test_middle_actors_pass_on_before_they_take_the_next():
  """Where an actor can send and receive at the same time, it sends first."""
  plan = check(GPipe(3), 3)
  instructions = [i for i in plan.actors[1].instructions if not isinstance(i, Free)]
  first = next(k for k, i in enumerate(instructions) if isinstance(i, Run) and i.label == '1F0')
  assert [(type(i).__name__, i.label) for i in instructions[first : first + 4]] == [
      ('Run', '1F0'), ('Send', '1F0'), ('Recv', '0F1'), ('Run', '1F1'),
  ]


def test_no_wait_for_a_message_while_there_is_something_to_do():
  """A message isn't put before runs that start while its values are still being made."""
  # 0F1 starts when 1F0 does, but takes longer than 1F0 and 1B0, which must not wait for it.
  schedule = OneFOneB(2)
  synthetic = synthetic_step(schedule.placement(), 2)
  plan = lower(synthetic.step, schedule, {(0, Phase.F): 5, (1, Phase.F): 1, (1, Phase.B): 1})
  verify(plan)
  order = [
      (type(i).__name__, i.label)
      for i in plan.actors[1].instructions
      if not isinstance(i, Free) and i.label in ('0F0', '1F0', '1B0', '0F1')
  ]
  assert order == [
      ('Recv', '0F0'), ('Run', '1F0'), ('Run', '1B0'), ('Send', '1B0'), ('Recv', '0F1'),
  ]


def test_an_input_is_sent_to_an_actor_that_reads_it_but_has_no_piece():
  """A step input that only one actor gets reaches another reader at the very beginning."""
  schedule = GPipe(2)
  synthetic = synthetic_step(schedule.placement(), 2)
  step = synthetic.step
  leaves = list(step.inputs)
  (tied,) = leaves[1].pieces
  leaves[1] = dataclasses.replace(
      leaves[1], pieces=(dataclasses.replace(tied, actors=(0,)),)
  )
  plan = lower(dataclasses.replace(step, inputs=tuple(leaves)), schedule)
  verify(plan)
  got = evaluate_plan(plan, synthetic.functions, synthetic.inputs)
  assert got == evaluate_step(synthetic)
  first = next(i for i in plan.actors[1].instructions if not isinstance(i, Free))
  assert isinstance(first, Recv) and first.label == 'input'


def test_inputs_as_results():
  """A result may be an argument's piece, also twice, and on an actor that doesn't get it."""
  schedule = GPipe(2)
  synthetic = synthetic_step(schedule.placement(), 2)
  step = synthetic.step
  unread = step.inputs[4].pieces[0].value
  result = Leaf(Aval((3,), 'float32'), (Piece(unread, (0,), (0, 1)),))
  plan = lower(dataclasses.replace(step, outputs=(*step.outputs, result, result)), schedule)
  verify(plan)
  got = evaluate_plan(plan, synthetic.functions, synthetic.inputs)
  n = len(step.outputs)
  assert got[n, 0] == got[n + 1, 0] == synthetic.inputs[4, 0]


def test_index_constants_are_shared():
  """There is one int32 slot per microbatch number on an actor, however many tasks read it."""
  plan = check(GPipe(2, 1), 3)
  (actor_plan,) = plan.actors
  assert [(int(a), str(a.dtype), a.shape) for _, a in actor_plan.constants] == [
      (m, 'int32', ()) for m in range(3)
  ]


def test_live_activations_follow_the_schedule():
  """The number of residuals held at a time is the schedule's, not the number of microbatches."""
  schedule = OneFOneB(4)
  for m in (4, 16):
    plan = check(schedule, m)
    held, most = set(), 0
    for instruction in plan.actors[0].instructions:
      if isinstance(instruction, Run) and instruction.label.startswith('0F'):
        residual = instruction.outputs[1]
        held.add(residual)
      elif isinstance(instruction, Free):
        held -= set(instruction.slots)
      most = max(most, len(held))
    assert most == 4


def test_plans_pickle():
  """A plan is plain data."""
  plan = check(OneFOneB(2), 2)
  copy = pickle.loads(pickle.dumps(plan))
  assert [a.instructions for a in copy.actors] == [a.instructions for a in plan.actors]


@pytest.mark.parametrize(
    'schedule, words',
    [
        (GPipe(4), ['num_stages=4', 'num_stages=3']),
        (GPipe(3, 2), ['num_actors=2', 'num_actors=3']),
        (FromTable('1F0 1B0\n0F0 0B0\n2F0 2B0\n'), ['(1, 0, 2)', '(0, 1, 2)']),
        (FromTable('0F0 0B0\n1F0 1I0 1W0\n2F0 2B0\n'), ['splits', 'stage 1', '(B)']),
    ],
)
def test_a_schedule_the_step_was_not_compiled_for(schedule, words):
  """Another placement, size or sort of backward than the step's is refused."""
  step = synthetic_step((0, 1, 2), 1).step
  with pytest.raises(errors.PlanError) as e:
    lower(step, schedule)
  for word in words:
    assert word in str(e.value)


def test_split_programs_under_whole_tasks():
  """Where a stage's programs are split, a B task runs I and then W."""
  schedule = FromTable('0F0 0F1 0B0 0I1 0W1\n1F0 1I0 1F1 1B1 1W0\n')
  plan = check(schedule, 2)
  tasks = [label for label in runs(plan, 1) if label[0].isdigit()]
  assert tasks == ['1F0', '1I0', '1F1', '1I1', '1W1', '1W0']
  synthetic = synthetic_step((0, 1), 2, ['FIW', 'FIW'])
  plan = lower(synthetic.step, GPipe(2))
  verify(plan)
  assert evaluate_plan(plan, synthetic.functions, synthetic.inputs, 0) == evaluate_step(synthetic)


def test_an_invalid_schedule_is_refused_first():
  """The schedule is checked for the step's number of microbatches."""
  step = synthetic_step((0, 1), 2).step
  with pytest.raises(errors.ScheduleError, match=r'1B0 \(actor 1\) needs 1F0'):
    lower(step, FromTable('0F0 0F1 0B0 0B1\n1B0 1F0 1F1 1B1\n'))


def test_a_step_that_reads_against_the_pipeline_is_refused():
  """A valid schedule that the programs' own reads turn into a cycle is refused with the cycle."""
  schedule = GPipe(3)
  step = synthetic_step(schedule.placement(), 2).step
  forward, backward = step.tasks[0, 'F'], step.tasks[2, 'B']
  back_skip = next(o for o in backward.outputs if o in step.tasks[0, 'B'].inputs)
  forward = dataclasses.replace(forward, inputs=(*forward.inputs, back_skip))
  with pytest.raises(errors.PlanError, match=r'2B0 \(actor 2\) makes') as e:
    lower(dataclasses.replace(step, tasks={**step.tasks, (0, 'F'): forward}), schedule)
  assert '0F0 (actor 0) reads' in str(e.value)


def test_shared_initial_values_are_a_fault_of_the_compiler():
  """Two carries with one initial value would be donated twice; that is asserted."""
  schedule = GPipe(2)
  step = synthetic_step(schedule.placement(), 2).step
  first, second, *rest = step.carries
  second = dataclasses.replace(second, initial=first.initial)
  with pytest.raises(AssertionError, match='initial'):
    lower(dataclasses.replace(step, carries=(first, second, *rest)), schedule)


def test_time_is_linear():
  """8 times the microbatches take about 8 times as long to lower and verify, not 64 times."""

  def seconds(m):
    schedule = InterleavedOneFOneB(16, 4)
    step = synthetic_step(schedule.placement(), m).step
    start = time.process_time()
    verify(lower(step, schedule))
    return time.process_time() - start

  small = min(seconds(8) for _ in range(3))
  assert min(seconds(64) for _ in range(2)) < 28 * small


def test_nothing_here_starts_jax():
  """Schedules and plans are pure Python: neither imports ray, paxml, tensorflow nor a backend."""
  code = (
      'import sys, pax_mpmd.plan, pax_mpmd.schedules\n'
      'print([m for m in ("ray", "paxml", "praxis", "tensorflow", "fiddle") if m in sys.modules])\n'
      'bridge = sys.modules.get("jax._src.xla_bridge")\n'
      'print(bool(bridge and bridge._backends))\n'
  )
  done = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert done.stdout.split('\n')[:2] == ['[]', 'False']
