"""The schedule families: their orders, their times and their memory."""

from __future__ import annotations

import itertools
import pickle

import fiddle as fdl
import pytest

from pax_mpmd import errors
from pax_mpmd import schedules
from pax_mpmd.schedules import format_grid
from pax_mpmd.schedules import GPipe
from pax_mpmd.schedules import InterleavedOneFOneB
from pax_mpmd.schedules import OneFOneB
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import simulate

FAMILIES = [GPipe, OneFOneB, InterleavedOneFOneB]


def rows(schedule, num_microbatches):
  """The tasks of each actor as one text."""
  return [' '.join(map(str, tasks)) for tasks in schedule.tasks(num_microbatches)]


def test_gpipe_order():
  """GPipe runs all forwards and then all backwards, both in ascending order."""
  assert rows(GPipe(2), 3) == ['0F0 0F1 0F2 0B0 0B1 0B2', '1F0 1F1 1F2 1B0 1B1 1B2']


def test_one_f_one_b_order():
  """Actor p starts with P-1-p forwards and then alternates."""
  assert rows(OneFOneB(3), 4) == [
      '0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3',
      '1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3',
      '2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3',
  ]


def test_contiguous_stages_of_an_actor_act_as_one():
  """With fewer actors than stages an actor goes through its block, backwards in the backward."""
  assert OneFOneB(5, 2).placement() == (0, 0, 0, 1, 1)
  assert rows(OneFOneB(4, 2), 2) == [
      '0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1',
      '2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1',
  ]


def test_interleaved_order():
  """Two actors with two stages each: groups of two microbatches go through the stages in turn."""
  schedule = InterleavedOneFOneB(num_stages=4, num_actors=2)
  assert schedule.placement() == (0, 1, 0, 1)
  assert rows(schedule, 4) == [
      '0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3',
      '1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3',
  ]


def test_one_stage_per_actor_makes_interleaved_plain():
  """With as many actors as stages the interleaved schedule is 1F1B."""
  assert rows(InterleavedOneFOneB(4), 6) == rows(OneFOneB(4), 6)


@pytest.mark.parametrize('family', FAMILIES)
def test_every_size_is_valid(family):
  """Each family is valid for any number of actors, stages per actor and microbatches."""
  for num_actors, per_actor, m in itertools.product(range(1, 6), range(1, 4), range(1, 12)):
    schedules.validate(family(num_actors * per_actor, num_actors), m)


@pytest.mark.parametrize('family', [GPipe, OneFOneB])
def test_uneven_blocks_are_valid(family):
  """Stages need not be a multiple of actors where blocks are contiguous."""
  for num_stages in range(1, 9):
    for num_actors in range(1, num_stages + 1):
      schedules.validate(family(num_stages, num_actors), 3)


@pytest.mark.parametrize(
    'schedule, m, makespan, peak_live',
    [
        # (M + P - 1) x (F + B) with F = 1, B = 2; GPipe holds all M, 1F1B at most P - p.
        (GPipe(4), 8, 33, (8, 8, 8, 8)),
        (OneFOneB(4), 8, 33, (4, 3, 2, 1)),
        (OneFOneB(4), 2, 15, (2, 2, 2, 1)),
        (OneFOneB(1), 5, 15, (1,)),
        # (M V + P - 1) x (F + B): the bubble shrinks by the number of stages per actor.
        (InterleavedOneFOneB(8, 4), 8, 57, (11, 9, 7, 5)),
        (InterleavedOneFOneB(12, 4), 8, 81, (15, 13, 11, 9)),
    ],
)
def test_time_and_memory(schedule, m, makespan, peak_live):
  """Makespan and memory are those of the papers."""
  result = simulate(schedule, m)
  assert result.makespan == makespan
  assert result.peak_live == peak_live
  busy = 3 * m * schedule.num_stages
  assert result.bubble_fraction == pytest.approx(1 - busy / (schedule.num_actors * makespan))


@pytest.mark.parametrize('family', FAMILIES)
def test_gradients_are_summed_in_the_same_order(family):
  """Backwards of a stage go through the microbatches in ascending order in every family."""
  for tasks in family(6, 3).tasks(7):
    for stage in {task.stage for task in tasks}:
      order = [t.microbatch for t in tasks if t.phase is Phase.B and t.stage == stage]
      assert order == list(range(7))


@pytest.mark.parametrize('family', FAMILIES)
def test_fiddle_builds_them(family):
  """A schedule is configurable with Fiddle, pickles and compares by value."""
  config = fdl.Config(family, num_stages=4)
  config.num_actors = 2
  built = fdl.build(config)
  assert built == family(4, 2)
  assert pickle.loads(pickle.dumps(built)) == built
  assert hash(built) == hash(family(num_stages=4, num_actors=2))


def test_actors_default_to_stages():
  """Without num_actors there is one actor per stage."""
  assert OneFOneB(num_stages=4).num_actors == 4


@pytest.mark.parametrize(
    'arguments, words',
    [
        ({'num_stages': 0}, ['num_stages', '0', 'at least 1']),
        ({'num_stages': 2.5}, ['num_stages', '2.5']),
        ({'num_stages': True}, ['num_stages', 'True']),
        ({'num_stages': 4, 'num_actors': -1}, ['num_actors', '-1']),
        ({'num_stages': 2, 'num_actors': 3}, ['num_actors is 3', 'num_stages is 2']),
        ({'num_stages': 6, 'num_actors': 4}, ['6', '4', 'multiple', '2 x 4 = 8']),
    ],
)
def test_wrong_numbers_are_refused(arguments, words):
  """A number that can't be is refused when the schedule is built, with the number."""
  with pytest.raises(errors.ScheduleError) as e:
    InterleavedOneFOneB(**arguments)
  for word in words:
    assert word in str(e.value)


def test_grid():
  """The grid shows steps, actors and idle steps."""
  assert format_grid(OneFOneB(2), 2) == '\n'.join([
      'step  actor 0  actor 1',
      '   0  0F0      .',
      '   1  0F1      1F0',
      '   2  .        1B0',
      '   3  0B0      1F1',
      '   4  .        1B1',
      '   5  0B1      .',
  ])


def test_large_grid_is_shortened():
  """A large grid leaves out its middle and says so."""
  lines = format_grid(GPipe(20), 50, max_steps=6, max_actors=4).splitlines()
  assert lines[0].split('  ')[-1] == 'actor 19'
  assert '...' in lines[0]
  assert [line.split()[0] for line in lines] == ['step', '0', '1', '2', '...', '135', '136', '137']
