"""Every named schedule gives the result of `jax.jit`, over a grid of sizes."""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
import pytest

import pax_mpmd as mpmd
from pax_mpmd import schedules
from tests import oracle
from tests.core import toy
from tests.core.replan import with_program

# (num_actors, num_stages, num_microbatches): one actor, as many as stages, fewer; one microbatch,
# fewer than actors, more; with both equal to and above what the V schedules' orders are made for.
SIZES = [
    (1, 1, 4), (2, 2, 4), (3, 3, 5), (4, 8, 1), (2, 4, 12), (4, 4, 4), (4, 4, 8), (3, 6, 6),
    (3, 6, 10),
]
# What a schedule needs of (num_actors, num_stages); one that isn't named here takes all sizes.
NEEDS: dict[str, Callable[[int, int], bool]] = {
    'interleaved_1f1b': lambda actors, stages: stages % actors == 0,
    'bfs': lambda actors, stages: stages % actors == 0,
    'zb_v': lambda actors, stages: stages == 2 * actors,
    'dualpipe_v': lambda actors, stages: stages == 2 * actors,
}


@functools.cache
def step_of(num_stages):
  """A training step of dense layers, one to a stage, whose first weight is the last one's too."""

  def loss(params, microbatch):
    x = toy.dense(params[0], microbatch['x'])
    for weight in params[1:]:
      x = toy.dense(weight, mpmd.pipeline_yield(x))
    return toy.mse(x @ params[0].T, microbatch['y'])

  return toy.train_step(loss)


@functools.cache
def expected(num_stages, num_microbatches):
  args = toy.weights(num_stages), toy.batch(num_microbatches)
  return jax.device_get(jax.jit(step_of(num_stages))(*args))


@pytest.fixture(scope='module')
def run():
  """A function (schedule, M) -> result, with a runtime for each number of actors.

  Schedules of equal placement that split the same stages share one compiled step.
  """
  runtimes: dict[int, mpmd.LocalRuntime] = {}
  programs = {}

  def call(schedule, num_microbatches):
    runtime = runtimes.setdefault(
        schedule.num_actors, mpmd.LocalRuntime(devices=jax.devices()[:1])
    )
    fn = mpmd.mpmd_jit(step_of(schedule.num_stages), schedule=schedule, runtime=runtime)
    args = toy.weights(schedule.num_stages), toy.batch(num_microbatches)
    lists = schedule.tasks(num_microbatches)
    split = frozenset(t.stage for tasks in lists for t in tasks if t.phase is schedules.Phase.W)
    key = tuple(schedule.placement()), split, num_microbatches
    if key in programs:
      fn = with_program(fn, programs[key], args)
    else:
      programs[key] = fn.plan(*args)
    return fn(*args)

  yield call
  for runtime in runtimes.values():
    runtime.close()


def _sizes(name):
  needs = NEEDS.get(name, lambda actors, stages: True)
  return [size for size in SIZES if needs(*size[:2])]


@pytest.mark.parametrize('name', schedules.NAMES)
def test_named_schedules(name, run):
  """Losses, gradient norm and parameters are those of the plain program."""
  assert _sizes(name)
  for num_actors, num_stages, num_microbatches in _sizes(name):
    schedule = schedules.get(name, num_stages=num_stages, num_actors=num_actors)
    result = run(schedule, num_microbatches)
    oracle.assert_trees_close(
        result, expected(num_stages, num_microbatches), what=f'{schedule}, {num_microbatches}: '
    )


@pytest.mark.parametrize('name', sorted(NEEDS))
def test_needs_are_those_stated(name):
  """Sizes that don't suit are refused with the numbers, all others are taken."""
  refused = 0
  for num_actors, num_stages in {size[:2] for size in [*SIZES, (2, 3), (3, 4), (1, 2)]}:
    if NEEDS[name](num_actors, num_stages):
      schedules.get(name, num_stages=num_stages, num_actors=num_actors)
      continue
    refused += 1
    with pytest.raises(mpmd.ScheduleError, match=rf'\b{num_stages}\b.*\b{num_actors}\b'):
      schedules.get(name, num_stages=num_stages, num_actors=num_actors)
  assert refused
