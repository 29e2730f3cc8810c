"""Stage-stacked arrays as pieces: split, run, join is the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from pax_mpmd.compile.classes import Grid
from pax_mpmd.compile.unstack import join_outputs
from pax_mpmd.compile.unstack import split_inputs
from pax_mpmd.compile.unstack import unstack
from tests import oracle
from tests.compile import steps
from tests.core import transformer

W = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(2, 3)).astype(np.float32)


def check(step, *args):
  """Compares with the plain step; returns the unstacked step."""
  trace, leaves = steps.traced(step, *args)
  num_stages = 1 + str(trace.jaxpr).count('direction=forward')
  un = unstack(trace, num_stages)
  outs = steps.evaluate(un.jaxpr, un.consts, split_inputs(un, leaves))
  joined = join_outputs(un, outs)
  oracle.assert_trees_close(joined, [np.asarray(x) for x in steps.expected(step, *args)])
  return un


def gradient(w, batch, boxes):
  """The gradient of a loss whose stages each use a slice of w."""

  def loss(w, x):
    total = 0.0
    for i, (a, b) in enumerate(boxes):
      x = mpmd.pipeline_yield(x) if i else x
      total += jnp.sum(jnp.sin(x @ w[a:b].reshape(-1, 3, 5)))
    return total

  return mpmd.accumulate_grads(lambda x: (jax.grad(loss)(w, x), loss(w, x)), batch)


ONES = ((0, 1), (1, 2), (2, 3), (3, 4))
AFTER = {
    'scale': lambda w, g: w - 0.1 * g,
    'moments': lambda w, g: (0.9 * w + g, jnp.sqrt(w * w) / (1 + jnp.abs(g))),
    'reduce all': lambda w, g: (jnp.sum(g * g), jnp.max(g), jnp.min(w)),
    'reduce inner': lambda w, g: (jnp.mean(g, axis=(1, 2)), jnp.sum(w, axis=1)),
    'reduce outer': lambda w, g: jnp.sum(g, axis=0),
    'transpose': lambda w, g: (jnp.swapaxes(g, 1, 2), g.T),
    'reshape': lambda w, g: (g.reshape(4, 15), g.reshape(2, 30), g.reshape(-1)),
    'broadcast': lambda w, g: g * jnp.arange(4.0)[:, None, None] + jnp.ones((3, 1)),
    'inner slice': lambda w, g: g[:, 1:, ::2],
    'outer slice': lambda w, g: (g[1:3], g[0], g[::2], g[3:]),
    'pad': lambda w, g: (jnp.pad(g, ((0, 0), (1, 1), (0, 0))), jnp.pad(g, [(1, 0)] * 3)),
    'size one': lambda w, g: g * w[:1] + w[:, :1] - g[:, :, :1] * jnp.ones((3, 1)),
    'scaled': lambda w, g: (g * 0.5, g / 3, -2.0 * g, g * jnp.sum(w), w * jnp.sum(g)),
    'concatenate': lambda w, g: (jnp.concatenate([g, w], 1), jnp.concatenate([g, w], 0)),
    'where': lambda w, g: jnp.where(jnp.isfinite(g).all(), g, w),
    'sort': lambda w, g: (jnp.sort(g, axis=0), jnp.sort(g, axis=1)),
    'dot': lambda w, g: (jnp.einsum('sij,skj->sik', g, w), jnp.einsum('sij,tij->st', g, w)),
    'index': lambda w, g: g[jnp.array([2, 0])],
    'update': lambda w, g: g.at[1].set(w[0]),
    'scalar zero': lambda w, g: (g * 0.0, g * jnp.inf, g / jnp.zeros(())),
    'clamp': lambda w, g: (jnp.clip(g, -0.1, 0.1), jnp.clip(g, w, w + 1)),
    'cumsum': lambda w, g: (jnp.cumsum(g, 0), jnp.cumsum(g, 2)),
    'argmax': lambda w, g: (jnp.argmax(g, 0), jnp.argmax(g, 1)),
    'cast': lambda w, g: g.astype(jnp.bfloat16).astype(jnp.float32),
    'expand': lambda w, g: (g[:, None], g[None], jnp.squeeze(g[:, :1])),
    'random': lambda w, g: g + jax.random.normal(jax.random.PRNGKey(0), g.shape),
    'zeros': lambda w, g: (jnp.zeros_like(w), jnp.full(w.shape, 2.0) + 0 * g),
}
GATHERED = (
    'sort, dot, index, cumsum, argmax, reduce outer, transpose, reshape, inner slice, outer slice,'
    ' pad, concatenate, expand, random, update, size one'
).split(', ')


@pytest.mark.parametrize('name', AFTER)
@pytest.mark.parametrize(
    'boxes', [ONES, ((1, 2), (2, 4))], ids=['all', 'some']
)
def test_code_after_the_loop(name, boxes):
  """Any code on stacked weights and gradients gives the right result; the usual stays in pieces."""

  def step(w, batch):
    summed, stacked = gradient(w, batch, boxes)
    return AFTER[name](w, summed), stacked

  un = check(step, W, np.stack([X, X + 1, X * 2]))
  assert un.in_grids[0] is not None
  if name not in GATHERED:
    assert un.notes == ()


def test_two_axes():
  """[R, S, ...] is split along both leading axes."""

  def step(w, batch):
    def loss(w, x):
      total = 0.0
      for i in range(4):
        x = mpmd.pipeline_yield(x) if i else x
        total += jnp.sum(jnp.sin(x @ w[i // 2, i % 2]))
      return total

    summed, _ = mpmd.accumulate_grads(lambda x: (jax.grad(loss)(w, x), ()), batch)
    total = jnp.sum(summed**2)
    return w - summed / total, jnp.sum(summed, 0), jnp.sum(summed, 1), summed.reshape(4, 3, 5)

  un = check(step, W.reshape(2, 2, 3, 5), X[None])
  assert un.in_grids[0] == Grid(((0, 1, 2), (0, 1, 2)))
  assert un.out_grids[0] == un.in_grids[0]


def test_uneven_pieces():
  """The grid follows the slices' bounds, also where they overlap."""

  def step(w, batch):
    return gradient(w, batch, ((0, 1), (1, 4), (2, 3)))

  un = check(step, W, X[None])
  assert un.in_grids[0] == Grid(((0, 1, 2, 3, 4),))
  assert un.notes == ()


def test_the_transformer_step_stays_in_pieces():
  """A whole training step with Adam and clipping: nothing gathers."""
  state, batch = transformer.init(2), transformer.batch(1)
  un = check(transformer.train_step, state, batch)
  assert un.notes == ()
  stacked = [x for x in jax.tree_util.tree_leaves(state) if np.shape(x)[:1] == (2,)]
  assert sum(g is not None for g in un.in_grids) == len(stacked) == 18
  whole = {(2, 16, 48), (2, 16, 16), (2, 16, 32), (2, 32, 16)}
  assert not whole & {v.aval.shape for e in un.jaxpr.eqns for v in e.outvars}


def test_notes_name_primitive_and_line():
  """A gather says what for and where in the user's code."""

  def step(w, batch):
    summed, _ = gradient(w, batch, ONES)
    return jnp.sort(summed, axis=0)

  (note,) = check(step, W, X[None]).notes
  assert 'sort' in note and 'test_unstack.py' in note and 'float32[4,3,5]' in note


def test_gradients_alone_are_in_pieces():
  """Also where nothing after the loop brings weights and gradients together."""
  un = check(lambda w, batch: gradient(w, batch, ONES), W, X[None])
  assert un.out_grids[0] == Grid(((0, 1, 2, 3, 4),))


def test_slices_that_separate_no_stages():
  """A matrix cut along its leading axis by one stage, or alike by all, stays whole."""

  def step(w, batch):
    def loss(w, x):
      parts = [jnp.sum(jnp.sin(x @ w['qkv'][i])) for i in range(3)]
      y = mpmd.pipeline_yield(jnp.sin(x @ w['vocab'][:2].T))
      return sum(parts) + jnp.sum(y @ w['vocab'][:2])

    return mpmd.accumulate_grads(lambda x: (jax.grad(loss)(w, x), ()), batch)

  un = check(step, {'qkv': W, 'vocab': W[:3, :, 0]}, np.stack([X, X + 1]))
  assert un.in_grids == (None,) * 3 and un.notes == ()
