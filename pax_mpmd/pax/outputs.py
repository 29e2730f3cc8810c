"""Single results of a traced function: computing one, or finding that it is a constant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pax_mpmd.compile import jax_compat

__all__ = ['constant_output', 'eval_output']


def eval_output(closed: jax_compat.ClosedJaxpr, i: int, args: Sequence[Any]) -> Any:
  """Result i of a jaxpr, without computing what it doesn't need."""
  jaxpr, used = _only(closed, i)
  return jax_compat.eval_jaxpr(jaxpr, closed.consts, *[x for x, u in zip(args, used) if u])[0]


def constant_output(
    closed: jax_compat.ClosedJaxpr, i: int, given: dict[int, Any] | None = None
) -> np.ndarray | None:
  """The value of result i if it is the same for all arguments, else None.

  Args:
    closed: the jaxpr.
    i: which result.
    given: values of arguments that it may depend on.
  """
  jaxpr, used = _only(closed, i)
  given = given or {}
  needed = [j for j, u in enumerate(used) if u]
  if any(j not in given for j in needed):
    return None
  # JAX keeps the constants of the whole, also those that only other results use.
  atoms = [*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars]
  live = {v for v in atoms if not isinstance(v, jax_compat.Literal)}
  consts = [x if v in live else None for v, x in zip(jaxpr.constvars, closed.consts)]
  if any(isinstance(x, jax.core.Tracer) for x in consts):
    return None
  with jax.ensure_compile_time_eval():
    return np.asarray(jax_compat.eval_jaxpr(jaxpr, consts, *[given[j] for j in needed])[0])


def _only(closed, i):
  used_outputs = [j == i for j in range(len(closed.jaxpr.outvars))]
  return jax_compat.dce(closed.jaxpr, used_outputs, instantiate=False)
