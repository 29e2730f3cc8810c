"""What the validator refuses, and what it says."""

from __future__ import annotations

import dataclasses
import time

import pytest

from pax_mpmd import errors
from pax_mpmd.schedules import FromTable
from pax_mpmd.schedules import GPipe
from pax_mpmd.schedules import InterleavedOneFOneB
from pax_mpmd.schedules import OneFOneB
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import Schedule
from pax_mpmd.schedules import Task
from pax_mpmd.schedules import validate
from tests.messages import assert_readable
from tests.schedules.random_schedules import random_schedule

BASE = ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']


@dataclasses.dataclass(frozen=True)
class Forgetful(Schedule):
  """Does not call the base class."""

  def __post_init__(self):
    pass


@dataclasses.dataclass(frozen=True)
class Lists(Schedule):
  """Returns what it is told to."""

  result: object = None
  where: object = None

  def tasks(self, num_microbatches):
    """See the base class."""
    return self.result

  def placement(self):
    """See the base class."""
    return super().placement() if self.where is None else self.where


def lists(*rows):
  """A schedule with these task texts, one stage per actor."""
  return Lists(len(rows), result=[[Task.parse(t) for t in row.split()] for row in rows])


def refused(schedule, num_microbatches, *words, **kwargs):
  """The message with which a schedule is refused; all words are in it."""
  with pytest.raises(errors.ScheduleError) as e:
    validate(schedule, num_microbatches, **kwargs)
  message = str(e.value)
  for word in words:
    assert word in message, message
  assert_readable(message)
  return message


def test_a_schedule_of_the_users_own():
  """The schedule that the other tests here break is valid."""
  validate(lists(*BASE), 2)


@pytest.mark.parametrize(
    'rows, words',
    [
        # missing: the place after which it could stand is marked
        (['0F0 0F1 0B0', BASE[1]], ['actor 0 never runs 0B1', '>0B0<']),
        ([BASE[0], '1F0 1B0 1B1'], ['actor 1 never runs 1F1', '>1B1<']),
        # doubled
        (['0F0 0F1 0F0 0B0 0B1', BASE[1]], ['0F0 stands twice', 'positions 0 and 2', '>0F0<']),
        # on the wrong actor
        (['0F0 0F1 0B0 0B1 1B1', '1F0 1B0 1F1'], ['1B1', 'actor 0', 'on actor 1', '>1B1<']),
        # out of range
        (['0F0 0F1 0B0 0B1 2F0', BASE[1]], ['2F0', 'stage 2', '0 to 1', '>2F0<']),
        (['0F0 0F1 0B0 0B1 0F2', BASE[1]], ['0F2', 'microbatch 2', '0 to 1', '>0F2<']),
        # B beside I, W for one microbatch; W without I; I without W
        (
            ['0F0 0F1 0B0 0B1 0I1 0W1', BASE[1]],
            ['both a whole backward (0B1) and a split one (0I1, 0W1)', '>0B1<', '>0I1<', '>0W1<'],
        ),
        (['0F0 0F1 0B0 0B1 0W1', BASE[1]], ['(0B1)', '(0W1)', '>0B1<', '>0W1<']),
        (['0F0 0F1 0B0 0I1', BASE[1]], ['actor 0 never runs 0W1']),
        (['0F0 0F1 0I0 0W0 0W1', BASE[1]], ['actor 0 never runs 0I1']),
    ],
)
def test_wrong_tasks(rows, words):
  """A missing, doubled or misplaced task is named and its place marked in the grid."""
  message = refused(lists(*rows), 2, *words)
  assert 'place  actor 0' in message


def test_order_within_an_actor():
  """A backward before its own forward is a wait of an actor for itself."""
  refused(
      lists(BASE[0], '1B0 1F0 1F1 1B1'), 2,
      '1B0 (actor 1) needs 1F0, which comes later on the same actor', '>1B0<',
  )


def test_cycle_of_actors_is_named():
  """Actors that wait for each other are all named, with what each waits for, and marked."""
  message = refused(
      lists('0B0 0F0 0F1 0B1', '1F0 1B0 1F1 1B1'), 2, '>0B0<',
      '0B0 (actor 0) needs 0F0, which comes later on the same actor',
  )
  assert '1F0' not in message.splitlines()[0]
  refused(
      lists('0F0 0B1 0F1 0B0', '1F0 1B0 1F1 1B1'), 2, '0B1 (actor 0) needs 0F1', '>0B1<'
  )
  refused(
      lists('0F0 0B0 0F1 0B1', '1F0 1F1 1B0 1B1'), 2,
      '0B0 (actor 0) needs 1B0, which comes after 1F1 on actor 1',
      '1F1 (actor 1) needs 0F1, which comes after 0B0 on actor 0',
      '>0B0<', '>1F1<',
  )


def test_a_long_cycle_in_a_large_schedule_stays_readable():
  """In a large schedule only the neighbourhood of the marked places is printed."""
  good = GPipe(12).tasks(40)
  rows = [list(tasks) for tasks in good]
  # Actor 5 wants its first backward before its last forward, which needs nothing of it; its first
  # backward needs the others' backwards, which start after their last forwards.
  last_forward = rows[5].index(Task.parse('5F39'))
  first_backward = rows[5].index(Task.parse('5B0'))
  rows[5][last_forward], rows[5][first_backward] = rows[5][first_backward], rows[5][last_forward]
  message = refused(
      Lists(12, result=rows), 40, '5B0 (actor 5) needs 6B0', '6F39 (actor 6) needs 5F39',
      '>5B0<', '>6F39<', '...',
  )
  assert max(map(len, message.splitlines()[1:])) <= 100


def test_forward_only_must_be_asked_for():
  """A schedule without backward tasks is good only for those who ask for no more."""
  table = FromTable([['0F0', '0F1'], ['1F0', '1F1']])
  refused(table, 2, 'never runs 0B0, 0B1')
  validate(table, 2, need_backward=False)
  refused(FromTable([['0F0', '0F1'], ['1F0']]), 2, '1F1', need_backward=False)
  refused(lists('0F0', '1F0 1B0'), 1, 'never runs 0B0', need_backward=False)


def test_split_backward():
  """A microbatch may have I and W where another has B; W needs only its own stage's I."""
  validate(lists('0F0 0I0 0W0', '1F0 1B0'), 1)
  validate(lists('0F0 0B0', '1F0 1I0 1W0'), 1)
  validate(lists('0F0 0F1 0B0 0I1 0W1', '1F0 1F1 1I0 1B1 1W0'), 2)
  refused(lists('0F0 0B0', '1F0 1W0 1I0'), 1, '1W0 (actor 1) needs 1I0')
  refused(
      lists('0F0 0F1 0B0 0I1 0W1', '1F0 1F1 1B1 1W0 1I0'), 2, '1W0 (actor 1) needs 1I0', '>1W0<'
  )


@pytest.mark.parametrize(
    'schedule, words',
    [
        (Lists(2, result=None), ['one sequence of tasks per actor', 'None']),
        (Lists(2, result=[[]]), ['each of the 2 actors', 'returned 1']),
        (Lists(1, result=['0F0']), ['actor 0', "'0F0'"]),
        (Lists(1, result=[['0F0']]), ["'0F0'", 'position 0 of actor 0', 'Task.parse']),
        (Lists(1, result=[[Task(0, 'F', 0)]]), ['not a Task', 'Phase.F']),
        (Lists(1, result=[[None]]), ['None', 'not a Task']),
        (Lists(2, where=5), ['placement()', '5']),
        (Lists(2, where=(0,)), ['placement()', '2 stages', '1 of them']),
        (Lists(2, where=(0, 2)), ['stage 1 on actor 2', '0 to 1']),
        (Lists(2, where=[0] * 3000), ['2 stages', '3000 of them']),
        (Lists(2, result='x' * 3000), ['one sequence of tasks per actor', 'xxx']),
        (Lists(1, result=[[Task('0', Phase.F, 0)]]), ['position 0 of actor 0', 'not a Task']),
        (Lists(1, result=[[Task(0, Phase.F, 0.5)]]), ['position 0 of actor 0', 'not a Task']),
        (Lists(2, where=(1, 1)), ['no stage to actor 0']),
        (Schedule(2), ['Schedule', 'tasks(self, num_microbatches)']),
        (Forgetful(2), ['num_actors=None', 'super().__post_init__()']),
        (OneFOneB, ['instance', 'OneFOneB']),
    ],
)
def test_wrong_methods(schedule, words):
  """What a user's own class gets wrong is said, whatever its methods return."""
  refused(schedule, 2, *words)


def test_generators_are_sequences_too():
  """`tasks` may be written as a generator of generators."""
  rows = GPipe(2).tasks(3)
  validate(Lists(2, result=((task for task in row) for row in rows)), 3)


@pytest.mark.parametrize('m', [0, -1, 1.5, '4', True])
def test_number_of_microbatches(m):
  """The number of microbatches must be a positive whole number."""
  refused(GPipe(2), m, 'num_microbatches', repr(m))


@pytest.mark.parametrize('phases', ['FB', 'FIW', 'mixed', 'each'])
def test_random_schedules_are_valid(phases):
  """Any order in which tasks come after what they need is valid."""
  for seed in range(30):
    validate(random_schedule(seed, 4, 3, 3, phases), 3)


def test_every_broken_order_of_a_tight_schedule_is_refused():
  """Exchanging two neighbours that depend on each other directly always makes a cycle."""
  good = [list(tasks) for tasks in OneFOneB(3).tasks(4)]
  row = good[2]  # 2F0 2B0 2F1 2B1 ...: every pair depends
  for i in range(0, len(row), 2):
    broken = [*row[:i], row[i + 1], row[i], *row[i + 2 :]]
    refused(Lists(3, result=[*good[:2], broken]), 4, f'{row[i + 1]} (actor 2) needs {row[i]}')


def test_time_is_linear():
  """16 times the tasks take at most about 16 times as long, not 256 times."""

  def seconds(m):
    start = time.process_time()
    validate(InterleavedOneFOneB(16, 4), m)
    return time.process_time() - start

  small = min(seconds(16) for _ in range(5))
  assert min(seconds(256) for _ in range(2)) < 80 * small


def test_phase_letters_are_enough():
  """Phases compare with their letters."""
  assert Phase('F') is Phase.F
  assert Phase.F == 'F'
