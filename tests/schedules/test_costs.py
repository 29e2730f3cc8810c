"""What each schedule costs in the simulator is what its formulas say."""

from __future__ import annotations

import itertools

import pytest

from pax_mpmd.schedules import DualPipeV
from pax_mpmd.schedules import get
from pax_mpmd.schedules import LoopedBFS
from pax_mpmd.schedules import NAMES
from pax_mpmd.schedules import OneFOneB
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import simulate
from pax_mpmd.schedules import ZeroBubbleH1
from pax_mpmd.schedules import ZeroBubbleV
from pax_mpmd.schedules.graph import dependencies
from pax_mpmd.schedules.summary import evaluate
from pax_mpmd.schedules.summary import FACTS
from pax_mpmd.schedules.summary import num_messages

MICROBATCHES = (1, 2, 3, 4, 5, 6, 8, 12)


def sizes(name, most_actors=5):
  """(num_stages, num_actors) that a family takes; up to three stages per actor."""
  per_actor = (2,) if name in ('zb_v', 'dualpipe_v') else (1, 2, 3)
  return [(v * p, p) for p in range(1, most_actors + 1) for v in per_actor]


def split_costs(forward, input_grad, weight_grad):
  """Costs in which B takes as long as I and W."""
  return {
      Phase.F: forward,
      Phase.I: input_grad,
      Phase.W: weight_grad,
      Phase.B: input_grad + weight_grad,
  }


@pytest.mark.parametrize('name', NAMES)
def test_formulas(name):
  """Bubble, peak memory per actor and messages are exactly those of the formulas."""
  facts, checked = FACTS[name], 0
  for (num_stages, num_actors), m in itertools.product(sizes(name), MICROBATCHES):
    schedule = get(name, num_stages, num_actors)
    if facts.holds and not evaluate(facts.holds, schedule, m):
      continue
    result = simulate(schedule, m)
    where = (num_stages, num_actors, m)
    bubble = evaluate(facts.bubble, schedule, m)
    assert result.bubble_fraction == pytest.approx(bubble, abs=1e-12), where
    assert result.makespan == pytest.approx(3 * m * num_stages / num_actors / (1 - bubble)), where
    peaks = tuple(evaluate(facts.peak_live, schedule, m, p) for p in range(num_actors))
    assert result.peak_live == peaks, where
    if num_actors > 1:
      assert num_messages(schedule, m) == evaluate(facts.messages, schedule, m), where
    checked += 1
  assert checked >= 15


@pytest.mark.parametrize('name', NAMES)
def test_costs_outside_of_the_formulas(name):
  """Whatever the number of microbatches, time and memory are within the obvious bounds."""
  for (num_stages, num_actors), m in itertools.product(sizes(name, 4), (1, 2, 3, 5, 7)):
    schedule = get(name, num_stages, num_actors)
    result = simulate(schedule, m)
    phases = {task.phase for task in result.order}
    chain = num_stages * (3 if phases == {Phase.F, Phase.B} else 2)
    busy = 3 * m * num_stages // num_actors
    assert max(chain, busy) <= result.makespan <= 3 * m * num_stages
    assert max(result.peak_live) <= m * num_stages // num_actors
    more = simulate(schedule, m + 1)
    assert result.makespan < more.makespan
    assert all(a <= b for a, b in zip(result.peak_live, more.peak_live, strict=True))


def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_in_its_memory():
  """ZB-H1: bubble (P-1)(F+I-W) against (P-1)(F+I+W), and no more memory than actor 0 of 1F1B.

  It can't be less than F or I on each but one of the actors.
  """
  times = ((1, 1, 1), (1, 1.5, 0.75), (2, 1.5, 1), (3, 1, 1.5), (1, 2, 1.5), (1, 1, 3))
  for p, (f, i, w) in itertools.product((2, 4, 5), times):
    for m in (p, 2 * p + 1):
      costs, busy = split_costs(f, i, w), m * (f + i + w)
      split, whole = simulate(ZeroBubbleH1(p), m, costs), simulate(OneFOneB(p), m, costs)
      assert split.makespan - busy == pytest.approx((p - 1) * max(f, i, f + i - w))
      assert whole.makespan - busy == pytest.approx((p - 1) * (f + i + w))
      assert max(split.peak_live) == max(whole.peak_live) == p


def test_zb_h1_with_few_microbatches():
  """With M < P a step takes v (P-M) units more."""
  for p, v, m in itertools.product((2, 3, 5), (1, 2), (1, 2, 3, 4)):
    more = v * max(0, p - m)
    assert simulate(ZeroBubbleH1(v * p, p), m).makespan == v * (3 * m + p - 1) + more


def test_zb_v_has_no_gap():
  """ZB-V: from p units on actor p works for 6M units without a gap, if M >= 2P-1."""
  for p, m in itertools.product(range(1, 6), range(1, 12)):
    schedule = ZeroBubbleV(2 * p)
    result = simulate(schedule, m)
    if 2 * m < 3 * p - 1:
      assert result.makespan == 4 * m + 4 * p - 2
    if m < 2 * p - 1:
      continue
    for actor, tasks in enumerate(schedule.tasks(m)):
      assert result.start[tasks[0]] == actor
      assert result.end[tasks[-1]] == actor + 6 * m


def test_breadth_first_with_few_microbatches():
  """LoopedBFS: with M < P each round but the last takes P units for its forwards."""
  for p, v, m in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 3, 5)):
    makespan = 3 * ((v - 1) * max(m, p) + m + p - 1)
    assert simulate(LoopedBFS(v * p, p), m).makespan == makespan


def test_dualpipe_v_as_its_repository_counts():
  """Where a pair B, F can't be taken apart the bubble is (P-1)(F&B + B - 3W), in unit time."""
  for p, m in ((1, 2), (2, 4), (2, 7), (3, 6), (4, 8), (5, 13)):
    makespan = _makespan_of_pairs(DualPipeV(2 * p).tasks(m))
    assert makespan - 6 * m == (p - 1) * (3 + 2 - 3)


def _makespan_of_pairs(lists):
  """The unit-time makespan where a B and the F right behind it start and end as one task."""
  present = {task for tasks in lists for task in tasks}
  cost = {Phase.F: 1, Phase.B: 2, Phase.I: 1, Phase.W: 1}
  units = []
  for tasks in lists:
    row = []
    for task in tasks:
      if row and task.phase is Phase.F and row[-1][-1].phase is Phase.B:
        row[-1].append(task)
      else:
        row.append([task])
    units.append(row)
  end, clock, positions = {}, [0] * len(lists), [0] * len(lists)
  while len(end) < len(present):
    before = len(end)
    for actor, row in enumerate(units):
      while positions[actor] < len(row):
        unit = row[positions[actor]]
        needed = [n for task in unit for n in dependencies(task, present)]
        if not all(n in end for n in needed):
          break
        start = max([clock[actor], *(end[n] for n in needed)])
        clock[actor] = start + sum(cost[task.phase] for task in unit)
        end.update(dict.fromkeys(unit, clock[actor]))
        positions[actor] += 1
    assert len(end) > before
  return max(clock)
