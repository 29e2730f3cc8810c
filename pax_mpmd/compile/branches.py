"""Branches outside the loop -> both sides and a select.

An optimizer that skips steps (`optax.apply_if_finite`, `optax.MultiSteps`) chooses between the old
and the new training state by `cond`. One equation over the state of all stages would have to run
on one actor, with everybody's arrays.
In: a traced step. Out: the same, in which such an equation is replaced by the equations of all its
branches and one `select_n` per result, each of which then runs where its operands are.
Holds: the results are the same bits. What it costs is that every branch is computed.

A branch with a loop stays as it is: the side not taken might not end.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.trace import TracedStep

_KEPT = frozenset({'while', 'scan', 'accumulate_grads'})


def flatten_branches(step: TracedStep) -> TracedStep:
  """Replaces `cond` on arrays, outside the loop, by selects. See the module's docstring."""
  constvars, consts = list(step.jaxpr.constvars), list(step.consts)
  eqns: list[Any] = []
  for eqn in step.jaxpr.eqns:
    if not _may_flatten(eqn):
      eqns.append(eqn)
      continue
    _flatten(eqn, eqns, constvars, consts)
  jaxpr = jc.new_jaxpr(constvars, step.jaxpr.invars, step.jaxpr.outvars, eqns)
  jaxpr, _ = jc.dce(jaxpr, [True] * len(jaxpr.outvars))
  return dataclasses.replace(step, jaxpr=jaxpr, consts=tuple(consts))


def _may_flatten(eqn: Any) -> bool:
  if eqn.primitive.name != 'cond' or eqn.effects:
    return False
  if all(not v.aval.shape for v in eqn.outvars):
    return False  # scalars: nothing to gain
  return not any(_has_loop(branch.jaxpr) for branch in eqn.params['branches'])


def _has_loop(jaxpr: Any) -> bool:
  for eqn in jaxpr.eqns:
    if eqn.primitive.name in _KEPT:
      return True
    if any(_has_loop(inner) for inner in jc.inner_jaxprs(eqn)):
      return True
  return False


def _flatten(eqn: Any, eqns: list[Any], constvars: list[Any], consts: list[Any]) -> None:
  """Appends what replaces `eqn` to `eqns`."""
  index, *operands = eqn.invars
  results = []
  for branch in eqn.params['branches']:
    env = dict(zip(branch.jaxpr.invars, operands))
    for v, const in zip(branch.jaxpr.constvars, branch.consts):
      env[v] = jc.new_var(v.aval)
      constvars.append(env[v])
      consts.append(const)

    def read(atom, env=env):
      return atom if isinstance(atom, jc.Literal) else env[atom]

    for inner in branch.jaxpr.eqns:
      outvars = [v if jc.is_drop(v) else jc.new_var(v.aval) for v in inner.outvars]
      env.update(zip(inner.outvars, outvars))
      new = inner.replace(invars=[read(v) for v in inner.invars], outvars=outvars)
      if _may_flatten(new):
        _flatten(new, eqns, constvars, consts)
      else:
        eqns.append(new)
    results.append([read(v) for v in branch.jaxpr.outvars])
  which = index
  if len(results) == 2:
    # cond's index is clamped to the branches there are; any number but 0 takes the second.
    which = jc.new_var(index.aval.update(dtype=jax.numpy.dtype(bool)))
    zero = jc.Literal(index.aval.dtype.type(0), index.aval)
    eqns.append(jc.new_eqn([index, zero], [which], jax.lax.gt_p, {}, eqn))
  for out, cases in zip(eqn.outvars, zip(*results)):
    if jc.is_drop(out):
      continue
    cases = [_as_var(x, out.aval, eqn, eqns) for x in cases]
    eqns.append(jc.new_eqn([which, *cases], [out], jax.lax.select_n_p, {}, eqn))


def _as_var(atom: Any, aval: Any, eqn: Any, eqns: list[Any]) -> Any:
  """`atom`, of exactly the type of the result (weakly typed literals aren't)."""
  if not isinstance(atom, jc.Literal):
    return atom
  out = jc.new_var(aval)
  params = jc.broadcast_params(aval.shape)
  value = jc.Literal(aval.dtype.type(atom.val), aval.update(weak_type=False))
  eqns.append(jc.new_eqn([value], [out], jc.broadcast_in_dim_p, params, eqn))
  return out
