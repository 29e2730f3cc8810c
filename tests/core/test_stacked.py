"""Stage-stacked weights and the optimizers that update them, under `mpmd_jit` and `jax.jit`."""

from __future__ import annotations

import itertools

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_mpmd as mpmd
from tests import oracle
from tests.core import toy
from tests.core.toy import dense
from tests.core.toy import mse


def stacked(*leading: int, seed: int = 2) -> dict[str, np.ndarray]:
  """Weights `[*leading, 8, 8]`, biases and a scale that all stages share."""
  rng = np.random.default_rng(seed)
  f = lambda *shape: rng.normal(size=shape).astype(np.float32) * 0.3
  return {'w': f(*leading, 8, 8), 'b': f(*leading, 8), 'scale': 1 + f(8)}


def stage(w, b, scale, x):
  return dense(w, x * scale) + b


def loss(p, mb, num_stages=3):
  """Stage s uses `p['w'][s]`."""
  x = mb['x']
  for s in range(num_stages):
    x = jax.checkpoint(stage)(p['w'][s], p['b'][s], p['scale'], x)
    if s < num_stages - 1:
      x = mpmd.pipeline_yield(x)
  return mse(x, mb['y'])


def optax_step(tx, loss_fn=loss):
  """((params, optimizer state), batch) -> (the next ones, (losses, gradients' norm))."""

  def step(state, batch):
    params, opt = state

    def grads_fn(mb):
      value, grads = jax.value_and_grad(loss_fn)(params, mb)
      return grads, value

    grads, losses = mpmd.accumulate_grads(grads_fn, batch)
    grads = jax.tree_util.tree_map(lambda g: g / batch['x'].shape[0], grads)
    updates, opt = tx.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), (losses, optax.global_norm(grads))

  return step


def state_of(tx, params):
  return params, jax.tree_util.tree_map(np.asarray, tx.init(params))


OPTIMIZERS = {
    'sgd': optax.sgd(0.1, momentum=0.9),
    'adam': optax.adam(1e-2),
    'adamw': optax.adamw(1e-2),
    'lion': optax.lion(1e-2),
    'adafactor': optax.adafactor(1e-2, min_dim_size_to_factor=4),
    'clip': optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)),
    'clip_block': optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(1e-1)),
    'schedule': optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 5)),
    'apply_if_finite': optax.apply_if_finite(optax.adam(1e-2), 3),
    'multi_steps': optax.MultiSteps(optax.adam(1e-2), 2),
    'ema': optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    'lamb': optax.lamb(1e-2),
    'noise': optax.chain(toy.noise(0.01), optax.sgd(0.1)),
}


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_optimizers(name):
  """Parameters and optimizer state of 3 steps; adafactor's factored moments among them."""
  tx = OPTIMIZERS[name]
  step = optax_step(tx)
  args = (state_of(tx, stacked(3)), toy.batch())
  oracle.check(step, *args, num_calls=3, donate_argnums=0, atol=2e-6)


@pytest.mark.parametrize('name', ['adam', 'clip', 'schedule', 'apply_if_finite', 'multi_steps'])
def test_stacked_state_stays_in_pieces(name):
  """No program handles a whole stacked array: neither weights, nor gradients, nor moments."""
  tx = OPTIMIZERS[name]
  fn = mpmd.mpmd_jit(
      optax_step(tx), schedule=mpmd.schedules.OneFOneB(num_stages=3), runtime=mpmd.LocalRuntime()
  )
  planned = fn.plan(state_of(tx, stacked(3)), toy.batch())
  assert planned.notes == ()
  assert (3, 8, 8) not in {v.shape for v in planned.program.values.values()}
  # Whole, the leaf has one piece per stage.
  for leaf in planned.program.inputs:
    assert leaf.aval.shape != (3, 8, 8) or len(leaf.pieces) == 3


def test_apply_if_finite_skips_a_bad_step():
  """A batch with infinities leaves parameters and moments as they were."""
  tx = OPTIMIZERS['apply_if_finite']
  bad = toy.batch()
  bad['x'][1, 0, 0] = np.inf
  state = state_of(tx, stacked(3))
  runtime = mpmd.LocalRuntime()
  fn = mpmd.mpmd_jit(
      optax_step(tx), schedule=mpmd.schedules.OneFOneB(num_stages=3), runtime=runtime
  )
  reference = jax.jit(optax_step(tx))
  a = d = state
  for b in (toy.batch(), bad, toy.batch(seed=1)):
    a, d = fn(a, b)[0], reference(d, b)[0]
    oracle.assert_trees_close(a, d)
  assert int(np.asarray(a[1].total_notfinite)) == 1
  runtime.close()


@pytest.mark.parametrize('repeats,num_stages', [(2, 2), (2, 3)])
def test_two_leading_axes(repeats, num_stages):
  """Circular weights `[R, S, ...]`: R * S stages, each actor owns R of them."""

  def circular(p, mb):
    x = mb['x']
    for r in range(repeats):
      for s in range(num_stages):
        x = stage(p['w'][r, s], p['b'][r][s], p['scale'], x)
        if (r, s) != (repeats - 1, num_stages - 1):
          x = mpmd.pipeline_yield(x)
    return mse(x, mb['y'])

  tx = OPTIMIZERS['clip']
  oracle.check(
      optax_step(tx, circular),
      state_of(tx, stacked(repeats, num_stages)),
      toy.batch(2 * num_stages),
      schedule='interleaved_1f1b',
      num_stages=repeats * num_stages,
      num_actors=num_stages,
      num_calls=3,
  )


def _layers(p, mb, bounds):
  """Layers [L, ...], cut into stages at `bounds`; a scan over each stage's layers."""
  x = mb['x']
  for i, (a, b) in enumerate(itertools.pairwise(bounds)):
    body = lambda x, wb: (stage(wb[0], wb[1], p['scale'], x), None)
    x, _ = jax.lax.scan(body, x, (p['w'][a:b], p['b'][a:b]))
    if i < len(bounds) - 2:
      x = mpmd.pipeline_yield(x)
  return mse(x, mb['y'])


@pytest.mark.parametrize('bounds', [(0, 2, 4, 6), (0, 1, 3, 7), (0, 3, 4, 5)])
def test_chunks_of_layers(bounds):
  """`[L, ...]` in even and uneven chunks, each a scan."""
  tx = OPTIMIZERS['clip']
  oracle.check(
      optax_step(tx, lambda p, mb: _layers(p, mb, bounds)),
      state_of(tx, stacked(bounds[-1])),
      toy.batch(),
      num_calls=2,
  )


def test_some_layers_unused():
  """A chunk of the stacked layers that no stage uses."""

  def loss_fn(p, mb):
    return _layers({**p, 'w': p['w'][:3], 'b': p['b'][:3]}, mb, (0, 1, 2, 3))

  tx = OPTIMIZERS['adam']
  oracle.check(
      optax_step(tx, loss_fn), state_of(tx, stacked(5)), toy.batch(), num_calls=2
  )


def test_stacked_weights_used_whole_as_well():
  """A penalty on the whole stacked array inside the loop, and a use outside of it."""

  def loss_fn(p, mb):
    return loss(p, mb) + 1e-3 * jnp.sum(p['w'] ** 2)

  def step(state, batch):
    (params, opt), out = optax_step(OPTIMIZERS['adam'], loss_fn)(state, batch)
    return (params, opt), (out, jnp.linalg.norm(params['w'].reshape(3, -1), axis=1))

  oracle.check(step, state_of(OPTIMIZERS['adam'], stacked(3)), toy.batch(), num_calls=2)


def test_gradients_of_all_actors_in_one_vector():
  """Code that mixes leaves of different actors: all gradients, raveled and concatenated."""

  def step(params, batch):
    def grads_fn(mb):
      value, grads = jax.value_and_grad(loss)(params, mb)
      return grads, value

    grads, losses = mpmd.accumulate_grads(grads_fn, batch)
    flat, unravel = jax.flatten_util.ravel_pytree(grads)
    flat = flat / jnp.linalg.norm(flat)
    params = jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, params, unravel(flat))
    return params, (losses, flat)

  oracle.check(step, stacked(3), toy.batch(), num_calls=2)


def test_sort_and_quantile_over_the_stages():
  """Primitives without a piecewise form gather, with a note that names them."""

  def step(params, batch):
    params, out = toy.train_step(loss)(params, batch)
    return params, (out, jnp.sort(params['w'], axis=0), jnp.flip(params['b'], 0))

  planned = oracle.check(step, stacked(3), toy.batch(), num_calls=2)
  assert any('sort' in note and 'test_stacked.py' in note for note in planned.notes)


def test_reductions_from_any_start():
  """`lax.reduce` over the stages, where the start is no identity; it counts once."""

  def step(params, batch):
    grads, losses = mpmd.accumulate_grads(
        lambda mb: jax.value_and_grad(loss)(params, mb)[::-1], batch
    )
    w = params['w']
    reduced = [
        jax.lax.reduce(w, jnp.float32(2), fn, axes)
        for fn, axes in (
            (jax.lax.mul, (0,)), (jax.lax.add, (0,)), (jax.lax.max, (0,)), (jax.lax.add, (0, 1, 2))
        )
    ]
    return grads, losses, reduced

  oracle.check(step, stacked(3), toy.batch())


def test_gradients_scaled_by_stage():
  """A vector with one entry per stage scales the stacked gradients; a mask freezes a stage."""

  def step(params, batch):
    def grads_fn(mb):
      value, grads = jax.value_and_grad(loss)(params, mb)
      return grads, value

    grads, losses = mpmd.accumulate_grads(grads_fn, batch)
    scale = jnp.array([0.1, 1.0, 0.0])
    w = params['w'] - scale[:, None, None] * grads['w']
    b = params['b'] - scale.reshape(3, 1) * grads['b']
    w = w.at[2].set(0.5 * w[2])
    return {**params, 'w': w, 'b': b}, (losses, jnp.mean(w, axis=(1, 2)))

  oracle.check(step, stacked(3), toy.batch(), num_calls=2)


def test_infinite_scale_of_zeros():
  """Gradients that are zeros by structure, times infinity, are NaN as in plain JAX."""

  def loss_fn(p, mb):
    return loss({**p, 'w': p['w'][:3], 'b': p['b'][:3]}, mb)

  def step(params, batch):
    def grads_fn(mb):
      value, grads = jax.value_and_grad(loss_fn)(params, mb)
      return grads, value

    grads, losses = mpmd.accumulate_grads(grads_fn, batch)
    factor = 1 / (losses[0] - losses[0])
    return params, jax.tree_util.tree_map(lambda g: g * factor, grads)

  oracle.check(step, stacked(4), toy.batch())
