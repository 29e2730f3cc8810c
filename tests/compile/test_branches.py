"""Branches after the loop become selects, where that is safe."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pax_mpmd.compile.branches import flatten_branches
from tests import oracle
from tests.compile import steps
from tests.core import toy
from tests.core.test_loop_values import loss

TABLE = np.arange(8, dtype=np.float32)


def check(after):
  """The names of the primitives outside the loop, after a comparison with the plain step."""

  def step(ws, batch, n):
    ws, (losses, norm) = toy.train_step(loss)(ws, batch)
    return after(ws, norm, n), losses

  for n in (0, 1, 2, 7, -3):
    args = (toy.weights(), toy.batch(2), np.int32(n))
    trace, leaves = steps.traced(step, *args)
    flat = flatten_branches(trace)
    actual = steps.evaluate(flat.jaxpr, flat.consts, leaves)
    oracle.assert_trees_close(actual, steps.expected(step, *args), what=f'n = {n} ')
  return [e.primitive.name for e in flat.jaxpr.eqns]


def test_two_branches():
  """cond on a comparison."""
  names = check(lambda ws, norm, n: jax.lax.cond(n > 1, lambda: ws, lambda: [w * 2 for w in ws]))
  assert 'cond' not in names and names.count('select_n') == 3


def test_many_branches():
  """switch, whose index is clamped; constants and literals in its branches."""
  branches = [
      lambda w: w,
      lambda w: w + TABLE,
      lambda w: jnp.zeros_like(w),
      lambda w: jnp.full(w.shape, 2.0) * jnp.asarray(TABLE),
  ]
  names = check(lambda ws, norm, n: jax.lax.switch(n, branches, ws[0]))
  assert 'cond' not in names


def test_nested_branches():
  """A cond within a cond."""

  def inner(w, n):
    return jax.lax.cond(n > 3, jnp.sin, jnp.cos, w)

  names = check(lambda ws, norm, n: jax.lax.cond(n > 0, inner, lambda w, n: w, ws[1], n))
  assert 'cond' not in names and names.count('select_n') == 2


def test_results_that_nobody_uses():
  """A cond of which one result is dropped, and one result returned twice."""

  def after(ws, norm, n):
    a, _, c = jax.lax.cond(n > 0, lambda: (ws[0], ws[1], ws[0]), lambda: (ws[1], ws[1], ws[2]))
    return a, c

  assert 'cond' not in check(after)


@pytest.mark.parametrize(
    'branch',
    [
        lambda w: jax.lax.while_loop(lambda x: jnp.max(x) < 5, lambda x: x + 1, w),
        lambda w: jax.lax.fori_loop(0, 3, lambda i, x: x * 2, w),
    ],
)
def test_loops_stay_in_their_branch(branch):
  """The side not taken might never end, so it isn't run."""
  names = check(lambda ws, norm, n: jax.lax.cond(n > 0, branch, lambda w: w, ws[0]))
  assert 'cond' in names


def test_scalars_stay():
  """A learning rate by cases needs no select of arrays."""
  names = check(
      lambda ws, norm, n: ws[0] * jax.lax.cond(n > 0, lambda: norm, lambda: norm * 2)
  )
  assert 'cond' in names
