"""pipeline_yield and accumulate_grads under JAX's own transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from pax_mpmd.compile.marks import accumulate_grads_p
from pax_mpmd.compile.marks import pipeline_yield_p
from tests import oracle

X = np.linspace(-1, 2, 6, dtype=np.float32).reshape(2, 3)


def marked(x):
  y = mpmd.pipeline_yield({'a': jnp.sin(x), 'b': (x * 2,)}, name='middle')
  return jnp.sum(y['a'] * y['b'][0] ** 2)


def plain(x):
  return jnp.sum(jnp.sin(x) * (x * 2) ** 2)


def yields_of(jaxpr):
  return [e.params['direction'] for e in jaxpr.eqns if e.primitive is pipeline_yield_p]


TRANSFORMATIONS = {
    'eager': lambda f: f,
    'jit': jax.jit,
    'grad': jax.grad,
    'jit of grad': lambda f: jax.jit(jax.grad(f)),
    'grad of jit': lambda f: jax.grad(jax.jit(f)),
    'grad of grad': lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)),
    'hessian': jax.hessian,
    'jvp': lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    'jvp of grad': lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),)),
    'linearize': lambda f: lambda x: jax.linearize(f, x)[1](jnp.ones_like(x)),
    'vmap': jax.vmap,
    'vmap of grad': lambda f: jax.vmap(jax.grad(f)),
    'grad of vmap': lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x) ** 2)),
    'vmap in other axis': lambda f: jax.vmap(f, in_axes=1),
    'checkpoint': lambda f: jax.grad(jax.checkpoint(f)),
    'scan': lambda f: lambda x: jax.lax.scan(lambda c, r: (c + f(r), f(r)), 0.0, x),
    'cond': lambda f: lambda x: jax.lax.cond(x[0, 0] < 0, f, lambda x: f(x) * 2, x),
    'while': lambda f: lambda x: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + 0.01 * f(c[1])), (0, x)
    ),
}


@pytest.mark.parametrize('name', TRANSFORMATIONS)
def test_a_yield_is_the_identity(name):
  """Every transformation of a function with a yield gives what it gives without."""
  transform = TRANSFORMATIONS[name]
  oracle.assert_trees_close(transform(marked)(X), transform(plain)(X))


def test_gradient_has_a_yield_each_way():
  """The backward mark has the forward one's id; its direction tells them apart."""
  jaxpr = jax.make_jaxpr(jax.grad(marked))(X).jaxpr
  eqns = [e for e in jaxpr.eqns if e.primitive is pipeline_yield_p]
  directions = [e.params['direction'] for e in eqns]
  assert directions == ['forward', 'backward']
  assert len({e.params['id'] for e in eqns}) == 1
  assert {e.params['name'] for e in eqns} == {'middle'}


def test_tangents_run_along_with_the_forward_tasks():
  """Forward-mode derivatives are cut at the same places: directional derivatives of two stages."""
  ws, direction = [X.T @ X, X.T @ X * 0.5], [np.ones((3, 3), np.float32)] * 2

  def step(ws, batch):
    def fn(mb):
      loss = lambda ws: jnp.sum(mpmd.pipeline_yield(jnp.tanh(mb @ ws[0])) @ ws[1])
      value, slope = jax.jvp(loss, (ws,), (direction,))
      return slope, value

    return mpmd.accumulate_grads(fn, batch)

  oracle.check(step, ws, np.stack([X, 2 * X]), schedule=mpmd.schedules.GPipe(2))


def test_yield_of_integers_and_nothing():
  """Integers have no backward mark; an empty tree has no mark; Python numbers become arrays."""

  def f(x):
    y, n = mpmd.pipeline_yield((x * 2, jnp.int32(3)))
    assert mpmd.pipeline_yield(()) == ()
    return jnp.sum(y) * mpmd.pipeline_yield(2.0) * n

  jaxpr = jax.make_jaxpr(jax.grad(f))(X).jaxpr
  assert yields_of(jaxpr).count('forward') == 2
  backward = [e for e in jaxpr.eqns if e.primitive is pipeline_yield_p][-1]
  assert backward.params['direction'] == 'backward' and len(backward.invars) == 1
  oracle.assert_trees_close(jax.grad(f)(X), np.full_like(X, 12))


def test_calls_of_one_jitted_function():
  """A jitted stage, traced once, is cut at each of its calls."""

  @jax.jit
  def stage(x):
    return mpmd.pipeline_yield(jnp.sin(x))

  f = lambda x: jnp.sum(stage(stage(stage(x))))
  g = lambda x: jnp.sum(jnp.sin(jnp.sin(jnp.sin(x))))
  oracle.assert_trees_close(jax.grad(f)(X), jax.grad(g)(X))


@pytest.mark.parametrize(
    'tree,name,text',
    [
        ({'a': X, 'b': 'adam'}, None, r"pipeline_yield\['b'\] is 'adam', which is not an array"),
        (X, 3, 'name must be a text, but is 3'),
    ],
)
def test_yield_of_what_is_no_array(tree, name, text):
  """A leaf that is no array is named by its place."""
  with pytest.raises(mpmd.PartitionError, match=text):
    mpmd.pipeline_yield(tree, name)


# -- accumulate_grads ------------------------------------------------------------------------------

BATCH = {'x': np.arange(24, dtype=np.float32).reshape(4, 2, 3), 'n': np.arange(4, dtype=np.int32)}


def microbatch_fn(scale):
  def fn(mb):
    return {'sum': mb['x'] * scale, 'n': mb['n']}, (jnp.max(mb['x']) * scale, mb['n'] > 1)

  return fn


def loop(scale, batch):
  return mpmd.accumulate_grads(microbatch_fn(scale), batch)


def by_hand(scale, batch):
  fn = microbatch_fn(scale)
  outs = [fn(jax.tree_util.tree_map(lambda x, i=i: x[i], batch)) for i in range(4)]
  summed = outs[0][0]
  for out, _ in outs[1:]:
    summed = jax.tree_util.tree_map(jnp.add, summed, out)
  return summed, jax.tree_util.tree_map(lambda *xs: jnp.stack(xs), *[y for _, y in outs])


@pytest.mark.parametrize('jit', [False, True])
def test_loop_is_the_sum_and_the_stack(jit):
  """The first part is summed, the second stacked, in the order of the microbatches."""
  fn = jax.jit(loop) if jit else loop
  oracle.assert_trees_close(fn(np.float32(3), BATCH), by_hand(np.float32(3), BATCH))


def test_loop_under_transformations():
  """Differentiated and vmapped the loop is right, though that isn't what it is for."""
  f = lambda run: lambda s: jnp.sum(run(s, BATCH)[0]['sum'] ** 2) + jnp.sum(run(s, BATCH)[1][0])
  s = np.float32(1.5)
  oracle.assert_trees_close(jax.grad(f(loop))(s), jax.grad(f(by_hand))(s))
  scales = np.array([1.0, 2.0, -1.0], np.float32)
  oracle.assert_trees_close(jax.vmap(f(loop))(scales), jax.vmap(f(by_hand))(scales))


def test_unused_parts_of_the_loop_go():
  """Dead code elimination takes what nobody uses out of the loop, and keeps its length."""

  def step(scale, batch):
    summed, (_, flags) = loop(scale, batch)
    del summed
    return flags

  from pax_mpmd.compile import jax_compat as jc

  closed = jax.make_jaxpr(step)(np.float32(2), BATCH)
  jaxpr, _ = jc.dce(closed.jaxpr, [True])
  (eqn,) = [e for e in jaxpr.eqns if e.primitive is accumulate_grads_p]
  assert eqn.params['num_consts'] == 0 and eqn.params['num_summed'] == 0
  assert len(eqn.invars) == 1 and len(eqn.outvars) == 1
  out = jc.eval_jaxpr(jaxpr, closed.consts, np.float32(2), BATCH['n'], BATCH['x'])
  np.testing.assert_array_equal(out[0], [False, False, True, True])


@pytest.mark.parametrize(
    'batch,text',
    [
        ({'x': np.zeros((2, 3)), 'y': np.zeros((3, 3))}, r'\(2, 3\).*\(3, 3\)'),
        ({'x': np.zeros(())}, r'\(\)'),
        ({'x': np.zeros((0, 3))}, r'\(0, 3\)'),
        ({}, 'no leaves'),
    ],
)
def test_batches_without_a_number_of_microbatches(batch, text):
  """Leaves that disagree, scalars, nothing."""
  with pytest.raises(mpmd.PartitionError, match=text):
    mpmd.accumulate_grads(lambda mb: (mb, ()), batch)


@pytest.mark.parametrize(
    'fn,text',
    [
        (lambda mb: mb['x'], 'pair'),
        (lambda mb: [mb['x'], ()], 'list'),
        (lambda mb: (mb['x'] > 0, ()), 'bool'),
        (lambda mb: ({'n': 'adam'}, ()), r"summed\['n'\] is 'adam', which is not an array"),
        (lambda mb: ((), [object]), r"stacked\[0\] is <class 'object'>, which is not an array"),
        (lambda mb: ({'key': jax.random.key(1)}, ()), r"\['key'\] has dtype key"),
    ],
)
def test_results_that_cannot_be_summed(fn, text):
  """What isn't a pair, and sums of what has no sum."""
  with pytest.raises(mpmd.PartitionError, match=text):
    mpmd.accumulate_grads(fn, BATCH)
