"""One equation taken apart: the two compute what it did, and nothing twice."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.backward_split import split
from pax_mpmd.compile.evaluate import evaluate_loop
from pax_mpmd.compile.partition import partition
from pax_mpmd.compile.shared import delay_shared_sums
from pax_mpmd.compile.unstack import join_outputs
from pax_mpmd.compile.unstack import split_inputs
from pax_mpmd.compile.unstack import unstack
from tests import oracle
from tests.compile import steps
from tests.core import toy

LAYERS = 3  # of a stage


def layer(x, w):
  return jnp.tanh(x @ w) * 0.5 + x


def chain(x, ws):
  for w in ws:
    x = layer(x, w)
  return x


def branches(x, ws):
  short = lambda x, ws: layer(jnp.sin(x), ws[0])
  return jax.lax.cond(jnp.sum(x) > 0, chain, short, x, ws)


def scanned(x, ws, body=layer):
  return jax.lax.scan(lambda x, w: (body(x, w), None), x, ws)[0]


# Each takes x [batch, 8] and the weights of a stage [LAYERS, 8, 8].
STAGES = {
    'plain': chain,
    'jit': jax.jit(chain),
    'checkpoint': jax.checkpoint(chain),
    'checkpoint of jit': jax.checkpoint(jax.jit(chain)),
    'scan': scanned,
    'scan of checkpoint': functools.partial(scanned, body=jax.checkpoint(layer)),
    'checkpoint of scan': jax.checkpoint(scanned),
    'scan of jit': functools.partial(scanned, body=jax.jit(layer)),
    'nested scan': lambda x, ws: scanned(x, ws[None], body=scanned),
    'fori_loop': lambda x, ws: jax.lax.fori_loop(
        0, LAYERS, lambda i, x: layer(x, jax.lax.dynamic_index_in_dim(ws, i, keepdims=False)), x
    ),
    'cond': branches,
    'checkpoint of cond': jax.checkpoint(branches),
}


def weights():
  return [np.stack(toy.weights(LAYERS, seed=s)) for s in range(3)]


def train_step(stage):
  def loss(params, mb):
    x = mb['x']
    for i, ws in enumerate(params):
      x = stage(x, ws)
      x = mpmd.pipeline_yield(x) if i < 2 else x
    return toy.mse(x, mb['y'])

  return toy.train_step(loss)


def products(jaxpr):
  """How many matrix products it runs: those in a scan for each step, the most of all branches."""
  count = 0
  for eqn in jaxpr.eqns:
    inner = [products(getattr(j, 'jaxpr', j)) for j in jc.inner_jaxprs(eqn)]
    if eqn.primitive.name == 'dot_general':
      count += 1
    elif eqn.primitive.name == 'scan':
      count += eqn.params['length'] * sum(inner)
    else:
      count += max(inner, default=0)
  return count


@functools.cache
def traced(kind):
  step, args = train_step(STAGES[kind]), (weights(), toy.batch())
  trace, leaves = steps.traced(step, *args)
  un = delay_shared_sums(unstack(trace, 3), 3)
  return un, split_inputs(un, leaves), steps.expected(step, *args)


def cut_of(kind, split_stages):
  return partition(traced(kind)[0].jaxpr, 3, split_stages)


@pytest.mark.parametrize('kind', STAGES)
def test_weight_gradients_are_left_to_w(kind):
  """I has one product a layer, W the other; together they have as many as B and give the same."""
  cut = cut_of(kind, (0, 1, 2))
  whole = cut_of(kind, ())
  recomputed = LAYERS if 'checkpoint' in kind else 0
  for s in (1, 2):
    assert products(whole.tasks[s, 'B'].jaxpr) == 2 * LAYERS + recomputed
    # tanh's derivative needs each layer's product, so it is I that computes these again.
    assert products(cut.tasks[s, 'I'].jaxpr) == LAYERS + recomputed
    assert products(cut.tasks[s, 'W'].jaxpr) == LAYERS
  # Nobody waits for the gradient of the first stage's input, so there is nothing for I to do.
  assert (0, 'I') not in cut.tasks
  assert products(cut.tasks[0, 'W'].jaxpr) == products(whole.tasks[0, 'B'].jaxpr)
  un, inputs, expected = traced(kind)
  outs = jax.jit(
      lambda args: steps.evaluate_around(un.jaxpr, un.consts, args, evaluate_loop, cut)
  )(inputs)
  oracle.assert_trees_close(join_outputs(un, outs), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize('kind', ['scan', 'checkpoint', 'cond'])
def test_stages_are_split_one_by_one(kind):
  """Stages that aren't split keep their whole backward pass."""
  cut = cut_of(kind, (1,))
  assert set(cut.tasks) == {*((s, 'F') for s in range(3)), (0, 'B'), (1, 'I'), (1, 'W'), (2, 'B')}


def test_scan_hands_over_only_what_isnt_there():
  """W reads the layers' inputs where I does, and of I one array a layer: the cotangent."""
  cut = cut_of('scan', (1,))
  whole = cut_of('scan', ())
  between = [x for x in cut.tasks[1, 'W'].inputs if x in cut.tasks[1, 'I'].outputs]
  assert len(between) == 1
  assert cut.edges[between[0].id].shape == (LAYERS, 2, 8)
  assert len(cut.edges) == len(whole.edges) + 1


def scan_case():
  """A scan with several carries, constants, slices, results that are passed through, a literal."""

  def body(carry, xs):
    a, b, count = carry
    w, c = xs
    a = jnp.sin(a @ w)
    return (a, b + a * c, count + 1), (a * 2, c, b, jnp.zeros(3) + c[0, 0], 1.0)

  def fn(a, b, ws, c):
    return jax.lax.scan(body, (a, b, 0), (ws, c), reverse=True)

  rng = np.random.default_rng(0)
  args = [rng.normal(size=s).astype(np.float32) for s in ((2, 8), (2, 8), (4, 8, 8), (4, 2, 8))]
  return fn, args, 'scan'


def checkpoint_case():
  """A checkpointed block with a result that is an argument and one that is used twice."""

  @jax.checkpoint
  def fn(a, b):
    c = jnp.sin(a)
    d = jnp.cos(b) * c
    return c, d, d + 1, b, jnp.zeros(3) + d[0]

  rng = np.random.default_rng(0)
  return fn, [rng.normal(size=3).astype(np.float32) for _ in range(2)], 'checkpoint'


def cond_case():
  """Three branches that hand over different values, one of them none."""

  def one(a, b):
    c = jnp.sin(a)
    return c * 2, c + b, c * c

  def two(a, b):
    c, d = jnp.cos(a), jnp.exp(b)
    return c * d, d - c, b

  def three(a, b):
    return a, b, jnp.zeros(3)

  def fn(i, a, b):
    return jax.lax.switch(i, [one, two, three], a, b)

  rng = np.random.default_rng(0)
  values = [rng.normal(size=3).astype(np.float32) for _ in range(2)]
  return fn, [np.int32(1), *values], 'cond'


@pytest.mark.parametrize('case', [scan_case, checkpoint_case, cond_case])
def test_any_choice_of_results(case):
  """Any one result early or late: the two equations in a row give what the one did."""
  fn, args, name = case()
  closed = jax.make_jaxpr(fn)(*args)
  names = ('checkpoint', 'remat2', 'remat') if name == 'checkpoint' else (name,)
  (position,) = [i for i, e in enumerate(closed.jaxpr.eqns) if e.primitive.name in names]
  eqn = closed.jaxpr.eqns[position]
  want = jax.tree_util.tree_leaves(fn(*args))
  apart = 0
  results = range(len(eqn.outvars))
  for needed in [[(i == k) == one for i in results] for k in results for one in (True, False)]:
    parts = split(eqn, needed)
    if parts is None:
      continue
    apart += 1
    first, rest = parts
    assert {v for v, n in zip(eqn.outvars, needed) if n} <= set(first.outvars)
    eqns = [*closed.jaxpr.eqns[:position], first, rest, *closed.jaxpr.eqns[position + 1 :]]
    jaxpr = jc.new_jaxpr((), closed.jaxpr.invars, closed.jaxpr.outvars, eqns)
    assert not closed.consts
    with jax.disable_jit():
      got = jc.eval_jaxpr(jaxpr, (), *args)
    for x, y in zip(got, want):
      np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
  assert apart >= 2


def test_what_cannot_be_taken_apart():
  """An equation without a body, or with nothing left for the second half, stays whole."""
  eqn = jax.make_jaxpr(lambda x: x + 1)(1.0).jaxpr.eqns[0]
  assert split(eqn, [True]) is None
  scan = jax.make_jaxpr(
      lambda x: jax.lax.scan(lambda c, _: (c * 2, c), x, None, length=3)
  )(1.0).jaxpr.eqns[0]
  assert split(scan, [True, False]) is None
