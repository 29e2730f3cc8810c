"""The simulator."""

from __future__ import annotations

import pytest

from pax_mpmd import errors
from pax_mpmd.schedules import FromTable
from pax_mpmd.schedules import GPipe
from pax_mpmd.schedules import OneFOneB
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import simulate
from pax_mpmd.schedules import Task
from pax_mpmd.schedules.graph import dependencies
from tests.schedules.random_schedules import random_schedule


def test_times_of_a_small_schedule():
  """Two stages, one microbatch: each task starts when the one before ends."""
  result = simulate(GPipe(2), 1)
  assert {str(task): (result.start[task], result.end[task]) for task in result.order} == {
      '0F0': (0, 1), '1F0': (1, 2), '1B0': (2, 4), '0B0': (4, 6),
  }
  assert result.bubble_fraction == 0.5


@pytest.mark.parametrize('phases', ['FB', 'FIW', 'mixed', 'each'])
def test_order_is_a_global_order(phases):
  """In `order` every task comes after what it needs, and each actor's list keeps its order."""
  for seed in range(20):
    schedule = random_schedule(seed, 4, 3, 4, phases)
    lists = schedule.tasks(4)
    result = simulate(schedule, 4)
    place = {task: i for i, task in enumerate(result.order)}
    for tasks in lists:
      assert [place[t] for t in tasks] == sorted(place[t] for t in tasks)
    for task in result.order:
      for needed in dependencies(task, set(result.order)):
        assert place[needed] < place[task]
        assert result.end[needed] <= result.start[task]
    starts = [result.start[task] for task in result.order]
    assert starts == sorted(starts)


def test_ties_go_by_actor():
  """Tasks that start at the same time are in the order of their actors."""
  order = [str(task) for task in simulate(GPipe(2), 2).order]
  assert order[:4] == ['0F0', '0F1', '1F0', '1F1']


def test_costs():
  """A cost per (stage, phase) goes before one per phase, which goes before the default."""
  costs = {(1, Phase.F): 10, Phase.F: 2, 'B': 3}
  result = simulate(GPipe(2), 1, costs)
  assert result.makespan == 2 + 10 + 3 + 3


def test_no_cost_at_all():
  """All times may be zero."""
  result = simulate(OneFOneB(3), 4, dict.fromkeys(Phase, 0))
  assert (result.makespan, result.bubble_fraction) == (0, 0.0)
  assert len(set(result.order)) == 24


@pytest.mark.parametrize(
    'costs, words',
    [
        ({'X': 1}, ["'X'", 'Phase']),
        ({(2, Phase.F): 1}, ['(2,', '0 to 1']),
        ({Phase.F: -1}, ['-1', 'at least 0']),
        ({Phase.F: float('nan')}, ['nan']),
    ],
)
def test_wrong_costs(costs, words):
  """A cost of nothing, or one that is no time, is refused."""
  with pytest.raises(errors.ScheduleError) as e:
    simulate(GPipe(2), 1, costs)
  for word in words:
    assert word in str(e.value)


def test_activations_live_until_the_weight_gradient():
  """With a split backward, W lets go of the activations, not I."""
  late = FromTable([['0F0', '0I0', '0F1', '0I1', '0W0', '0W1']])
  early = FromTable([['0F0', '0I0', '0W0', '0F1', '0I1', '0W1']])
  assert simulate(late, 2).peak_live == (2,)
  assert simulate(early, 2).peak_live == (1,)


def test_forward_only():
  """Without backward tasks nothing is kept."""
  result = simulate(FromTable([['0F0', '0F1'], ['1F0', '1F1']]), 2, need_backward=False)
  assert (result.makespan, result.peak_live) == (3, (1, 1))


def test_start_accepts_tasks_made_by_hand():
  """Times are looked up by task."""
  assert simulate(GPipe(1), 2).start[Task(0, Phase.B, 1)] == 4
