"""A function -> one small program per result, so that each result can be made by itself.

For initial states: nobody has to hold all results of the function, and whoever needs a part of one
can make it.

In: a function and its arguments, concrete.
Out: for each flat result a `Result`.
Holds: a result depends on nothing but its own operands; small values that the function computes on
the way (random keys, scales) are computed once, here, and are operands; no result is computed here
unless it is small itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.export import aval_of
from pax_mpmd.compile.export import evaluate
from pax_mpmd.compile.export import fingerprint
from pax_mpmd.compile.export import lower
from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Executable
from pax_mpmd.compile.trace import inlined

__all__ = ['Result', 'separate_results']

# Values of up to this many bytes are computed once for all: many random keys, but no weights.
_SMALL_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Result:
  """One flat result of a function.

  Attributes:
    aval: its shape and dtype.
    operands: what its program takes, on the host.
    jaxpr: of the operands, as they are between programs, to the result; None: the one operand is
      the result.
    fingerprint: equal for programs that are equal up to names.
  """

  aval: Aval
  operands: tuple[np.ndarray, ...] = dataclasses.field(repr=False)
  jaxpr: Any = dataclasses.field(repr=False)
  fingerprint: str

  def lower(self, shape: Sequence[int]) -> Executable:
    """The program of a box of the result, of `shape`: (operands, first index int32[n]) -> box."""
    whole = tuple(shape) == self.aval.shape
    jaxpr = self.jaxpr

    def run(*args):
      (array,) = evaluate(jaxpr, (), args[:-1], None)
      if whole:
        return [array]
      start = [args[-1][i] for i in range(array.ndim)]
      return [jax.lax.dynamic_slice(array, start, shape)]

    avals = [Aval(x.shape, x.dtype.name) for x in self.operands]
    avals.append(Aval((len(self.aval.shape),), 'int32'))
    return lower(run, avals, [Aval(tuple(shape), self.aval.dtype)], ())


def separate_results(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[Result]]:
  """Traces `fn` and takes its results apart.

  Args:
    fn: a function of pytrees of arrays.
    *args: its arguments.

  Returns:
    The tree structure of its result, and its leaves.

  Raises:
    PartitionError: `fn` calls back into Python, or has other side effects.
  """
  flat, in_tree = jax.tree_util.tree_flatten(args)
  flat = [jax.numpy.asarray(x) for x in flat]
  avals = [jc.aval_of_value(x) for x in flat]
  out_trees: list[Any] = []

  def flat_fn(*leaves):
    outs, tree = jax.tree_util.tree_flatten(fn(*jax.tree_util.tree_unflatten(in_tree, leaves)))
    out_trees.append(tree)
    return outs

  jaxpr, consts = inlined(jc.trace(flat_fn, avals))
  known = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*flat, *consts]))
  small, large = _split(jaxpr, {v for v in known if _nbytes(v) <= _SMALL_BYTES})
  made_by = {v: i for i, eqn in enumerate(large) for v in eqn.outvars}
  outs = jaxpr.outvars
  slices = {
      v: _slice(large, made_by, v) for v in outs if not isinstance(v, jc.Literal) and v in made_by
  }
  wanted = {v for cut in slices.values() for v in cut.invars}
  wanted |= {v for v in outs if not isinstance(v, jc.Literal) and v not in made_by}
  values = {v: np.asarray(jc.unwrap_key(x)) for v, x in known.items() if v in wanted}
  values.update(_compute(small, known, wanted))
  results = []
  for v in outs:
    aval = aval_of(v.aval)
    if isinstance(v, jc.Literal):
      results.append(Result(aval, (np.asarray(v.val, aval.numpy_dtype),), None, ''))
    elif v not in slices:
      results.append(Result(aval, (values[v],), None, ''))
    else:
      cut = slices[v]
      operands = tuple(values[x] for x in cut.invars)
      results.append(Result(aval, operands, cut, fingerprint(cut)))
  return out_trees[-1], results


def _nbytes(v: Any) -> int:
  stored = jc.physical_aval(v.aval)
  return math.prod(stored.shape) * np.dtype(stored.dtype).itemsize


def _split(jaxpr: Any, small_values: set[Any]) -> tuple[list[Any], list[Any]]:
  """The equations between small values, and all others."""
  small, large = [], []
  for eqn in jaxpr.eqns:
    reads = [v for v in eqn.invars if not isinstance(v, jc.Literal)]
    fits = all(jc.is_drop(v) or _nbytes(v) <= _SMALL_BYTES for v in eqn.outvars)
    if fits and all(v in small_values for v in reads):
      small.append(eqn)
      small_values.update(v for v in eqn.outvars if not jc.is_drop(v))
    else:
      large.append(eqn)
  return small, large


def _slice(eqns: Sequence[Any], made_by: dict[Any, int], out: Any) -> Any:
  """The jaxpr of those equations that `out` depends on."""
  needed: set[int] = set()
  todo = [made_by[out]]
  operands: dict[Any, None] = {}
  while todo:
    i = todo.pop()
    if i in needed:
      continue
    needed.add(i)
    for v in eqns[i].invars:
      if isinstance(v, jc.Literal):
        continue
      if v in made_by:
        todo.append(made_by[v])
      else:
        operands[v] = None
  jaxpr = jc.new_jaxpr((), list(operands), [out], [eqns[i] for i in sorted(needed)])
  # An equation of several results (a scan) may still do more than is needed.
  jaxpr, _ = jc.dce(jaxpr, [True], instantiate=False)
  # Operands in the order in which they are used, so that equal programs get equal fingerprints.
  used = dict.fromkeys(
      v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, jc.Literal)
  )
  return jc.new_jaxpr(
      (), [v for v in used if v in operands], jaxpr.outvars, jaxpr.eqns
  )


def _compute(eqns: Sequence[Any], known: dict[Any, Any], wanted: set[Any]) -> dict[Any, Any]:
  """Evaluates small equations, all at once, for those of `wanted` that they make."""
  outs = [v for eqn in eqns for v in eqn.outvars if v in wanted]
  if not outs:
    return {}
  jaxpr = jc.new_jaxpr((), list(known), outs, eqns)
  jaxpr, used = jc.dce(jaxpr, [True] * len(outs), instantiate=False)
  args = [jc.unwrap_key(x) for x, u in zip(known.values(), used) if u]
  values = jax.jit(lambda *xs: evaluate(jaxpr, (), xs, None))(*args)
  return dict(zip(outs, map(np.asarray, values)))
