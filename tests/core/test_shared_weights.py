"""Weights that several stages share: right, and without a weight crossing for each microbatch."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_mpmd as mpmd
from tests import oracle
from tests.core import toy
from tests.core.test_counts import sends
from tests.core.toy import dense
from tests.core.toy import mse

ACTIVATION = 2 * 8 * 4  # bytes of one activation [2, 8]
WEIGHT = 8 * 8 * 4


def weights():
  """Four weights of their own ('w'), and three that stages share."""
  return {'w': toy.weights(4), **dict(zip('abc', toy.weights(3, seed=9)))}


def loss(p, mb):
  """Four stages. `a` serves stages 0 and 3, cast; `b` all, stage 1 twice; `c` stages 1 and 2."""
  a = (p['a'] * 0.5).astype(jnp.bfloat16)
  b = p['b'].T / 2
  c = jnp.pad(p['c'].reshape(4, 16)[1:], ((0, 1), (0, 0))).reshape(8, 8)
  low = lambda x: x.astype(jnp.bfloat16)
  x = dense(p['w'][0] + b, (low(mb['x']) @ a).astype(jnp.float32))
  x = mpmd.pipeline_yield(x)
  x = mpmd.pipeline_yield(dense(p['w'][1], dense(b, x) @ b + x @ c))
  x = mpmd.pipeline_yield(dense(p['w'][2], dense(b, x) + dense(c, x)))
  x = dense(p['w'][3], dense(b, x)) + (low(x) @ a.T).astype(jnp.float32)
  return mse(x, mb['y'])


def v_shaped(num_microbatches):
  """Stages 0 and 3 on actor 0, stages 1 and 2 on actor 1."""
  def rows(*tasks):
    return [f'{t}{m}' for t in tasks for m in range(num_microbatches)]

  return mpmd.schedules.FromTable([rows('0F', '3F', '3B', '0B'), rows('1F', '2F', '2B', '1B')])


def plan(step, args, schedule):
  return mpmd.mpmd_jit(step, schedule=schedule, runtime=mpmd.LocalRuntime()).plan(*args)


def bytes_sent(planned):
  """(from, to) -> bytes per step."""
  return {link: sum(map(sum, sizes)) for link, sizes in sends(planned).items()}


def bytes_per_microbatch(step, params, schedule):
  """(from, to) -> how much more is sent with one more microbatch."""
  few, many = (
      bytes_sent(plan(step, (params, toy.batch(m)), schedule(m))) for m in (2, 3)
  )
  assert set(few) == set(many)
  return {link: many[link] - few[link] for link in few if many[link] != few[link]}


def test_three_shared_weights():
  """Of 2, 3 and all stages, twice in one, cast, scaled, reshaped: equal to JAX."""
  for schedule in (mpmd.schedules.OneFOneB(num_stages=4), v_shaped(4)):
    planned = oracle.check(
        toy.train_step(loss), weights(), toy.batch(), schedule=schedule, num_calls=3, rtol=2e-3,
        atol=1e-4,
    )
    assert planned.notes == ()


def test_no_weight_crosses_for_each_microbatch():
  """What one more microbatch costs is an activation each way at each boundary."""
  step = toy.train_step(loss)
  schedule = lambda m: mpmd.schedules.OneFOneB(num_stages=4)
  links = [(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)]
  assert bytes_per_microbatch(step, weights(), schedule) == dict.fromkeys(links, ACTIVATION)


def test_uses_on_one_actor_need_no_transfer():
  """With a V placement, a weight of the first and last stage stays where it is."""

  def tied(p, mb):
    x = mpmd.pipeline_yield(dense(p['w'][0], mb['x'] @ p['a']))
    x = mpmd.pipeline_yield(dense(p['c'], dense(p['w'][1], x)))
    x = mpmd.pipeline_yield(dense(p['c'].T, x))
    return mse(dense(p['w'][3], x) @ p['a'].T, mb['y'])

  def step(p, batch):
    def fn(mb):
      value, grads = jax.value_and_grad(tied)(p, mb)
      return grads, value

    grads, losses = mpmd.accumulate_grads(fn, batch)
    return jax.tree_util.tree_map(lambda w, g: w - 0.1 * g, p, grads), losses

  planned = oracle.check(step, weights(), toy.batch(), schedule=v_shaped(4), num_calls=2)
  # Only activations and their gradients: at the boundaries 0|1 and 2|3.
  assert bytes_sent(planned) == {(0, 1): 2 * 4 * ACTIVATION, (1, 0): 2 * 4 * ACTIVATION}


CLIPS = {
    'norm': lambda g: g * jnp.minimum(1.0, 0.05 / jnp.linalg.norm(g)),
    'value': lambda g: jnp.clip(g, -0.01, 0.01),
    'log': lambda g: jnp.sign(g) * jnp.log1p(jnp.abs(g)),
}


@pytest.mark.parametrize('name', CLIPS)
def test_gradient_seen_for_each_microbatch(name, caplog):
  """A shared gradient that is clipped per microbatch is summed there; a log line says so."""

  def tied(p, mb):
    x = mpmd.pipeline_yield(dense(p['a'], mb['x']))
    return mse(dense(p['c'], x) @ p['a'].T, mb['y'])

  def step(p, batch):
    def fn(mb):
      value, grads = jax.value_and_grad(tied)(p, mb)
      return {**grads, 'a': CLIPS[name](grads['a'])}, value

    return mpmd.accumulate_grads(fn, batch)

  with caplog.at_level(logging.WARNING, logger='pax_mpmd'):
    oracle.check(step, {k: weights()[k] for k in 'ac'}, toy.batch(), num_stages=2)
  (line,) = {record.getMessage() for record in caplog.records}
  assert 'stages [0, 1] for every microbatch' in line and 'toy.py' in line


def test_copies_of_a_shared_weight_stay_equal():
  """Each actor that reads a weight has a copy of it, equal to the last bit after every step."""
  step = toy.train_step(loss)
  with mpmd.LocalRuntime() as runtime:
    fn = mpmd.mpmd_jit(
        step, schedule=mpmd.schedules.OneFOneB(num_stages=4), runtime=runtime, donate_argnums=0
    )
    p = weights()
    for i in range(2):
      p, _ = fn(p, toy.batch(seed=i))
      assert p['c'].actors == (1, 2)
      np.testing.assert_array_equal(*p['c'].copies())
    # Actor 3 reads `a` only as bfloat16: cast once per step, on one actor, and sent.
    assert p['a'].actors == (0,)


def test_a_cast_shared_weight_is_updated_in_one_place():
  """Outside the loop a part of the gradient goes to the weight's home and the weight back.

  Also where the loop sees the weight only as a cast made before it.
  """
  optimizer = optax.adamw(1e-2, weight_decay=0.1)

  def loss_fn(p, mb):
    tied = p['tied'].astype(jnp.bfloat16)
    low = lambda x: x.astype(jnp.bfloat16)
    x = dense(p['w'][0], (low(mb['x']) @ tied).astype(jnp.float32))
    x = mpmd.pipeline_yield(x)
    out = (low(dense(p['w'][1], x)) @ tied.T).astype(jnp.float32)
    return mse(out, mb['y'])

  def step(state, batch):
    params, slots = state

    def grads_fn(mb):
      value, grads = jax.value_and_grad(loss_fn)(params, mb)
      return grads, value

    grads, losses = mpmd.accumulate_grads(grads_fn, batch)
    updates, slots = optimizer.update(grads, slots, params)
    return (optax.apply_updates(params, updates), slots), losses

  params = {'w': toy.weights(2), 'tied': toy.weights(1, seed=9)[0]}
  planned = plan(
      step, ((params, optimizer.init(params)), toy.batch(2)), mpmd.schedules.OneFOneB(num_stages=2)
  )
  large = {  # at least the cast's bytes
      link: sum(size >= WEIGHT // 2 for message in messages for size in message)
      for link, messages in sends(planned).items()
  }
  assert large == {(0, 1): 1, (1, 0): 1}
