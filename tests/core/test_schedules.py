"""Any valid schedule runs to the end and gives the result of `jax.jit`; others are refused."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import pax_mpmd as mpmd
from pax_mpmd import plan as planning
from pax_mpmd import schedules
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import Task
from tests import oracle
from tests.core import toy
from tests.schedules.random_schedules import ascending
from tests.schedules.random_schedules import random_schedule

STAGES = ACTORS = 3
MICROBATCHES = 4


def loss(p, mb):
  """Three stages with a weight that the first and the last share, and a skip over the middle."""
  first = toy.dense(p['shared'], mb['x'])
  x = mpmd.pipeline_yield(first)
  x = mpmd.pipeline_yield(toy.dense(p['middle'], x))
  return toy.mse((x + first) @ p['shared'].T, mb['y'])


STEP = toy.train_step(loss)
PARAMS = dict(zip(('shared', 'middle'), toy.weights(2)))
BATCH = toy.batch(MICROBATCHES)


@functools.cache
def expected():
  return mpmd.device_get(jax.jit(STEP)(PARAMS, BATCH))


@functools.cache
def program(placement, is_split):
  """The compiled step; of a schedule it depends only on the placement and on what is split."""
  class Some(schedules.GPipe):
    def placement(self):
      return placement

    def tasks(self, num_microbatches):
      lists = super().tasks(num_microbatches)
      if not is_split:
        return lists
      return [
          [Task(t.stage, p, t.microbatch) for t in tasks for p in _SPLIT.get(t.phase, (t.phase,))]
          for tasks in lists
      ]

  fn = mpmd.mpmd_jit(
      STEP, schedule=Some(num_stages=STAGES, num_actors=ACTORS), runtime=mpmd.LocalRuntime()
  )
  return fn.plan(PARAMS, BATCH)


_SPLIT = {Phase.B: (Phase.I, Phase.W)}


class Runner:
  """Runs schedules on one runtime, whose actors compile each program once."""

  def __init__(self, channel_capacity):
    self.runtime = mpmd.LocalRuntime(
        devices=jax.devices()[:1], channel_capacity=channel_capacity
    )
    self.runtime.start(ACTORS)

  def __call__(self, schedule):
    present = {task.phase for tasks in schedule.tasks(MICROBATCHES) for task in tasks}
    planned = program(tuple(schedule.placement()), Phase.W in present)
    plan = planning.lower(planned.program, schedule)
    planning.verify(plan)
    handle = self.runtime.load(plan)
    leaves = jax.tree_util.tree_leaves((PARAMS, BATCH))
    inputs = []
    for actor in plan.actors:
      inputs.append([])
      for position, k in actor.input_values:
        piece = planned.program.inputs[position].pieces[k]
        shape = planned.program.values[piece.value].shape
        box = tuple(slice(a, a + n) for a, n in zip(piece.start, shape))
        inputs[-1].append(np.asarray(leaves[position])[box])
    outputs = self.runtime.run(handle, inputs)
    by_leaf = {}
    for actor, buffers in zip(plan.actors, outputs):
      for (position, k), value in zip(actor.output_values, self.runtime.fetch(buffers)):
        assert k == 0
        by_leaf[position] = value
    flat = [by_leaf[i] for i in range(len(by_leaf))]
    return jax.tree_util.tree_unflatten(planned.out_tree, flat)


@pytest.fixture(scope='module', params=[None, 0], ids=['channels', 'rendezvous'])
def runner(request):
  made = Runner(request.param)
  yield made
  made.runtime.close()


def _accumulates_in_order(schedule):
  for tasks in schedule.tasks(MICROBATCHES):
    seen = {}
    for task in tasks:
      if task.phase is Phase.B:
        if task.microbatch != seen.get(task.stage, 0):
          return False
        seen[task.stage] = task.microbatch + 1
  return True


@pytest.mark.timeout(120)
def test_hundred_random_schedules(runner):
  """None hangs, also where channels hold nothing, and all give the same."""
  exact = runner(schedules.GPipe(num_stages=STAGES))
  oracle.assert_trees_close(exact, expected())
  for seed in range(100):
    schedule = random_schedule(seed, STAGES, ACTORS, MICROBATCHES)
    oracle.assert_trees_close(runner(schedule), expected(), what=f'seed {seed} ')
    schedule = ascending(schedule, MICROBATCHES)
    assert _accumulates_in_order(schedule)
    oracle.assert_trees_equal(runner(schedule), exact, what=f'seed {seed}, in order ')


@pytest.mark.timeout(120)
def test_random_schedules_that_split_the_backward(runner):
  """The same with I and W in place of B: for all, or for some microbatches of some stages."""
  exact = None
  for seed in range(30):
    schedule = random_schedule(seed, STAGES, ACTORS, MICROBATCHES, 'each')
    oracle.assert_trees_close(runner(schedule), expected(), what=f'seed {seed} ')
    schedule = random_schedule(seed, STAGES, ACTORS, MICROBATCHES, 'FIW')
    got = runner(ascending(schedule, MICROBATCHES))
    oracle.assert_trees_close(got, expected(), what=f'seed {seed}, all split ')
    exact = exact or got
    oracle.assert_trees_equal(got, exact, what=f'seed {seed}, in order ')


@pytest.mark.parametrize('capacity', [None, 0, 1])
def test_opposite_orders_across_stages(capacity):
  """Actor 0 owns stages 0 and 2, actor 1 stages 1 and 3; each sends what the other wants last."""
  rows = [
      ['0F0', '0F1', '2F1', '2F0', '2B0', '2B1', '0B1', '0B0'],
      ['1F1', '1F0', '3F0', '3B0', '3F1', '3B1', '1B1', '1B0'],
  ]
  lists = [[schedules.Task.parse(text) for text in row] for row in rows]

  def skip_loss(ws, mb):
    kept = []
    x = mb['x']
    for i, w in enumerate(ws):
      x = toy.dense(w, x) + sum(kept)
      kept.append(x)
      x = mpmd.pipeline_yield(x) if i < 3 else x
    return toy.mse(x, mb['y'])

  with mpmd.LocalRuntime(channel_capacity=capacity) as runtime:
    oracle.check(
        toy.train_step(skip_loss),
        toy.weights(4),
        toy.batch(2),
        schedule=schedules.FromTable(lists),
        runtime=runtime,
        num_calls=2,
    )


def test_a_cycle_is_refused_and_printed():
  """Two actors that own stages 0 and 2, and 1, and each wait for what the other makes later."""
  rows = [
      ['0F0', '2F0', '0F1', '2F1', '2B1', '2B0', '0B0', '0B1'],
      ['1F1', '1F0', '1B0', '1B1'],
  ]
  lists = [[schedules.Task.parse(text) for text in row] for row in rows]
  fn = mpmd.mpmd_jit(
      STEP, schedule=schedules.FromTable(lists), runtime=mpmd.LocalRuntime()
  )
  with pytest.raises(mpmd.ScheduleError) as caught:
    fn(PARAMS, toy.batch(2))
  text = str(caught.value)
  assert 'wait for each other' in text and '>2F0<' in text and '>1F1<' in text
  assert '2F0 (actor 0) needs 1F0, which comes after 1F1 on actor 1' in text
  assert '1F1 (actor 1) needs 0F1, which comes after 2F0 on actor 0' in text
