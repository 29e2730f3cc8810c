"""A yield after the last stage has to be the last stage's end; if it looks like another, say so."""

from __future__ import annotations

from typing import Any

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.classes import invariant_vars
from pax_mpmd.compile.primitives import HEAVY
from pax_mpmd.compile.trace import loop_of


def notes_on_last_yield(jaxpr: Any, num_stages: int) -> tuple[str, ...]:
  """A note if there are as many yields as stages, and layers after the last one."""
  loop = loop_of(jaxpr)
  body = loop.params['jaxpr'].jaxpr
  forward = [
      e
      for e in body.eqns
      if e.primitive.name == 'pipeline_yield' and e.params['direction'] == 'forward'
  ]
  if len(forward) < num_stages:
    return ()
  last = forward[-1]
  weights = invariant_vars(body, loop.params['num_consts'])
  after = set(last.outvars)
  for eqn in body.eqns[body.eqns.index(last) + 1 :]:
    if eqn.primitive.name == 'pipeline_yield':
      break  # from here on it's the backward pass
    operands = [v for v in eqn.invars if isinstance(v, jc.Var)]
    if not after.intersection(operands):
      continue
    used = [v for v in operands if v in weights]
    if eqn.primitive.name in HEAVY and used:
      return (
          f'the pipeline_yield at {jc.source_of(last)} is number {num_stages} of {num_stages}, so'
          f' it ends the last stage; but the weights {used[0].aval.str_short()} are used after it,'
          f' at {jc.source_of(eqn)}, which counts to the last stage as well. If that is a stage of'
          f' its own, choose num_stages={num_stages + 1}; else leave the last yield out',
      )
    after.update(eqn.outvars)
  return ()
