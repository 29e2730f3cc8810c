"""A tied-embedding transformer trained by `mpmd_jit` and by `jax.jit`."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import pax_mpmd as mpmd
from pax_mpmd import schedules
from tests import oracle
from tests.core import test_models
from tests.core import test_shared_weights
from tests.core import toy
from tests.core import transformer
from tests.schedules.random_schedules import ascending
from tests.schedules.random_schedules import random_schedule

STAGES, MICROBATCHES, STEPS = 4, 4, 10


class Reversed(schedules.Schedule):
  """1F1B with the last stage on the first actor."""

  def placement(self):
    return tuple(reversed(range(self.num_stages)))

  def tasks(self, num_microbatches):
    return tuple(reversed(schedules.OneFOneB(self.num_stages).tasks(num_microbatches)))


SCHEDULES = {
    'gpipe': schedules.GPipe(num_stages=STAGES),
    '1f1b': schedules.OneFOneB(num_stages=STAGES),
    'interleaved': schedules.InterleavedOneFOneB(num_stages=STAGES, num_actors=2),
    '1f1b on 2 actors': schedules.OneFOneB(num_stages=STAGES, num_actors=2),
    '1f1b reversed': Reversed(num_stages=STAGES),
    'random': ascending(random_schedule(0, STAGES, 3, MICROBATCHES), MICROBATCHES),
}


def train(fn, num_steps=STEPS):
  """The states before and after each of `num_steps`, and what each step returned."""
  state, outs = transformer.init(STAGES), []
  states = [state]
  for i in range(num_steps):
    state, out = fn(state, transformer.batch(MICROBATCHES, seed=i))
    states.append(mpmd.device_get(state))
    outs.append(mpmd.device_get(out))
  return states, outs


@functools.cache
def by_jax():
  return train(jax.jit(transformer.train_step))


@functools.cache
def by_mpmd(name):
  with mpmd.LocalRuntime(devices=jax.devices()[:1]) as runtime:
    return train(
        mpmd.mpmd_jit(
            transformer.train_step, schedule=SCHEDULES[name], runtime=runtime, donate_argnums=0
        )
    )


@pytest.mark.parametrize('name', ['gpipe', '1f1b', 'interleaved'])
def test_training_is_that_of_jax(name):
  """Losses, gradients, their norm and the state of 10 steps, clipping at work."""
  states, outs = by_mpmd(name)
  expected_states, expected = by_jax()
  for i, (a, d) in enumerate(zip(outs, expected)):
    assert d['norm'] > transformer.CLIP
    for key in ('losses', 'norm', 'accuracies'):
      np.testing.assert_allclose(a[key], d[key], rtol=2e-5, err_msg=f'{key} of step {i}')
    oracle.assert_trees_close(a['grads'], d['grads'], rtol=1e-4, atol=1e-5, what=f'step {i} ')
  oracle.assert_trees_close(states[-1], expected_states[-1], rtol=1e-4, atol=1e-5)
  assert outs[-1]['losses'].mean() < outs[0]['losses'].mean() - 0.2


def test_schedules_agree_to_the_last_bit():
  """Schedules that add the gradients in the same order give the same bits."""
  assert np.isfinite(by_mpmd('gpipe')[1][-1]['norm'])
  oracle.assert_trees_equal(by_mpmd('1f1b'), by_mpmd('gpipe'))


@pytest.mark.parametrize('name', [n for n in SCHEDULES if n not in ('gpipe', '1f1b')])
def test_placements_agree_to_the_last_bit(name):
  """What the loop makes of a state has the same bits wherever the stages are.

  So has what code after the loop makes of it, but for the choice of newer XLA versions to round a
  product before it is added or not, which depends on what is compiled together.
  """
  states, outs = by_mpmd('gpipe')
  with mpmd.LocalRuntime(devices=jax.devices()[:1]) as runtime:
    fn = mpmd.mpmd_jit(transformer.train_step, schedule=SCHEDULES[name], runtime=runtime)
    for i, expected in enumerate(outs):
      batch = transformer.batch(MICROBATCHES, seed=i)
      state, out = mpmd.device_get(fn(states[i], batch))
      for key in ('grads', 'losses', 'accuracies'):
        oracle.assert_trees_equal(out[key], expected[key], what=f'{key} of step {i}')
      np.testing.assert_allclose(out['norm'], expected['norm'], rtol=1e-6)
      oracle.assert_trees_close(state, states[i + 1], rtol=2e-6, atol=1e-7, what=f'step {i} ')


@pytest.fixture(scope='module')
def ray_runtime():
  # XLA's matrix products on a CPU add in another order where they may use one thread only.
  runtime = mpmd.RayRuntime(threads_per_actor=2)
  yield runtime
  runtime.close()


@pytest.mark.parametrize('name', ['gpipe', '1f1b'])
def test_ray_agrees_with_threads_to_the_last_bit(ray_runtime, name):
  """Actors in processes of their own give what actors in threads give."""
  fn = mpmd.mpmd_jit(
      transformer.train_step, schedule=SCHEDULES[name], runtime=ray_runtime, donate_argnums=0
  )
  oracle.assert_trees_equal(train(fn), by_mpmd(name))


@pytest.mark.parametrize('name', ['stages_of_different_kind', 'encoder_decoder', 'shared weights'])
def test_other_steps_agree_on_both_runtimes(ray_runtime, name):
  """More steps on the same actors: several kinds of stage, several streams, shared weights."""
  if name == 'shared weights':
    step = toy.train_step(test_shared_weights.loss)
    args = test_shared_weights.weights(), toy.batch()
  else:
    step, args = test_models.CASES[name].step, test_models.CASES[name].args
  with mpmd.LocalRuntime(devices=jax.devices()[:1]) as threads:
    by_threads, by_processes = (
        oracle.run(
            mpmd.mpmd_jit(step, schedule=SCHEDULES['1f1b'], runtime=runtime, donate_argnums=0),
            args,
            num_calls=2,
        )
        for runtime in (threads, ray_runtime)
    )
  oracle.assert_trees_equal(by_processes, by_threads)
