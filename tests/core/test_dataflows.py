"""Dataflows of models: each gives under `mpmd_jit` what it gives under `jax.jit`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from tests import oracle
from tests.core import toy
from tests.core.toy import dense
from tests.core.toy import mse


def chain(*stages):
  """A function of x that runs the stages with a yield between them."""

  def run(x):
    for i, stage in enumerate(stages):
      x = stage(x)
      if i < len(stages) - 1:
        x = mpmd.pipeline_yield(x)
    return x

  return run


def test_skip_over_stages():
  """The first stage's activation is used again by the last, outside of the yields."""

  def loss(ws, mb):
    first = dense(ws[0], mb['x'])
    x = mpmd.pipeline_yield(first)
    x = mpmd.pipeline_yield(dense(ws[1], x))
    return mse(dense(ws[2], x + first), mb['y'])

  oracle.check(toy.train_step(loss), toy.weights(), toy.batch(), num_calls=2)


@pytest.mark.parametrize('schedule', ['gpipe', '1f1b'])
def test_skip_over_four_stages_on_two_actors(schedule):
  """Skips that leave and come back to an actor, and one that goes from the last stage's input."""

  def loss(ws, mb):
    a = dense(ws[0], mb['x'])
    b = dense(ws[1], mpmd.pipeline_yield(a))
    c = dense(ws[2], mpmd.pipeline_yield(b) + a)
    d = dense(ws[3], mpmd.pipeline_yield(c) + a * b)
    return mse(d, mb['y'] + a)

  step = toy.train_step(loss)
  args = (toy.weights(4), toy.batch())
  oracle.check(step, *args, schedule=schedule, num_stages=4, num_actors=2, num_calls=2)
  oracle.check(
      step, *args, schedule='interleaved_1f1b', num_stages=4, num_actors=2, num_calls=2
  )


def test_weight_shared_by_all_stages():
  """One matrix is used by each stage, and twice within each."""

  def loss(w, mb):
    x = chain(*[lambda x: dense(w, dense(w, x))] * 3)(mb['x'])
    return mse(x @ w.T, mb['y'])

  oracle.check(toy.train_step(loss), toy.weights()[0], toy.batch(), num_calls=3)


@pytest.mark.parametrize('dtype', [jnp.float16, jnp.bfloat16])
def test_shared_weight_with_cast(dtype):
  """A weight that two stages share is cast to a small type before each use."""

  def loss(ws, mb):
    low = lambda w: w.astype(dtype)
    x = mpmd.pipeline_yield(dense(low(ws[0]), mb['x'].astype(dtype)))
    x = mpmd.pipeline_yield(dense(low(ws[1]), x))
    return mse((x @ low(ws[0]).T).astype(jnp.float32), mb['y'])

  oracle.check(toy.train_step(loss), toy.weights(), toy.batch(), rtol=5e-2, atol=5e-3)


def test_metrics_summed_and_stacked():
  """Values of the middle of the pipeline are summed, stacked, or both."""

  def step(ws, batch):
    def grads_fn(mb):
      def loss(ws):
        x = dense(ws[0], mb['x'])
        count = jnp.sum(mb['x'] > 0)
        x = mpmd.pipeline_yield(x)
        middle = jnp.max(x)
        x = mpmd.pipeline_yield(dense(ws[1], x))
        out = dense(ws[2], x)
        return mse(out, mb['y']), {'middle': middle, 'count': count, 'out': out}

      (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(ws)
      norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
      return (grads, aux['count'], aux['middle']), (value, aux, norm)

    return mpmd.accumulate_grads(grads_fn, batch)

  oracle.check(step, toy.weights(), toy.batch())


def test_unused_parameter():
  """A parameter without a use has gradient zero and keeps its value."""

  def loss(p, mb):
    return mse(chain(*[functools.partial(dense, w) for w in p['w']])(mb['x']), mb['y'])

  params = {'w': toy.weights(), 'unused': np.ones((5,), np.float32)}
  oracle.check(toy.train_step(loss), params, toy.batch(), num_calls=2)


@pytest.mark.parametrize('frozen', [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_frozen_stages(frozen):
  """Stages under stop_gradient; where the first ones are frozen they have no backward."""

  def loss(ws, mb):
    ws = [jax.lax.stop_gradient(w) if i in frozen else w for i, w in enumerate(ws)]
    return mse(chain(*[functools.partial(dense, w) for w in ws])(mb['x']), mb['y'])

  oracle.check(toy.train_step(loss), toy.weights(), toy.batch(), num_calls=2)


def test_frozen_middle_activation():
  """Nothing flows back through the first boundary."""

  def loss(ws, mb):
    x = mpmd.pipeline_yield(dense(ws[0], mb['x']))
    x = mpmd.pipeline_yield(dense(ws[1], jax.lax.stop_gradient(x)))
    return mse(dense(ws[2], x), mb['y'])

  oracle.check(toy.train_step(loss), toy.weights(), toy.batch())


@pytest.mark.parametrize('last_yield', [False, True])
@pytest.mark.parametrize('schedule', ['gpipe', '1f1b'])
def test_forward_only(last_yield, schedule):
  """A step without a gradient, as in evaluation."""

  def step(ws, batch):
    def fn(mb):
      x = chain(*[functools.partial(dense, w) for w in ws])(mb['x'])
      if last_yield:
        x = mpmd.pipeline_yield(x)
      return mse(x, mb['y']), x

    return mpmd.accumulate_grads(fn, batch)

  oracle.check(step, toy.weights(), toy.batch(), schedule=schedule)


@pytest.mark.parametrize('schedule', ['gpipe', '1f1b'])
def test_yield_after_the_last_stage(schedule):
  """As many yields as stages: the last one changes nothing."""

  def loss(ws, mb):
    x = chain(*[functools.partial(dense, w) for w in ws])(mb['x'])
    return mse(mpmd.pipeline_yield(x), mb['y'])

  oracle.check(toy.train_step(loss), toy.weights(), toy.batch(), schedule=schedule)


def test_trees_at_yields():
  """Integers, booleans, scalars, tuples and dicts cross a boundary."""

  def loss(ws, mb):
    x = dense(ws[0], mb['x'])
    tree = {'x': (x, x > 0), 'n': jnp.argmax(x, -1), 'scale': jnp.sum(x), 'k': 3}
    tree = mpmd.pipeline_yield(tree)
    x, positive = tree['x']
    x = jnp.where(positive, dense(ws[1], x), x) * tree['k'] + tree['n'][:, None]
    x, scale = mpmd.pipeline_yield((x, tree['scale']))
    return mse(dense(ws[2], x) * jnp.tanh(scale), mb['y'])

  oracle.check(toy.train_step(loss), toy.weights(), toy.batch())


def test_value_passed_through_all_yields():
  """A value of the batch travels along with the activation, as in encoder-decoder models."""

  def loss(ws, mb):
    x, side = mb['x'], dense(ws[0], mb['y'])
    for i, w in enumerate(ws):
      x = dense(w, x) + 0.1 * side
      if i < 2:
        x, side = mpmd.pipeline_yield((x, side))
    return mse(x, mb['y'])

  oracle.check(toy.train_step(loss), toy.weights(), toy.batch())


def test_control_flow_in_stages():
  """cond, while, scan and fori_loop within stages."""

  def scanned(w, x):
    return jax.lax.scan(lambda x, w: (dense(w, x), None), x, jnp.stack([w, w * 0.5]))[0]

  def branched(w, x):
    return jax.lax.cond(jnp.sum(x) > 0, lambda x: dense(w, x), lambda x: x @ w, x)

  def looped(w, x):
    x = jax.lax.stop_gradient(
        jax.lax.while_loop(lambda x: jnp.max(x) < 3, lambda x: x * 1.5 + 0.5, x)
    )
    return jax.lax.fori_loop(0, 3, lambda i, x: dense(w, x), x)

  def loss(ws, mb):
    stages = [functools.partial(f, w) for f, w in zip([scanned, branched, looped], ws)]
    return mse(chain(*stages)(mb['x']), mb['y'])

  oracle.check(toy.train_step(loss), toy.weights(), toy.batch(), num_calls=2)


def test_custom_vjp_in_a_stage():
  """A stage with its own differentiation rule; so that a wrong inlining shows, a wrong rule."""

  @jax.custom_vjp
  def odd(x):
    return jnp.sin(x)

  odd.defvjp(lambda x: (odd(x), x), lambda x, g: (g * 0.5 * x,))

  @jax.custom_jvp
  def odder(x):
    return jnp.cos(x)

  odder.defjvp(lambda p, t: (jnp.cos(p[0]), t[0] * 0.25 * p[0]))

  def loss(ws, mb):
    stages = [lambda x, w=w: odder(odd(dense(w, x))) for w in ws]
    return mse(chain(*stages)(mb['x']), mb['y'])

  oracle.check(toy.train_step(loss), toy.weights(), toy.batch(), num_calls=2)


@pytest.mark.parametrize('remat', [False, True])
def test_one_jitted_stage_function(remat):
  """A jitted function that yields is called once per stage, traced once."""
  stage = jax.checkpoint(dense) if remat else dense

  @jax.jit
  def stage_and_yield(w, x):
    return mpmd.pipeline_yield(stage(w, x))

  def loss(ws, mb):
    x = mb['x']
    for w in ws:
      x = stage_and_yield(w, x)
    return mse(x, mb['y'])

  oracle.check(toy.train_step(loss), toy.weights(), toy.batch(), num_calls=2)


@pytest.mark.parametrize('num_microbatches', [1, 2])
@pytest.mark.parametrize('num_stages,num_actors', [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_few_microbatches_stages_actors(num_microbatches, num_stages, num_actors):
  """One microbatch, one stage, one actor."""

  def loss(ws, mb):
    return mse(chain(*[functools.partial(dense, w) for w in ws])(mb['x']), mb['y'])

  for schedule in ('gpipe', '1f1b'):
    oracle.check(
        toy.train_step(loss),
        toy.weights(num_stages),
        toy.batch(num_microbatches),
        schedule=schedule,
        num_stages=num_stages,
        num_actors=num_actors,
        num_calls=2,
    )


def test_empty_stage():
  """A stage that does nothing but pass its input on."""

  def loss(ws, mb):
    x = mpmd.pipeline_yield(dense(ws[0], mb['x']))
    x = mpmd.pipeline_yield(x)
    return mse(dense(ws[1], x), mb['y'])

  oracle.check(toy.train_step(loss), toy.weights(2), toy.batch())


def test_gradient_in_several_microbatch_sized_results():
  """A loss weighted by a count, and gradients divided by the counts' sum."""

  def step(ws, batch):
    def grads_fn(mb):
      def loss(ws):
        x = chain(*[functools.partial(dense, w) for w in ws])(mb['x'])
        weight = (mb['y'] > 0).astype(jnp.float32)
        return jnp.sum((x - mb['y']) ** 2 * weight), jnp.sum(weight)

      (value, weight), grads = jax.value_and_grad(loss, has_aux=True)(ws)
      return (grads, value, weight), value / weight

    (grads, value, weight), losses = mpmd.accumulate_grads(grads_fn, batch)
    ws = jax.tree_util.tree_map(lambda w, g: w - 0.1 * g / weight, ws, grads)
    return ws, (value / weight, losses)

  oracle.check(step, toy.weights(), toy.batch(), num_calls=3)


# -- random numbers --------------------------------------------------------------------------------


def dropout(key, x):
  return x * jax.random.bernoulli(key, 0.5, x.shape) * 2


def test_dropout_with_raw_keys_in_the_batch():
  """uint32 keys, one per microbatch, split per stage."""

  def loss(ws, mb):
    stages = [
        lambda x, i=i, w=w: dropout(jax.random.fold_in(mb['key'], i), dense(w, x))
        for i, w in enumerate(ws)
    ]
    return mse(chain(*stages)(mb['x']), mb['y'])

  def step(state, batch):
    params, key = state
    key, now = jax.random.split(key)
    keys = jax.random.split(now, batch['x'].shape[0])
    params, out = toy.train_step(loss)(params, {**batch, 'key': keys})
    return (params, key), out

  key = jax.random.PRNGKey(7)
  oracle.check(step, (toy.weights(), np.asarray(key)), toy.batch(), num_calls=3)


@pytest.mark.parametrize('at_yield', [False, True])
def test_dropout_with_typed_keys(at_yield):
  """Keys of `jax.random.key` are split in the prologue, cross programs and boundaries."""

  def loss(ws, mb):
    x, key = mb['x'], mb['key']
    for i, w in enumerate(ws):
      key, now = jax.random.split(key)
      x = dropout(now, dense(w, x))
      if i < len(ws) - 1:
        if at_yield:
          x, key = mpmd.pipeline_yield((x, key))
        else:
          x = mpmd.pipeline_yield(x)
    return mse(x, mb['y'])

  def step(state, batch):
    params, seed = state
    keys = jax.random.split(jax.random.key(seed), batch['x'].shape[0])
    params, out = toy.train_step(loss)(params, {**batch, 'key': keys})
    return (params, seed + 1), out

  oracle.check(step, (toy.weights(), np.int32(3)), toy.batch(), num_calls=3)


def test_typed_key_invariant_over_microbatches():
  """A typed key that all microbatches share, and that a later program reads again."""

  def step(state, batch):
    params, seed = state
    key = jax.random.key(seed)

    def loss(ws, mb):
      stages = [lambda x, w=w: dropout(key, dense(w, x)) for w in ws]
      return mse(chain(*stages)(mb['x']), mb['y'])

    params, out = toy.train_step(loss)(params, batch)
    noise = jax.random.normal(key, params[0].shape)
    return ([p + 0.01 * noise for p in params], seed + 1), out

  oracle.check(step, (toy.weights(), np.int32(3)), toy.batch(), num_calls=2)


# -- what goes in and comes out --------------------------------------------------------------------


def _loss(ws, mb):
  return mse(chain(*[functools.partial(dense, w) for w in ws])(mb['x']), mb['y'])


def test_odd_results():
  """Inputs, constants, literals and repeated arrays among the results."""

  def step(ws, batch, extra):
    params, (losses, norm) = toy.train_step(_loss)(ws, batch)
    return params, {
        'losses': losses,
        'again': losses,
        'norm': norm,
        'extra': extra,
        'old': ws[0],
        'zero': jnp.zeros(()),
        'constant': np.arange(6, dtype=np.float32).reshape(2, 3),
        'batch': batch['x'],
        'first': params[0],
        'python': 3,
        'none': None,
    }

  args = (toy.weights(), toy.batch(), np.float32(3))
  oracle.check(step, *args, num_calls=2)
  oracle.check(step, *args, num_calls=2, donate_argnums=0)


def test_step_without_optimizer():
  """The step returns the summed gradients."""

  def step(ws, batch):
    def grads_fn(mb):
      loss, grads = jax.value_and_grad(_loss)(ws, mb)
      return grads, loss

    return mpmd.accumulate_grads(grads_fn, batch)

  oracle.check(step, toy.weights(), toy.batch())


def test_second_call_with_new_shapes():
  """Another number of microbatches compiles another step; both stay usable."""
  runtime = mpmd.LocalRuntime()
  step = toy.train_step(_loss)
  fn = mpmd.mpmd_jit(step, schedule=mpmd.schedules.OneFOneB(num_stages=3), runtime=runtime)
  ws = toy.weights()
  for m in (2, 4, 2):
    ws, out = fn(ws, toy.batch(m))
    oracle.assert_trees_close(out[0], jax.jit(step)(mpmd.device_get(ws), toy.batch(m))[1][0], 1e0)
  runtime.close()


def test_mixed_inputs():
  """numpy arrays, jax arrays, MpmdArrays and Python numbers as arguments of one call."""
  runtime = mpmd.LocalRuntime()

  def step(ws, batch, scale):
    params, out = toy.train_step(_loss)(ws, batch)
    return [p * scale for p in params], out

  fn = mpmd.mpmd_jit(step, schedule=mpmd.schedules.GPipe(num_stages=3), runtime=runtime)
  ws = toy.weights()
  made, _ = fn(ws, toy.batch(), 1.5)
  expected, _ = jax.jit(step)(ws, toy.batch(), 1.5)
  # The matrices change places, so that an actor needs what another one holds.
  mixed = [made[2], np.asarray(made[1]), jnp.asarray(expected[0])]
  actual = fn(mixed, toy.batch(), np.float32(0.5))
  desired = jax.jit(step)([expected[2], expected[1], expected[0]], toy.batch(), 0.5)
  oracle.assert_trees_close(actual, desired)
  runtime.close()


def test_donated_twice():
  """The same array at two donated places of the state."""
  w = toy.weights()[0]

  def step(state, batch):
    params, out = toy.train_step(_loss)(state['w'], batch)
    return {'w': params, 'ema': [0.9 * e + 0.1 * p for e, p in zip(state['ema'], params)]}, out

  runtime = mpmd.LocalRuntime()
  schedule = mpmd.schedules.OneFOneB(num_stages=3)
  fn = mpmd.mpmd_jit(step, schedule=schedule, runtime=runtime, donate_argnums=0)
  state = {'w': [w] * 3, 'ema': [w] * 3}
  desired = jax.jit(step)(state, toy.batch())
  first = fn(state, toy.batch())
  oracle.assert_trees_close(first, desired)
  # Now with arrays of the actors: one MpmdArray for both places.
  state = fn(state, toy.batch())[0]
  twice = {'w': state['w'], 'ema': state['w']}
  desired = jax.jit(step)(mpmd.device_get(twice), toy.batch())
  oracle.assert_trees_close(fn(twice, toy.batch()), desired)
  runtime.close()


def test_reading_a_donated_array():
  """It says that the array was donated, and the step's argument is refused as well."""
  runtime = mpmd.LocalRuntime()
  schedule = mpmd.schedules.OneFOneB(num_stages=3)
  fn = mpmd.mpmd_jit(
      toy.train_step(_loss), schedule=schedule, runtime=runtime, donate_argnums=0
  )
  state, _ = fn(toy.weights(), toy.batch())
  fn(state, toy.batch())
  with pytest.raises(mpmd.MpmdError, match='donated'):
    np.asarray(state[0])
  with pytest.raises(mpmd.MpmdError, match='donated'):
    fn(state, toy.batch())
  runtime.close()
