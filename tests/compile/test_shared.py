"""Delayed sums of shared gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from pax_mpmd.compile.shared import delay_shared_sums
from pax_mpmd.compile.trace import loop_of
from pax_mpmd.compile.unstack import unstack
from tests import oracle
from tests.compile import steps
from tests.core import toy


def tied(w, mb):
  """Three stages; the first and the last share w['t']."""
  x = mpmd.pipeline_yield(toy.dense(w['t'], mb['x']))
  x = mpmd.pipeline_yield(toy.dense(w['m'], x))
  return toy.mse(x @ w['t'].T, mb['y'])


def thrice(w, mb):
  """Every stage uses w['t'], the middle one twice."""
  x = mpmd.pipeline_yield(toy.dense(w['t'], mb['x']))
  x = mpmd.pipeline_yield(toy.dense(w['t'], toy.dense(w['t'], x)))
  return toy.mse(x @ w['t'].T, mb['y'])


W = dict(zip('tm', toy.weights(2)))


def check(step):
  """Compares the pass's result with the plain step; returns it."""
  trace, leaves = steps.traced(step, W, toy.batch())
  un = unstack(trace, 3)
  assert len(un.jaxpr.invars) == len(leaves)
  out = delay_shared_sums(un, 3)
  actual = steps.evaluate(out.jaxpr, out.consts, leaves)
  oracle.assert_trees_close(actual, steps.expected(step, W, toy.batch()))
  return out


def num_summed(step):
  return loop_of(step.jaxpr).params['num_summed']


@pytest.mark.parametrize('loss,parts', [(tied, 3), (thrice, 3)])
def test_one_sum_per_stage(loss, parts):
  """Each stage that uses the weight has a sum of its own, whatever the number of its uses."""
  used = 't' if loss is thrice else 'tm'

  def step(w, batch):
    def fn(mb):
      value, grads = jax.value_and_grad(loss)(w, mb)
      return {k: grads[k] for k in used}, value

    return mpmd.accumulate_grads(fn, batch)

  out = check(step)
  assert num_summed(out) == parts
  assert out.notes == ()


def test_precondition_fails():
  """A gradient that something else reads inside the loop is summed there, and a note says so."""

  def step(w, batch):
    def fn(mb):
      value, grads = jax.value_and_grad(tied)(w, mb)
      return grads, (value, jnp.sqrt(jnp.sum(grads['t'] ** 2)))

    return mpmd.accumulate_grads(fn, batch)

  out = check(step)
  assert num_summed(out) == 2
  (note,) = out.notes
  assert 'float32[8,8]' in note and '[0, 2]' in note and 'toy.py' in note


def test_gradient_returned_twice():
  """Summed and stacked: the stacked rows are per-microbatch totals, so the sum must stay whole."""

  def step(w, batch):
    def fn(mb):
      grads = jax.grad(tied)(w, mb)
      return grads, grads['t']

    return mpmd.accumulate_grads(fn, batch)

  assert num_summed(check(step)) == 2


def test_invariant_term():
  """Weight decay inside the loop: a term of no stage goes with one of the parts."""

  def step(w, batch):
    def fn(mb):
      grads = jax.grad(tied)(w, mb)
      return {'t': grads['t'] + 0.1 * w['t'], 'm': grads['m'] + 1.0}, ()

    return mpmd.accumulate_grads(fn, batch)

  assert num_summed(check(step)) == 3


def each_use(view, num_microbatches=4):
  """A step on one weight, used by stages 0 and 2 after `view(weight, microbatch)`."""

  def loss(w, mb):
    t = view(w['t'], mb)
    x = mpmd.pipeline_yield(toy.dense(t, mb['x']))
    x = mpmd.pipeline_yield(toy.dense(w['m'], x))
    return toy.mse(x @ t.T, mb['y'])

  def step(w, batch):
    return mpmd.accumulate_grads(lambda mb: (jax.grad(loss)(w, mb), ()), batch)

  return step


PERMUTATION = np.array([3, 1, 0, 2, 7, 6, 5, 4])
MASK = np.tri(8, dtype=np.float32)

VIEWS = {
    'scale': lambda w, mb: w * 0.5,
    'divide': lambda w, mb: w / jnp.float32(3),
    'negate': lambda w, mb: 1.0 - w,
    'transpose': lambda w, mb: w.T,
    'reshape': lambda w, mb: w.reshape(4, 16).reshape(8, 8),
    'slice': lambda w, mb: jnp.concatenate([w[:6, 1:], w[2:4, :7]])[:, [0, 1, 2, 3, 4, 5, 6, 6]],
    'pad': lambda w, mb: jnp.pad(w[1:, 1:], ((1, 0), (0, 1))),
    'update': lambda w, mb: w.at[2:4].set(0.0),
    'dynamic slice': lambda w, mb: jnp.concatenate(
        [jax.lax.dynamic_slice(w, (jnp.argmax(mb['x'][0]) % 4, 0), (4, 8))] * 2
    ),
    'broadcast': lambda w, mb: jnp.broadcast_to(w[0] + w[:, :1], (8, 8)),
    'stack': lambda w, mb: jnp.stack([w, 2 * w]).sum(0),
    'permute': lambda w, mb: w[PERMUTATION],
    'mask': lambda w, mb: w * MASK,
    'where': lambda w, mb: jnp.where(MASK > 0, w, 0.0),
    'cumulative': lambda w, mb: jnp.cumsum(w, 0) * 0.1,
    'low rank': lambda w, mb: w @ (MASK / 8) @ MASK.T,
    'by the batch': lambda w, mb: w * jnp.sum(mb['x']),
    'chain': lambda w, mb: ((-w.T * 2).reshape(64)[::-1].reshape(8, 8) / 4).astype(jnp.float32),
    'jit': lambda w, mb: jax.jit(lambda w: w.T * 3)(w),
}


@pytest.mark.parametrize('name', VIEWS)
def test_linear_equations_between_weight_and_uses(name):
  """One view of the weight serves both uses; its transpose is applied to each stage's part."""
  out = check(each_use(VIEWS[name]))
  assert num_summed(out) == 3
  assert out.notes == ()


def test_low_precision_parts_are_accumulated_in_the_result_type():
  """A bfloat16 view of a float32 weight: the loop's sums are float32."""
  trace, leaves = steps.traced(each_use(lambda w, mb: w.astype(jnp.bfloat16)), W, toy.batch())
  out = delay_shared_sums(unstack(trace, 3), 3)
  assert {v.aval.dtype.name for v in loop_of(out.jaxpr).outvars} == {'float32'}
  assert num_summed(out) == 3
  actual = steps.evaluate(out.jaxpr, out.consts, leaves)
  plain = steps.evaluate(trace.jaxpr, trace.consts, leaves)
  oracle.assert_trees_close(actual, plain, rtol=2e-2, atol=2e-2)


SEEN = {
    'clipped': lambda g, mb: g * jnp.minimum(1.0, 0.01 / jnp.linalg.norm(g)),
    'clipped by value': lambda g, mb: jnp.clip(g, -0.01, 0.01),
    'squared': lambda g, mb: g**2,
    'rounded to integers': lambda g, mb: (g * 1000).astype(jnp.int32),
    'divides': lambda g, mb: 1.0 / (g + 10.0),
    'times itself': lambda g, mb: g * g,
    'masked by its sign': lambda g, mb: jnp.where(g > 0, g, 0.0),
}


@pytest.mark.parametrize('name', SEEN)
def test_what_is_not_linear_sees_the_total(name):
  """Then the total is made in the loop, and a note gives the stages and the line."""

  def step(w, batch):
    def fn(mb):
      grads = jax.grad(tied)(w, mb)
      return {'t': SEEN[name](grads['t'], mb), 'm': grads['m']}, ()

    return mpmd.accumulate_grads(fn, batch)

  out = check(step)
  assert num_summed(out) == 2
  if name != 'rounded to integers':
    (note,) = out.notes
    assert 'float32[8,8]' in note and '[0, 2]' in note and 'toy.py' in note


def test_weight_that_travels_through_the_yields():
  """Its gradient would come back through every boundary; each stage keeps its part instead."""

  def loss(w, mb):
    x, t = mpmd.pipeline_yield((toy.dense(w['t'], mb['x']), w['t']))
    x, t = mpmd.pipeline_yield((toy.dense(t, toy.dense(w['m'], x)), t))
    return toy.mse(x @ t.T, mb['y'])

  def step(w, batch):
    return mpmd.accumulate_grads(lambda mb: (jax.grad(loss)(w, mb), ()), batch)

  assert num_summed(check(step)) == 4


def test_one_total_in_two_results():
  """The sum and a scaled sum of the same gradient, each by stage; nobody sees the total."""

  def step(w, batch):
    def fn(mb):
      g = jax.grad(tied)(w, mb)['t']
      return (g, g * jnp.mean(mb['y']) - w['t']), ()

    return mpmd.accumulate_grads(fn, batch)

  assert num_summed(check(step)) == 4
