"""How values between programs are spread over an actor's devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from pax_mpmd.compile import shardings
from pax_mpmd.compile import trace

SIZES = {'data': 2, 'mdl': 4}


def spread(fn, *args):
  """The specs of the results of `fn`; arguments are (shape, PartitionSpec)."""
  jaxpr = jax.make_jaxpr(fn)(*(jnp.zeros(shape) for shape, _ in args)).jaxpr
  env = {
      v: shardings.spec_of(spec, shape, SIZES) for v, (shape, spec) in zip(jaxpr.invars, args)
  }
  shardings.spread(jaxpr, env, SIZES)
  return [P(*(axes if len(axes) != 1 else axes[0] for axes in env[v])) for v in jaxpr.outvars]


def spec(*axes):
  """A PartitionSpec as `spread` gives it: () where a dimension is whole."""
  return P(*(() if a is None else a for a in axes))


DATA, MDL, BOTH = P('data'), P(None, 'mdl'), P('data', 'mdl')
# function, (shape, spec) of its arguments, spec of its result
CASES = {
    'elementwise': (lambda x, y: x * y + 1, [((8, 8), DATA), ((8, 8), MDL)], spec('data', 'mdl')),
    'an axis once': (
        lambda x, y: x + y,
        [((8, 8), DATA), ((8, 8), P(None, 'data'))],
        spec('data', None),
    ),
    'matmul over a split sum': (
        lambda x, w: x @ w,
        [((8, 16), BOTH), ((16, 8), P('mdl', None))],
        spec('data', None),
    ),
    'matmul': (lambda x, w: x @ w, [((8, 16), DATA), ((16, 8), MDL)], spec('data', 'mdl')),
    'batched matmul': (
        lambda x, w: jnp.einsum('bth,bsh->bts', x, w),
        [((8, 4, 2), DATA), ((8, 6, 2), P())],
        spec('data', None, None),
    ),
    'transpose': (lambda x: x.T, [((8, 16), BOTH)], spec('mdl', 'data')),
    'sum': (lambda x: x.sum(0), [((8, 16), BOTH)], spec('mdl')),
    'argmax': (lambda x: x.argmax(1), [((8, 16), BOTH)], spec('data')),
    'split': (lambda x: x.reshape(8, 4, 2), [((8, 8), BOTH)], spec('data', 'mdl', None)),
    'split too small': (lambda x: x.reshape(8, 2, 4), [((8, 8), BOTH)], spec('data', None, None)),
    'merge': (lambda x: x.reshape(8, 8), [((8, 4, 2), BOTH)], spec('data', 'mdl')),
    'ones': (lambda x: x.reshape(1, 8, 1, 4)[0, :, 0], [((8, 4), BOTH)], spec('data', 'mdl')),
    'broadcast': (
        lambda x: jnp.broadcast_to(x[:, None], (8, 3, 4)),
        [((8, 4), BOTH)],
        spec('data', None, 'mdl'),
    ),
    'pad': (lambda x: jnp.pad(x, ((0, 0), (1, 0))), [((8, 4), BOTH)], spec('data', None)),
    'checkpoint': (
        jax.checkpoint(lambda x: jnp.sin(x).T),
        [((8, 4), BOTH)],
        spec('mdl', 'data'),
    ),
    'scan': (
        lambda x, w: jax.lax.scan(lambda c, v: (c @ v, None), x, w)[0],
        [((8, 8), DATA), ((3, 8, 8), P(None, None, 'mdl'))],
        spec('data', 'mdl'),
    ),
    'rows of a scan': (
        lambda w: jax.lax.scan(lambda c, v: (c, v.T), 0.0, w)[1],
        [((3, 4, 8), P(None, 'mdl', 'data'))],
        spec(None, 'data', 'mdl'),
    ),
    'branches': (
        lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
        [((8, 4), DATA)],
        spec('data', None),
    ),
    'rows looked up': (lambda x: x[jnp.array([1, 2])], [((8, 4), BOTH)], spec(None, 'mdl')),
}


@pytest.mark.parametrize('name', CASES)
def test_spread(name):
  """A result is sharded as its operands are where dimensions stay apart, and never twice."""
  fn, args, expected = CASES[name]
  assert spread(fn, *args) == [expected]


def test_spec_of():
  """Axes without devices, unknown, met before or not dividing their dimension are left out."""
  assert shardings.spec_of(P(('data', 'mdl'), 'x'), (8, 8, 3), SIZES) == (('data', 'mdl'), (), ())
  assert shardings.spec_of(P('data', 'data'), (8, 8), SIZES) == (('data',), ())
  assert shardings.spec_of(P('mdl', 'data'), (6, 8), SIZES) == ((), ('data',))
  assert shardings.spec_of(None, (6, 8), SIZES) == ((), ())


def test_mesh_sizes():
  """Only axes with several devices count."""
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2, 1), ('a', 'b', 'c'))
  assert trace.mesh_sizes(mesh) == {'b': 2}
  assert trace.mesh_sizes(None) == {}
