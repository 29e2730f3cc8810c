"""Values of the loop that no stage, or more than one stage, owns; and what surrounds the loop."""

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


def forward(ws, x):
  """The activations after each stage."""
  outs = []
  for i, w in enumerate(ws):
    x = dense(w, x)
    outs.append(x)
    if i < len(ws) - 1:
      x = mpmd.pipeline_yield(x)
  return outs


def loss(ws, mb):
  """The plain loss of three stages."""
  return mse(forward(ws, mb['x'])[-1], mb['y'])


def accumulate(loss_fn, ws, batch, **kwargs):
  """(summed gradients, stacked losses)."""

  def fn(mb):
    value, grads = jax.value_and_grad(loss_fn, **kwargs)(ws, mb)
    return grads, value

  return mpmd.accumulate_grads(fn, batch)


@pytest.mark.parametrize('product', [False, True])
def test_auxiliary_losses_of_the_stages(product):
  """Each stage adds to the loss (as load balancing does), or scales it."""

  def loss_fn(ws, mb):
    outs = forward(ws, mb['x'])
    total = mse(outs[-1], mb['y'])
    for x in outs:
      aux = jnp.mean(jax.nn.logsumexp(x, -1) ** 2)
      total = total * aux if product else total + 0.01 * aux
    return total

  oracle.check(toy.train_step(loss_fn), toy.weights(), toy.batch(), num_calls=2)


def test_auxiliary_losses_through_the_yields():
  """The sum of the stages' losses travels with the activations."""

  def loss_fn(ws, mb):
    x, aux = mb['x'], 0.0
    for i, w in enumerate(ws):
      x = dense(w, x)
      aux = aux + jnp.mean(x**4)
      if i < 2:
        x, aux = mpmd.pipeline_yield((x, aux))
    return mse(x, mb['y']) + 0.1 * aux

  oracle.check(toy.train_step(loss_fn), toy.weights(), toy.batch(), num_calls=2)


def test_weight_decay_inside_the_loop():
  """Terms of the gradient that are the same for every microbatch: of each weight, and of all."""

  def loss_fn(ws, mb):
    return loss(ws, mb) + 0.01 * sum(jnp.sum(w**2) for w in ws) + jnp.sqrt(
        sum(jnp.sum(w**2) for w in ws)
    )

  oracle.check(toy.train_step(loss_fn), toy.weights(), toy.batch(), num_calls=2)


def test_sums_and_rows_that_depend_on_no_stage():
  """Literals, invariants, rows of the batch and index-free values among the loop's results."""

  def step(ws, batch, scale):
    def fn(mb):
      value, grads = jax.value_and_grad(loss)(ws, mb)
      summed = {
          'grads': grads,
          'one': jnp.ones(()),
          'count': jnp.int32(2),
          'invariant': scale * ws[0],
          'plain': ws[1],
          'batch': mb['x'],
          'mask': jnp.sum(mb['x'] > 0),
      }
      stacked = {
          'loss': value,
          'zero': jnp.zeros((2,)),
          'scale': scale,
          'cos': jnp.cos(ws[2]),
          'row': mb['y'],
          'flag': jnp.any(mb['x'] > 1),
      }
      return summed, stacked

    return mpmd.accumulate_grads(fn, batch)

  oracle.check(step, toy.weights(), toy.batch(), np.float32(1.5))


def test_only_values_without_a_stage_are_used():
  """Of a loop with a gradient only the losses of the first stage are used."""

  def step(ws, batch):
    def fn(mb):
      outs = forward(ws, mb['x'])
      grads = jax.grad(loss)(ws, mb)
      return grads, (outs[0].sum(), outs[-1].sum())

    _, (first, last) = mpmd.accumulate_grads(fn, batch)
    return first, last

  oracle.check(step, toy.weights(), toy.batch())


def test_gradient_of_the_inputs():
  """Gradients with respect to the batch, stacked: they are made by the first stage's backward."""

  def step(ws, batch):
    def fn(mb):
      value, (grads, gx) = jax.value_and_grad(
          lambda ws, x: loss(ws, {**mb, 'x': x}), argnums=(0, 1)
      )(ws, mb['x'])
      return grads, (value, gx)

    return mpmd.accumulate_grads(fn, batch)

  oracle.check(step, toy.weights(), toy.batch())


def test_gradients_of_microbatches_seen_inside_the_loop():
  """Norms per microbatch over all stages, clipping per microbatch, squares of the gradients."""

  def step(ws, batch):
    def fn(mb):
      value, grads = jax.value_and_grad(loss)(ws, mb)
      norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
      clipped = [g * jnp.minimum(1.0, 0.1 / norm) for g in grads]
      return (clipped, [g**2 for g in grads]), (value, norm)

    return mpmd.accumulate_grads(fn, batch)

  oracle.check(step, toy.weights(), toy.batch())
  # The factor is known when the first stage's backward is done; so the gradients go there.
  large = [np.full((64, 64), 0.01, np.float32)] * 3
  batch = {k: np.ones((2, 2, 64), np.float32) for k in 'xy'}
  notes = oracle.check(step, large, batch).notes
  assert len(notes) >= 2 and all('for every microbatch' in note for note in notes)
  assert oracle.check(toy.train_step(loss), large, batch).notes == ()


def test_shared_gradient_seen_inside_the_loop():
  """The per-microbatch norm of a shared weight's gradient: summed in the loop, with a note."""

  def loss_fn(w, mb):
    x = mpmd.pipeline_yield(dense(w, mb['x']))
    x = mpmd.pipeline_yield(dense(w, x))
    return mse(dense(w.T, x), mb['y'])

  def step(w, batch):
    def fn(mb):
      value, grad = jax.value_and_grad(loss_fn)(w, mb)
      return grad, (value, jnp.sum(grad**2))

    return mpmd.accumulate_grads(fn, batch)

  planned = oracle.check(step, toy.weights()[0], toy.batch())
  assert any('for every microbatch' in note for note in planned.notes)


def test_batch_used_around_the_loop():
  """Weights of the batch as a whole scale it before; it's read again after."""

  def step(ws, batch):
    mean, total = jnp.mean(batch['x']), jnp.sum(batch['y'] > 0)
    whitened = {'x': batch['x'] - mean, 'y': batch['y'] / total}
    grads, losses = accumulate(loss, ws, whitened)
    ws = [w - 0.1 * g / total for w, g in zip(ws, grads)]
    return ws, (losses, jnp.max(batch['x']), jnp.einsum('mbi,ij->mbj', batch['x'], ws[2]))

  oracle.check(step, toy.weights(), toy.batch(), num_calls=2)


def test_flat_batch_reshaped_in_the_step():
  """[M * mb, ...] -> [M, mb, ...] by strided reshape and transpose, as a user may write it."""

  def step(ws, batch):
    batch = jax.tree_util.tree_map(
        lambda x: x.reshape(2, 4, *x.shape[1:]).swapaxes(0, 1), batch
    )
    grads, losses = accumulate(loss, ws, batch)
    return [w - 0.1 * g for w, g in zip(ws, grads)], losses.sum()

  flat = {k: v.reshape(8, toy.DIM) for k, v in toy.batch().items()}
  oracle.check(step, toy.weights(), flat, num_calls=2)


def test_constants_of_the_step():
  """Arrays that the step closes over: in one stage, in two, before and after the loop."""
  rng = np.random.default_rng(5)
  table = rng.normal(size=(8, 8)).astype(np.float32)
  bias = jnp.asarray(rng.normal(size=(8,)), jnp.float32)

  def loss_fn(ws, mb):
    x = mpmd.pipeline_yield(dense(ws[0] + table, mb['x'] + bias))
    x = mpmd.pipeline_yield(dense(ws[1], x))
    return mse(dense(ws[2] * table, x), mb['y'] + jnp.asarray(table)[:2] + np.arange(8.0))

  def step(ws, batch):
    ws, out = toy.train_step(loss_fn)([w + table for w in ws], batch)
    return [w * bias for w in ws], (out, table)

  oracle.check(step, toy.weights(), toy.batch(), num_calls=2)


def test_keyword_arguments_and_other_positions_donated():
  """kwargs, and a donated argument that isn't the first."""

  def step(batch, ws, *, lr, extra):
    grads, losses = accumulate(loss, ws, batch)
    return [w - lr * g for w, g in zip(ws, grads)], losses, extra

  schedule = mpmd.schedules.OneFOneB(num_stages=3)
  with mpmd.LocalRuntime() as runtime:
    fn = mpmd.mpmd_jit(step, schedule=schedule, runtime=runtime, donate_argnums=1)
    kwargs = {'lr': 0.1, 'extra': {'n': np.int32(4)}}
    ws = expected = toy.weights()
    for _ in range(3):
      out = fn(toy.batch(), ws, **kwargs)
      desired = jax.jit(step)(toy.batch(), expected, **kwargs)
      oracle.assert_trees_close(out, desired)
      ws, expected = out[0], desired[0]


def test_donated_state_that_passes_through():
  """Parts of a donated state that the step returns as they are, or at another place."""

  def step(state, batch):
    ws, out = toy.train_step(loss)(state['w'], batch)
    return {
        'w': ws,
        'old': state['w'],
        'older': state['old'],
        'same': state['same'],
        'n': state['n'] + 1,
    }, out

  ws = toy.weights()
  state = {
      'w': ws,
      'old': [w * 2 for w in ws],
      'older': [w * 3 for w in ws],
      'same': np.arange(5.0, dtype=np.float32),
      'n': np.int32(0),
  }
  oracle.check(step, state, toy.batch(), num_calls=4, donate_argnums=0)
  oracle.check(step, state, toy.batch(), num_calls=4)


def test_state_that_changes_places():
  """Weights of different actors swap in the step's result."""

  def step(ws, batch):
    ws, out = toy.train_step(loss)(ws, batch)
    return [ws[2], ws[0], ws[1]], out

  oracle.check(step, toy.weights(), toy.batch(), num_calls=4, donate_argnums=0)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16, jnp.complex64, jnp.int32])
def test_dtypes(dtype):
  """Weights, batches and sums in other types than float32."""

  def step(ws, batch):
    def fn(mb):
      outs = forward([w.real.astype(jnp.float32) for w in ws], mb['x'])
      return [w * outs[i].sum().astype(w.dtype) for i, w in enumerate(ws)], outs[-1].astype(dtype)

    sums, rows = mpmd.accumulate_grads(fn, batch)
    return [(w + s / 4).astype(dtype) for w, s in zip(ws, sums)], (sums, rows)

  ws = [np.asarray(jnp.asarray(w * 3).astype(dtype)) for w in toy.weights()]
  tolerance = {jnp.bfloat16: 2e-2, jnp.float16: 5e-3}.get(dtype, 2e-5)
  oracle.check(step, ws, toy.batch(), num_calls=2, rtol=tolerance, atol=tolerance)


def test_empty_and_tiny_leaves():
  """Leaves of size zero and of one element, in the state, at yields and in the batch."""

  def loss_fn(p, mb):
    x = mb['x']
    for i, w in enumerate(p['w']):
      x = dense(w, x) * p['one'] + jnp.sum(p['none']) + jnp.sum(mb['none'])
      if i < 2:
        x, _ = mpmd.pipeline_yield((x, jnp.zeros((0, 3)) * jnp.sum(x)))
    return mse(x, mb['y'])

  params = {
      'w': toy.weights(),
      'one': np.ones((1,), np.float32),
      'none': np.zeros((0, 2), np.float32),
  }
  batch = {**toy.batch(), 'none': np.zeros((4, 0), np.float32)}
  oracle.check(toy.train_step(loss_fn), params, batch, num_calls=2)


def test_loops_and_factorisations_after_the_loop():
  """while, scan, eigh and sort over weights of one actor and of several."""

  def step(ws, batch):
    ws, out = toy.train_step(loss)(ws, batch)
    norm = jax.lax.while_loop(
        lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] @ ws[0]), (0, ws[1])
    )[1]
    total, steps = jax.lax.scan(lambda c, w: (c + w, c[0]), jnp.zeros((8, 8)), jnp.stack(ws))
    values = jnp.linalg.eigvalsh(ws[2] @ ws[2].T)
    return ws, (out, norm, total, steps, values, jnp.sort(ws[1].ravel())[:3])

  oracle.check(step, toy.weights(), toy.batch(), num_calls=2, rtol=1e-4, atol=1e-5)


def test_residual_that_only_the_backward_of_another_stage_needs():
  """A custom rule whose backward reads an activation of an earlier stage."""

  @jax.custom_vjp
  def scaled(x, early):
    return x * 1.0

  scaled.defvjp(lambda x, e: (x, e), lambda e, g: (g * jnp.cos(e), jnp.zeros_like(e)))

  def loss_fn(ws, mb):
    early = dense(ws[0], mb['x'])
    x = mpmd.pipeline_yield(early)
    x = mpmd.pipeline_yield(dense(ws[1], x))
    return mse(scaled(dense(ws[2], x), early), mb['y'])

  oracle.check(toy.train_step(loss_fn), toy.weights(), toy.batch(), num_calls=2)


def test_vmap_inside_and_around_stages():
  """vmap over examples with the yields inside it, and vmap within a stage."""

  def one(ws, x, y):
    return mse(forward(ws, x)[-1], y)

  def loss_fn(ws, mb):
    return jnp.mean(jax.vmap(functools.partial(one, ws))(mb['x'], mb['y']))

  oracle.check(toy.train_step(loss_fn), toy.weights(), toy.batch(), num_calls=2)


def test_forward_mode_inside_the_loop():
  """jax.jvp of the loss along a direction: tangents cross the boundaries with the activations."""

  def step(ws, batch):
    def fn(mb):
      value, tangent = jax.jvp(lambda ws: loss(ws, mb), (ws,), (ws,))
      return tangent, (value, tangent)

    return mpmd.accumulate_grads(fn, batch)

  oracle.check(step, toy.weights(), toy.batch())


def test_second_derivatives_are_refused_or_right():
  """A gradient penalty goes through the pipeline more than once: one clear error, no number."""

  def loss_fn(ws, mb):
    grads = jax.grad(lambda x: loss(ws, {**mb, 'x': x}))(mb['x'])
    return loss(ws, mb) + jnp.sum(grads**2)

  schedule = mpmd.schedules.OneFOneB(num_stages=3)
  fn = mpmd.mpmd_jit(toy.train_step(loss_fn), schedule=schedule, runtime=mpmd.LocalRuntime())
  with pytest.raises(mpmd.PartitionError) as caught:
    fn.plan(toy.weights(), toy.batch())
  assert len(str(caught.value).splitlines()) <= 10


def test_yields_of_an_unused_branch_do_not_count():
  """A second head whose result is dropped."""

  def loss_fn(ws, mb):
    outs = forward(ws, mb['x'])
    mpmd.pipeline_yield(outs[-1] @ ws[0])
    return mse(outs[-1], mb['y'])

  oracle.check(toy.train_step(loss_fn), toy.weights(), toy.batch())


def test_numbers_among_the_results_of_a_microbatch():
  """Python numbers, summed (a count) and stacked (a size), are results as others are."""

  def step(ws, batch):
    def fn(mb):
      value, grads = jax.value_and_grad(loss)(ws, mb)
      return (grads, 1, 0.5), (value, mb['x'].shape[0], 3.0)

    (grads, count, half), stacked = mpmd.accumulate_grads(fn, batch)
    return jax.tree_util.tree_map(lambda g: g / count, grads), count, half, stacked

  oracle.check(step, toy.weights(), toy.batch(), num_calls=2)
