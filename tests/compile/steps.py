"""Traced steps for tests of the passes, and what they evaluate to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.partition import CutLoop
from pax_mpmd.compile.trace import loop_of
from pax_mpmd.compile.trace import trace_step
from pax_mpmd.compile.trace import TracedStep


def traced(step: Callable[..., Any], *args: Any) -> tuple[TracedStep, list[Any]]:
  """The traced step and its flat arguments."""
  leaves, tree = jax.tree_util.tree_flatten((args, {}))
  avals = [jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype) for x in leaves]
  return trace_step(step, tree, avals, [False] * len(leaves)), leaves


def expected(step: Callable[..., Any], *args: Any) -> list[Any]:
  """The flat results of the plain step."""
  return jax.tree_util.tree_leaves(jax.jit(step)(*args))


def evaluate(jaxpr: Any, consts: Any, args: list[Any]) -> list[Any]:
  """Runs a jaxpr of a pass, marks included, as plain JAX would."""
  return jax.jit(lambda *xs: jc.eval_jaxpr(jaxpr, consts, *xs))(*args)


def evaluate_around(jaxpr: Any, consts: Any, args: list[Any], run_loop: Any, cut: CutLoop) -> list:
  """Runs a step's jaxpr equation by equation, with `run_loop(cut, operands)` for its loop."""
  loop = loop_of(jaxpr)
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))

  def read(atom):
    return atom.val if isinstance(atom, jc.Literal) else env[atom]

  def run(eqn):
    one = jc.new_jaxpr((), [v for v in eqn.invars if isinstance(v, jc.Var)], eqn.outvars, [eqn])
    kept = [v for v in eqn.outvars if not jc.is_drop(v)]
    one = jc.new_jaxpr((), one.invars, kept, [eqn])
    env.update(zip(kept, jc.eval_jaxpr(one, (), *map(read, one.invars))))

  for eqn in jaxpr.eqns:
    if eqn is not loop:
      run(eqn)
      continue
    for hoisted in cut.hoisted:
      run(hoisted)
    results = run_loop(cut, [read(x) for x in cut.operands])
    env.update((v, x) for v, x in zip(cut.outs, results) if not jc.is_drop(v))
  return [read(v) for v in jaxpr.outvars]
