"""Keeps XLA from partitioning what it partitions wrongly.

In: the jaxpr of a program that runs on several devices. Out: the same with sharding constraints
around some equations, in nested jaxprs too. Holds: it computes the same.

XLA of jaxlib 0.4.26 adds up too many copies where it splits a concatenation along its axis and the
array is copied over another axis of the mesh: results are then wrong, under `jax.jit` and in Pax's
own pipelining as well. Cumulative sums and random bits are made of concatenations when they are
lowered. jaxlib 0.12 gets all of them right.
"""

from __future__ import annotations

from typing import Any

import jax

from pax_mpmd.compile import jax_compat as jc

# By primitive the parameter that names the axis to keep whole; None: all axes.
_WRONG = {
    'concatenate': 'dimension',
    'cumlogsumexp': 'axis',
    'cummax': 'axis',
    'cummin': 'axis',
    'cumprod': 'axis',
    'cumsum': 'axis',
    'random_bits': None,
    'random_fold_in': None,
    'random_split': None,
    'random_unwrap': None,
    'threefry2x32': None,
}


def mend(jaxpr: Any, mesh: Any) -> Any:
  """`jaxpr` with constraints on `mesh` around the equations that XLA would get wrong."""
  if jax.__version_info__ >= (0, 5):
    return jaxpr
  eqns: list[Any] = []
  env: dict[Any, Any] = {}

  def whole(value: Any, eqn: Any) -> Any:
    if isinstance(value, jc.Literal) or jc.is_drop(value):
      return value
    eqns.append(_constraint(value, eqn, mesh))
    return eqns[-1].outvars[0]

  for eqn in jaxpr.eqns:
    params = {key: _mended(value, mesh) for key, value in eqn.params.items()}
    invars = [v if isinstance(v, jc.Literal) else env.get(v, v) for v in eqn.invars]
    wrong = eqn.primitive.name in _WRONG
    if wrong:
      invars = [whole(v, eqn) for v in invars]
    eqns.append(eqn.replace(invars=invars, params=params))
    if wrong:
      env.update((v, whole(v, eqn)) for v in eqn.outvars)
  outvars = [v if isinstance(v, jc.Literal) else env.get(v, v) for v in jaxpr.outvars]
  return jc.new_jaxpr(jaxpr.constvars, jaxpr.invars, outvars, eqns)


def _mended(value: Any, mesh: Any) -> Any:
  """A parameter of an equation; where it is or holds jaxprs, with those mended."""
  if type(value) in (tuple, list):  # not a named tuple
    return type(value)(_mended(v, mesh) for v in value)
  if isinstance(value, jc.ClosedJaxpr):
    return jc.ClosedJaxpr(mend(value.jaxpr, mesh), value.consts)
  if isinstance(value, jc.Jaxpr):
    return mend(value, mesh)
  return value


def _constraint(value: Any, eqn: Any, mesh: Any) -> Any:
  """An equation that passes on an operand or result of `eqn` without splitting it."""
  parameter = _WRONG[eqn.primitive.name]
  free = jax.sharding.PartitionSpec.UNCONSTRAINED
  spec = [free if parameter else None] * len(value.aval.shape)
  if parameter:
    spec[eqn.params[parameter]] = None
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
  closed = jc.trace(
      lambda x: jax.lax.with_sharding_constraint(x, sharding),
      [jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)],
  )
  (found,) = closed.jaxpr.eqns
  return jc.new_eqn([value], [jc.new_var(value.aval)], found.primitive, found.params, like=eqn)
