"""Delayed sums of shared gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
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
  un = unstack(trace)
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


def test_parts_scaled_before_the_sum():
  """A factor on the total isn't taken apart: the plain way, and the right result."""

  def step(w, batch):
    def fn(mb):
      return {'t': jax.grad(tied)(w, mb)['t'] * jnp.sum(mb['x'])}, ()

    return mpmd.accumulate_grads(fn, batch)

  assert num_summed(check(step)) == 1
