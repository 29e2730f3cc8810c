"""Plans with one thing wrong: harmless, or refused with the place named. Exhaustive for small ones.

A changed plan that `verify` accepts must run to the end where channels hold nothing; one that
`verify_values` accepts too must give the results of the good plan.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import re

import pytest

from pax_mpmd import errors
from pax_mpmd import schedules
from pax_mpmd.plan import Free
from pax_mpmd.plan import lower
from pax_mpmd.plan import Plan
from pax_mpmd.plan import Recv
from pax_mpmd.plan import Run
from pax_mpmd.plan import Send
from pax_mpmd.plan import verify
from pax_mpmd.plan import verify_values
from tests.plan.evaluate import evaluate_plan
from tests.plan.evaluate import run_plan
from tests.plan.synthetic import evaluate_step
from tests.plan.synthetic import synthetic_step
from tests.schedules.random_schedules import random_schedule


def with_list(plan: Plan, actor: int, instructions) -> Plan:
  actors = list(plan.actors)
  actors[actor] = dataclasses.replace(actors[actor], instructions=tuple(instructions))
  return dataclasses.replace(plan, actors=tuple(actors))


def drops(plan: Plan) -> Iterator[Plan]:
  for actor, actor_plan in enumerate(plan.actors):
    row = actor_plan.instructions
    for i in range(len(row)):
      yield with_list(plan, actor, [*row[:i], *row[i + 1 :]])


def swaps(plan: Plan) -> Iterator[Plan]:
  for actor, actor_plan in enumerate(plan.actors):
    row = list(actor_plan.instructions)
    for i in range(len(row)):
      for j in range(i + 1, len(row)):
        row[i], row[j] = row[j], row[i]
        yield with_list(plan, actor, row)
        row[i], row[j] = row[j], row[i]


def doubles(plan: Plan) -> Iterator[Plan]:
  for actor, actor_plan in enumerate(plan.actors):
    row = actor_plan.instructions
    for i, instruction in enumerate(row):
      for to in {i, 0, len(row) // 2, len(row)}:
        yield with_list(plan, actor, [*row[:to], instruction, *row[to:]])


def moves(plan: Plan) -> Iterator[Plan]:
  """Each message to every place of its list, runs and frees nearby; all to the other actors."""
  for actor, actor_plan in enumerate(plan.actors):
    row = actor_plan.instructions
    for i, instruction in enumerate(row):
      rest = [*row[:i], *row[i + 1 :]]
      places = range(len(row)) if isinstance(instruction, Send | Recv) else range(i - 2, i + 4, 2)
      for to in {0, *places, len(row) - 1}:
        if to != i and 0 <= to < len(row):
          yield with_list(plan, actor, [*rest[:to], instruction, *rest[to:]])
      for other in set(range(len(plan.actors))) - {actor}:
        there = plan.actors[other].instructions
        for to in {0, i, len(there)}:
          moved = with_list(plan, other, [*there[:to], instruction, *there[to:]])
          yield with_list(moved, actor, rest)


def redirections(plan: Plan) -> Iterator[Plan]:
  """Other peers, labels and programs; other slots in place of each one, and neighbours swapped."""
  labels = sorted({i.label for a in plan.actors for i in a.instructions if not isinstance(i, Free)})
  programs = sorted(plan.executables)
  peers = range(-1, len(plan.actors) + 1)
  for actor, actor_plan in enumerate(plan.actors):
    row = list(actor_plan.instructions)
    num_slots = len(actor_plan.slots)
    for i, instruction in enumerate(row):
      changed = []
      if isinstance(instruction, Send):
        changed += [dataclasses.replace(instruction, dst=a) for a in peers]
      if isinstance(instruction, Recv):
        changed += [dataclasses.replace(instruction, src=a) for a in peers]
      if isinstance(instruction, Run):
        changed += [dataclasses.replace(instruction, executable=e) for e in programs[i % 4 :: 4]]
      if not isinstance(instruction, Free):
        changed += [dataclasses.replace(instruction, label=label) for label in labels[i % 4 :: 4]]
      fields = ('inputs', 'outputs') if isinstance(instruction, Run) else ('slots',)
      for field in fields:
        slots = getattr(instruction, field)
        for k in range(len(slots)):
          for other in {*range(i % 9, num_slots, 9), slots[k] - 1, slots[k] + 1, -1, num_slots}:
            new = (*slots[:k], other, *slots[k + 1 :])
            changed.append(dataclasses.replace(instruction, **{field: new}))
          new = (*slots[:k], *slots[k + 1 : k + 2], slots[k], *slots[k + 2 :])
          changed.append(dataclasses.replace(instruction, **{field: new}))
          changed.append(
              dataclasses.replace(instruction, **{field: (*slots[:k], *slots[k + 1 :])})
          )
      for new in changed:
        if new != instruction:
          yield with_list(plan, actor, [*row[:i], new, *row[i + 1 :]])


GOOD = {
    '1f1b': schedules.OneFOneB(3),
    'split': random_schedule(0, 3, 3, 2, 'FIW'),
    'random': random_schedule(2, 4, 2, 2),
}


@pytest.mark.parametrize('kind', [drops, swaps, doubles, moves, redirections])
@pytest.mark.parametrize('name', GOOD)
def test_every_single_mistake(name, kind):
  """Whatever one instruction is changed to: refused by actor and place, or without effect."""
  schedule = GOOD[name]
  phases = ['FIW' if name == 'split' else 'FB'] * schedule.num_stages
  synthetic = synthetic_step(schedule.placement(), 2, phases)
  good = lower(synthetic.step, schedule)
  verify(good)
  verify_values(good, synthetic.step, schedule)
  want = evaluate_step(synthetic)
  counts = {'refused': 0, 'other values': 0, 'harmless': 0}
  for plan in kind(good):
    try:
      verify(plan)
    except errors.PlanError as e:
      counts['refused'] += 1
      assert re.search(r'actor \d', str(e)), e
      assert re.search(r'instruction \d|at the (start|end)', str(e)), e
      continue
    try:
      verify_values(plan, synthetic.step, schedule)
    except errors.PlanError as e:
      counts['other values'] += 1
      assert re.search(r'actor \d(, instruction \d|, at the end)', str(e)), e
      run_plan(plan, synthetic.functions, synthetic.inputs)
      continue
    counts['harmless'] += 1
    assert evaluate_plan(plan, synthetic.functions, synthetic.inputs) == want
  assert counts['refused'] > 50
  if kind in (swaps, moves):
    assert counts['harmless'] > 20
  if kind is redirections:
    assert counts['other values'] > 50


def test_a_plan_of_another_step():
  """A plan for other actors, another schedule or other pieces isn't the step's."""
  schedule = GOOD['1f1b']
  step = synthetic_step(schedule.placement(), 2).step
  plan = lower(step, schedule)

  def refused(plan, step, schedule, *words):
    with pytest.raises(errors.PlanError) as e:
      verify_values(plan, step, schedule)
    assert all(word in str(e.value) for word in words), str(e.value)

  refused(plan, synthetic_step((0, 1), 2).step, schedules.OneFOneB(2), '3 actors', 'for 2')
  refused(plan, step, schedules.GPipe(3), 'actor 2, instruction', 'the schedule has 2F1 there')
  more = synthetic_step(schedule.placement(), 3).step
  refused(plan, more, schedule, 'actor 0, instruction', 'the schedule has 0F2 there')
  fewer = synthetic_step(schedule.placement(), 1).step
  refused(plan, fewer, schedule, 'actor 0, instruction', 'the schedule has 0B0 there')
  first = plan.actors[0]
  swapped = dataclasses.replace(first, input_values=first.input_values[::-1])
  plan = dataclasses.replace(plan, actors=(swapped, *plan.actors[1:]))
  refused(plan, step, schedule, 'actor 0', 'other inputs than the step')
