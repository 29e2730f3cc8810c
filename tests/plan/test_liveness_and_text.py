"""Frees, peak bytes and the text of plans."""

from __future__ import annotations

import pytest

from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Executable
from pax_mpmd.plan import ActorPlan
from pax_mpmd.plan import format_instruction
from pax_mpmd.plan import format_plan
from pax_mpmd.plan import Free
from pax_mpmd.plan import lower
from pax_mpmd.plan import peak_bytes
from pax_mpmd.plan import Plan
from pax_mpmd.plan import Recv
from pax_mpmd.plan import Run
from pax_mpmd.plan import Send
from pax_mpmd.plan import summary
from pax_mpmd.plan.liveness import insert_frees
from pax_mpmd.schedules import GPipe
from pax_mpmd.schedules import OneFOneB
from tests.plan.synthetic import synthetic_step

ONE_KB = Aval((250,), 'float32')
PROGRAMS = {
    'map': Executable('map', (ONE_KB,), (ONE_KB,), (), b''),
    'inplace': Executable('inplace', (ONE_KB,), (ONE_KB,), (0,), b''),
    'two': Executable('two', (ONE_KB,), (ONE_KB, ONE_KB), (), b''),
}


def test_frees_come_directly_after_the_last_use():
  """Last reads, last sends, results nobody reads and unread inputs are all freed at once."""
  instructions = [
      Run('map', (0,), (2,), 'a'),
      Send(1, (2,), 'a'),
      Run('two', (0,), (3, 4), 'b'),
      Recv(1, (5,), 'c'),
      Run('inplace', (5,), (6,), 'd'),
  ]
  assert insert_frees(instructions, inputs=(0, 1), kept={6}, executables=PROGRAMS) == (
      Free((1,)),
      instructions[0],
      instructions[1],
      Free((2,)),
      instructions[2],
      Free((0, 3, 4)),
      instructions[3],
      instructions[4],
  )


def test_a_donated_slot_must_not_be_used_again():
  """A use after a donation is a fault of the compiler, not something to plan around."""
  runs = [Run('inplace', (0,), (1,), 'a'), Run('map', (0,), (2,), 'b')]
  with pytest.raises(AssertionError, match='donated before'):
    insert_frees(runs, inputs=(0,), kept={1, 2}, executables=PROGRAMS)
  with pytest.raises(AssertionError, match='results are donated'):
    insert_frees(runs[:1], inputs=(0,), kept={0, 1}, executables=PROGRAMS)


def actor(instructions, num_slots, outputs):
  """A plan of one actor with one input."""
  return ActorPlan(
      0, (ONE_KB,) * num_slots, (0,), ((0, 0),), (), tuple(instructions), outputs,
      tuple((i, 0) for i in range(len(outputs))),
  )


@pytest.mark.parametrize(
    'instructions, num_slots, outputs, peak',
    [
        ([], 1, (0,), 1000),
        ([Run('map', (0,), (1,), 'a'), Free((0,))], 2, (1,), 2000),
        ([Run('inplace', (0,), (1,), 'a')], 2, (1,), 1000),
        ([Run('two', (0,), (1, 2), 'a'), Free((0, 1)), Run('map', (2,), (3,), 'b'), Free((2,))],
         4, (3,), 3000),
        ([Free((0,)), Recv(1, (1,), 'a'), Recv(1, (2,), 'b')], 3, (1, 2), 2000),
    ],
)
def test_peak_bytes(instructions, num_slots, outputs, peak):
  """Arguments and results of a run count together, donated ones once."""
  assert peak_bytes(Plan((actor(instructions, num_slots, outputs),), PROGRAMS)) == (peak,)


def test_peak_follows_the_schedule():
  """With more microbatches GPipe's memory grows and 1F1B's doesn't (but for what is stacked)."""

  def peaks(family, m):
    schedule = family(4)
    return peak_bytes(lower(synthetic_step(schedule.placement(), m).step, schedule))

  assert peaks(GPipe, 16)[1] - peaks(GPipe, 8)[1] == 8 * Aval((4, 17), 'float32').nbytes
  assert peaks(OneFOneB, 16)[1] == peaks(OneFOneB, 8)[1]


def test_instruction_text():
  """Each instruction reads on one line."""
  assert format_instruction(Run('x', (1, 2), (3,), '2F0', 2)) == 'run 2F0: %1 %2 -> %3'
  assert format_instruction(Send(3, (7, 8), '2F0')) == 'send 2F0 to actor 3: %7 %8'
  assert format_instruction(Recv(1, (4,), '1F0')) == 'recv 1F0 from actor 1: -> %4'
  assert format_instruction(Free((4, 5))) == 'free %4 %5'
  many = tuple(range(100))
  assert format_instruction(Free(many), max_slots=2) == 'free %0 %1 and 98 more'
  short = format_instruction(Run('x', many, many[:1], '2F0', 2), max_slots=2)
  assert short == 'run 2F0: %0 %1 and 98 more -> %0'
  assert format_instruction(Run('x', many, (), '2F0', 2)).endswith('%98 %99 ->')


def test_plan_text():
  """The listing has inputs, constants, instructions with the types they fill, and outputs."""
  schedule = OneFOneB(2)
  plan = lower(synthetic_step(schedule.placement(), 1).step, schedule)
  lines = format_plan(plan).splitlines()
  assert [line for line in lines if line.startswith('actor')] == ['actor 0', 'actor 1']
  assert '  input %0:float32[8,8] = argument 0, piece 0' in lines
  assert any(line.startswith('  constant %') and line.endswith(':int32[] = 0') for line in lines)
  (forward,) = (line for line in lines if ' run 0F0:' in line)
  assert forward.endswith('float32[4,16]') and ' -> %' in forward
  assert sum(line.lstrip()[:1].isdigit() for line in lines) == sum(
      len(a.instructions) for a in plan.actors
  )


def test_summary():
  """The summary counts what each actor runs, sends and holds."""
  schedule = OneFOneB(2)
  m = 3
  plan = lower(synthetic_step(schedule.placement(), m).step, schedule)
  result = summary(plan)
  last = result.actors[1]
  # Prologue: cast and three zeros (losses, weight, tied weight); F and B; square and update.
  assert (last.runs, last.programs) == (4 + 2 * m + 2, 8)
  # Cotangents for stage 0, with the last one the tied gradient; then the squares.
  assert last.messages_sent == m + 1
  assert last.bytes_sent == m * 4 * 8 * 4 + 32 * 8 * 4 + 4
  assert last.bytes_sent == result.actors[0].bytes_received
  assert last.input_bytes == (8 * 9 + 32 * 8) * 4
  assert last.peak_bytes == peak_bytes(plan)[1]
  assert last.instructions == len(plan.actors[1].instructions)
  lines = str(result).splitlines()
  assert len(lines) == 4
  assert lines[0].split()[:3] == ['actor', 'programs', 'runs']
  assert f'{len(plan.executables)} different programs' == lines[-1]
