"""The schedule families: their orders, their times and their memory."""

from __future__ import annotations

import itertools
import pickle
import time

import fiddle as fdl
import pytest

from pax_mpmd import errors
from pax_mpmd import schedules
from pax_mpmd.schedules import DualPipeV
from pax_mpmd.schedules import EagerOneFOneB
from pax_mpmd.schedules import format_grid
from pax_mpmd.schedules import GPipe
from pax_mpmd.schedules import InterleavedOneFOneB
from pax_mpmd.schedules import LoopedBFS
from pax_mpmd.schedules import NAMES
from pax_mpmd.schedules import OneFOneB
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import simulate
from pax_mpmd.schedules import ZeroBubbleH1
from pax_mpmd.schedules import ZeroBubbleV

FAMILIES = list(NAMES.values())
V_SHAPED = [ZeroBubbleV, DualPipeV]


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


def test_eager_order():
  """Actor p starts with 2(P-1-p) forwards and then alternates."""
  assert rows(EagerOneFOneB(3), 6) == [
      '0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5',
      '1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5',
      '2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5',
  ]


def test_breadth_first_order():
  """All microbatches go through a stage before any goes through the actor's next one."""
  schedule = LoopedBFS(num_stages=4, num_actors=2)
  assert schedule.placement() == (0, 1, 0, 1)
  assert rows(schedule, 3) == [
      '0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2',
      '1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2',
  ]


def test_zb_h1_order():
  """1F1B with I for B, where actor p lets the last p weight gradients wait; no gap at the end."""
  assert format_grid(ZeroBubbleH1(3), 4) == '\n'.join([
      'step  actor 0  actor 1  actor 2',
      '   0  0F0      .        .',
      '   1  0F1      1F0      .',
      '   2  0F2      1F1      2F0',
      '   3  .        .        2I0',
      '   4  .        1I0      2F1',
      '   5  0I0      1F2      2I1',
      '   6  0W0      1I1      2F2',
      '   7  0F3      1W0      2I2',
      '   8  0I1      1F3      2W0',
      '   9  0W1      1I2      2F3',
      '  10  0I2      1W1      2I3',
      '  11  0W2      1I3      2W1',
      '  12  0I3      1W2      2W2',
      '  13  0W3      1W3      2W3',
  ])


def test_zb_h1_block_order():
  """The stages of an actor act as one: its I of all of them come before its W of any."""
  assert rows(ZeroBubbleH1(4, 2), 2) == [
      '0F0 1F0 0F1 1F1 1I0 0I0 1W0 0W0 1I1 0I1 1W1 0W1',
      '2F0 3F0 3I0 2I0 2F1 3F1 3I1 2I1 3W0 2W0 3W1 2W1',
  ]


def test_zb_v_order():
  """The warm-up down and up, F I W of both stages in turn, and W behind at the end."""
  schedule = ZeroBubbleV(num_stages=4)
  assert (schedule.num_actors, schedule.placement()) == (2, (0, 1, 1, 0))
  assert rows(schedule, 4) == [
      '0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 '
      '0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 '
      '0I2 0W2 0I3 0W3',
      '1F0 2F0 1F1 2F1 2I0 2W0 '
      '1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 '
      '1I2 2I3 1I3 1W2 2W3 1W3',
  ]


def test_dualpipe_v_order():
  """Warm-up, pairs of a B one way and an F the other way, then split backwards at the end."""
  schedule = DualPipeV(num_stages=4)
  assert (schedule.num_actors, schedule.placement()) == (2, (0, 1, 1, 0))
  assert rows(schedule, 5) == [
      '0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 0F3 0B0 3F2 3B2 0F4 0B1 3F3 '
      '3B3 0B2 3F4 3B4 0I3 0W3 0I4 0W4',
      '1F0 2F0 1F1 2F1 1F2 2B0 1B0 2F2 2B1 1F3 1B1 2F3 2B2 1F4 1B2 2F4 '
      '2B3 1B3 2I4 1I4 2W4 1W4',
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
  """With as many actors as stages the interleaved schedule is 1F1B, the breadth-first GPipe."""
  assert rows(InterleavedOneFOneB(4), 6) == rows(OneFOneB(4), 6)
  assert rows(LoopedBFS(4), 6) == rows(GPipe(4), 6)


@pytest.mark.parametrize('family', FAMILIES)
def test_every_size_is_valid(family):
  """Each family is valid for any number of actors, stages per actor and microbatches."""
  several = (2,) if family in V_SHAPED else (1, 2, 3)
  for num_actors, per_actor, m in itertools.product(range(1, 6), several, (1, 2, 3, 4, 6, 11)):
    schedules.validate(family(num_actors * per_actor, num_actors), m)


@pytest.mark.parametrize('family', FAMILIES)
def test_large_sizes_are_made_fast(family):
  """64 stages and 256 microbatches: the order is made in time linear in the number of tasks."""
  per_actor = 1 if family in (GPipe, OneFOneB, EagerOneFOneB, ZeroBubbleH1) else 2
  started = time.process_time()
  lists = family(64, 64 // per_actor).tasks(256)
  assert time.process_time() - started < 3
  assert sum(map(len, lists)) >= 2 * 64 * 256


@pytest.mark.parametrize('family', [GPipe, OneFOneB, EagerOneFOneB, ZeroBubbleH1])
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
  """The B and W of a stage go through the microbatches in ascending order in every family."""
  for tasks in family(6, 3).tasks(7):
    for stage in {task.stage for task in tasks}:
      order = [
          t.microbatch for t in tasks if t.phase in (Phase.B, Phase.W) and t.stage == stage
      ]
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
  """Without num_actors there is one actor per stage, in a V one for every two."""
  assert OneFOneB(num_stages=4).num_actors == 4
  assert ZeroBubbleV(num_stages=4) == ZeroBubbleV(num_stages=4, num_actors=2)


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
  for family in (InterleavedOneFOneB, LoopedBFS):
    with pytest.raises(errors.ScheduleError) as e:
      family(**arguments)
    for word in (family.__name__, *words):
      assert word in str(e.value)


@pytest.mark.parametrize('family', V_SHAPED)
@pytest.mark.parametrize(
    'arguments, words',
    [
        (
            {'num_stages': 4, 'num_actors': 4},
            ['num_stages is 4 and num_actors is 4', 'num_stages=8 with num_actors=4',
             'num_stages=4 with num_actors=2'],
        ),
        ({'num_stages': 8, 'num_actors': 2}, ['num_stages=4 with num_actors=2', '=8 with']),
        ({'num_stages': 5}, ['num_stages is 5,', '=4 with num_actors=2', '=6 with num_actors=3']),
        ({'num_stages': 1}, ['num_stages is 1,', 'Set num_stages=2 with num_actors=1.']),
        ({'num_stages': 'x'}, ['num_stages', "'x'", 'at least 1']),
        ({'num_stages': 4, 'num_actors': 0}, ['num_actors', '0', 'at least 1']),
    ],
)
def test_a_v_needs_two_stages_per_actor(family, arguments, words):
  """Numbers of which there is no V are refused, with numbers that work."""
  with pytest.raises(errors.ScheduleError) as e:
    family(**arguments)
  for word in (family.__name__, *words):
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
