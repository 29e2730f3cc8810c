"""How the values between programs are spread over the devices of an actor.

In: a placed step, the actor's mesh, and how the step's arguments are sharded. Out: per value the
mesh axes of each of its dimensions.
Holds: each axis stands at most once in a value's spec and divides its dimension; a result that
takes an argument's place in the next step is sharded as that argument; a gradient sum is sharded as
the weight that it updates.

Nothing here can make a result wrong: XLA partitions each program for the shardings that its
arguments and results are given, and moves data inside where they don't fit. A bad guess costs
memory or communication between the devices of one actor. What the step says itself (arguments,
sharding constraints) is followed; from there two rules go on:

  * outside the loop, values joined by elementwise equations are sharded alike, so a gradient, its
    moments and its update all follow the weight;
  * inside the loop, and for everything else, a result is sharded as its operands are, dimension by
    dimension, as far as the equation keeps dimensions apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.placement import PlacedStep
from pax_mpmd.compile.primitives import ELEMENTWISE
from pax_mpmd.compile.primitives import REDUCTIONS
from pax_mpmd.compile.program import OperandKind
from pax_mpmd.compile.program import Sharding

Spec = tuple[tuple[str, ...], ...]  # per dimension the mesh axes it is split over


def spec_of(partition_spec: Any, shape: Sequence[int], sizes: Mapping[str, int]) -> Spec:
  """A `jax.sharding.PartitionSpec` by dimensions; axes that don't divide theirs are left out."""
  dims = []
  for entry in tuple(partition_spec or ())[: len(shape)]:
    names = entry if isinstance(entry, (tuple, list)) else (entry,)
    dims.append(tuple(n for n in names if isinstance(n, str)))
  return _fitting(dims, shape, sizes)


def _fitting(
    dims: Sequence[Sequence[str]], shape: Sequence[int], sizes: Mapping[str, int]
) -> Spec:
  """`dims`, filled up to the rank, without what can't be: unknown axes, axes met before, ..."""
  seen: set[str] = set()
  out = []
  for i, size in enumerate(shape):
    names = [n for n in (dims[i] if i < len(dims) else ()) if n in sizes and n not in seen]
    if size % math.prod(sizes[n] for n in names):
      names = []
    seen.update(names)
    out.append(tuple(names))
  return tuple(out)


class Shardings:
  """The shardings of a step's values.

  Args:
    sizes: the mesh's axes with several devices.
  """

  def __init__(self, sizes: Mapping[str, int]):
    self._mesh = tuple(sizes.items())
    self.values: dict[Any, Spec] = {}  # by variable of the step
    self.edges: dict[int, Spec] = {}

  def of(self, v: Any) -> Sharding | None:
    """The sharding of a variable of the step; None: a whole copy on each device."""
    return self._sharding(self.values.get(v))

  def of_edge(self, edge: int) -> Sharding | None:
    """The sharding of an edge of the loop."""
    return self._sharding(self.edges.get(edge))

  def _sharding(self, spec: Spec | None) -> Sharding | None:
    return Sharding(self._mesh, spec) if spec and any(spec) else None


def shardings_of(
    jaxpr: Any,
    placed: PlacedStep,
    sizes: Mapping[str, int],
    in_specs: Mapping[Any, Spec],
    next_value_of: Mapping[int, int],
) -> Shardings:
  """Decides how values are sharded; see the module's docstring.

  Args:
    jaxpr: the step.
    placed: the same, placed.
    sizes: the mesh's axes with several devices.
    in_specs: per argument of `jaxpr` its spec.
    next_value_of: result position -> argument position, as for `placement.place`.
  """
  out = Shardings(sizes)
  if not sizes:
    return out
  cut = placed.cut
  out.values.update(in_specs)
  _follow_arguments(jaxpr, placed, out.values, next_value_of)
  for body in placed.prologue:
    _spread_body(body.jaxpr, out.values, sizes)
  for task in cut.in_order():
    _spread_task(cut, placed, task, out, sizes)
  for body in placed.epilogue:
    _spread_body(body.jaxpr, out.values, sizes)
  return out


def _follow_arguments(
    jaxpr: Any, placed: PlacedStep, values: dict[Any, Spec], next_value_of: Mapping[int, int]
) -> None:
  """Gives values that meet an argument elementwise, outside the loop, the argument's spec."""
  parent: dict[Any, Any] = {}

  def root(v: Any) -> Any:
    while parent.get(v, v) is not v:
      v = parent[v]
    return v

  def join(a: Any, b: Any) -> None:
    a, b = root(a), root(b)
    if a is not b:
      parent[b] = a

  for position, arg in next_value_of.items():
    if isinstance(jaxpr.outvars[position], jc.Var):
      join(jaxpr.invars[arg], jaxpr.outvars[position])
  for initial, final in zip(placed.carry_initial, placed.cut.outs):
    if isinstance(initial, jc.Var) and not jc.is_drop(final):
      join(initial, final)
  for body in (*placed.prologue, *placed.epilogue):
    for eqn in body.jaxpr.eqns:
      if eqn.primitive.name in ELEMENTWISE:
        (result,) = eqn.outvars
        for x in eqn.invars:
          if isinstance(x, jc.Var) and x.aval.shape == result.aval.shape and x.aval.shape:
            join(x, result)
  chosen: dict[Any, Spec] = {}
  for v in jaxpr.invars:
    spec = values.get(v)
    if spec and any(spec):
      chosen.setdefault(root(v), spec)
  members = set(parent) | set(chosen)
  for v in members:
    spec = chosen.get(root(v))
    if spec is not None and v not in values:
      values[v] = spec
  # What replaces an argument is what the next step gets.
  for position, arg in next_value_of.items():
    v = jaxpr.invars[arg]
    if v in values and isinstance(jaxpr.outvars[position], jc.Var):
      values[jaxpr.outvars[position]] = values[v]


def _spread_body(jaxpr: Any, values: dict[Any, Spec], sizes: Mapping[str, int]) -> None:
  env = {v: values[v] for v in jaxpr.invars if v in values}
  spread(jaxpr, env, sizes)
  for v in jaxpr.outvars:
    if isinstance(v, jc.Var) and any(env.get(v, ())):
      values.setdefault(v, env[v])


def _spread_task(
    cut: Any, placed: PlacedStep, task: Any, out: Shardings, sizes: Mapping[str, int]
) -> None:
  env: dict[Any, Spec] = {}
  for v, op in zip(task.jaxpr.invars, task.inputs):
    if op.kind is OperandKind.EDGE:
      spec = out.edges.get(op.id)
    else:
      spec = out.values.get(cut.operands[op.id])
      if spec is not None and cut.is_batch[op.id]:
        spec = spec[1:]  # the microbatch's row
    if spec is not None:
      env[v] = spec
  spread(task.jaxpr, env, sizes)
  for v, op in zip(task.jaxpr.outvars, task.outputs):
    spec = env.get(v) if isinstance(v, jc.Var) else None
    if op.kind is OperandKind.EDGE:
      if spec is not None:
        out.edges[op.id] = spec
      continue
    final, initial = cut.outs[op.id], placed.carry_initial[op.id]
    if spec is not None and op.id >= cut.num_summed:
      spec = ((), *spec)
    known = out.values.get(final, out.values.get(initial, spec))
    if known is not None:
      out.values[final] = out.values[initial] = known


# -- one jaxpr -----------------------------------------------------------------------------------

_Rule = Callable[[Any, list[Spec], Mapping[str, int]], Spec]


def spread(jaxpr: Any, env: dict[Any, Spec], sizes: Mapping[str, int]) -> None:
  """Fills `env`, which has the specs of the arguments, with those of every variable."""

  def read(atom: Any) -> Spec:
    known = None if isinstance(atom, jc.Literal) else env.get(atom)
    return known if known is not None else ((),) * len(atom.aval.shape)

  for eqn in jaxpr.eqns:
    specs = [read(v) for v in eqn.invars]
    inner = _inner(eqn, specs)
    if inner is not None:
      body, inner_specs, result = inner
      inner_env = dict(zip(body.invars, inner_specs))
      spread(body, inner_env, sizes)
      for i, (v, w) in enumerate(zip(eqn.outvars, body.outvars)):
        known = inner_env.get(w) if isinstance(w, jc.Var) else None
        if known is not None:
          env[v] = _fitting(result(i, known), v.aval.shape, sizes)
      continue
    rule = _RULES.get(eqn.primitive.name, _keep_equal)
    for v in eqn.outvars:
      if hasattr(v.aval, 'shape'):
        env[v] = _fitting(rule(eqn, specs, sizes), v.aval.shape, sizes)


def _inner(eqn: Any, specs: list[Spec]) -> tuple[Any, list[Spec], Callable] | None:
  """The body of a call, its arguments' specs, and results' specs from the body's."""
  bodies = jc.inner_jaxprs(eqn)
  name = eqn.primitive.name
  if not bodies:
    return None
  if name == 'scan':
    num_consts, num_carry = jc.scan_sizes(eqn)
    start = num_consts + num_carry
    inner = specs[:start] + [s[1:] for s in specs[start:]]
    return bodies[0], inner, lambda i, s: s if i < num_carry else ((), *s)
  if name == 'cond':
    return bodies[0], specs[1:], lambda i, s: s
  if len(bodies) == 1 and len(bodies[0].invars) == len(specs):
    return bodies[0], specs, lambda i, s: s
  return None


def _merged(specs: Sequence[Spec]) -> Spec:
  """Per dimension the first operand's axes that says any."""
  return tuple(next((d for d in dims if d), ()) for dims in zip(*specs))


def _elementwise(eqn: Any, specs: list[Spec], sizes: Mapping[str, int]) -> Spec:
  del sizes
  shape = eqn.outvars[0].aval.shape
  same = [s for s, v in zip(specs, eqn.invars) if v.aval.shape == shape]
  return _merged(same) if same else ()


def _keep_equal(eqn: Any, specs: list[Spec], sizes: Mapping[str, int]) -> Spec:
  """For equations that keep dimensions in place: those of unchanged size keep their axes."""
  del sizes
  shape = eqn.outvars[0].aval.shape
  for spec, v in zip(specs, eqn.invars):
    if len(v.aval.shape) == len(shape):
      return tuple(d if a == b else () for d, a, b in zip(spec, v.aval.shape, shape))
  return ()


def _unknown(eqn: Any, specs: list[Spec], sizes: Mapping[str, int]) -> Spec:
  del eqn, specs, sizes
  return ()


def _constraint(eqn: Any, specs: list[Spec], sizes: Mapping[str, int]) -> Spec:
  del specs
  return spec_of(eqn.params['sharding'].spec, eqn.outvars[0].aval.shape, sizes)


def _broadcast(eqn: Any, specs: list[Spec], sizes: Mapping[str, int]) -> Spec:
  del sizes
  shape = eqn.outvars[0].aval.shape
  out: list[tuple[str, ...]] = [()] * len(shape)
  for source, target in enumerate(eqn.params['broadcast_dimensions']):
    if eqn.invars[0].aval.shape[source] == shape[target]:
      out[target] = specs[0][source]
  return tuple(out)


def _transpose(eqn: Any, specs: list[Spec], sizes: Mapping[str, int]) -> Spec:
  del sizes
  return tuple(specs[0][i] for i in eqn.params['permutation'])


def _drop(parameter: str) -> _Rule:
  def rule(eqn: Any, specs: list[Spec], sizes: Mapping[str, int]) -> Spec:
    del sizes
    dropped = {d % len(specs[0]) for d in eqn.params[parameter]}
    return tuple(s for i, s in enumerate(specs[0]) if i not in dropped)

  return rule


def _reshape(eqn: Any, specs: list[Spec], sizes: Mapping[str, int]) -> Spec:
  """Dimensions merged or split: the first of a group keeps the axes of the first."""
  del sizes  # an axis that doesn't divide the new dimension is taken out by the caller
  before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
  out: list[tuple[str, ...]] = [()] * len(after)
  i = j = 0
  while i < len(before) and j < len(after):
    start_i, start_j = i, j
    a, b = before[i], after[j]
    i, j = i + 1, j + 1
    while a != b:
      if a < b:
        if i == len(before):
          return tuple(out)
        a, i = a * before[i], i + 1
      else:
        if j == len(after):
          return tuple(out)
        b, j = b * after[j], j + 1
    first_i = next((k for k in range(start_i, i) if before[k] > 1), start_i)
    first_j = next((k for k in range(start_j, j) if after[k] > 1), start_j)
    out[first_j] = specs[0][first_i]
  return tuple(out)


def _gather(eqn: Any, specs: list[Spec], sizes: Mapping[str, int]) -> Spec:
  """Rows looked up: over the indices as these are, within a row as the table is."""
  del sizes
  numbers = eqn.params['dimension_numbers']
  table = eqn.invars[0].aval.shape
  kept = [i for i in range(len(table)) if i not in numbers.collapsed_slice_dims]
  inside = [specs[0][i] if eqn.params['slice_sizes'][i] == table[i] else () for i in kept]
  indices = list(specs[1][:-1])
  rank = len(eqn.outvars[0].aval.shape)
  if len(inside) + len(indices) != rank:
    return ()  # newer versions have batching dimensions too
  return tuple(inside.pop(0) if i in numbers.offset_dims else indices.pop(0) for i in range(rank))


def _dot_general(eqn: Any, specs: list[Spec], sizes: Mapping[str, int]) -> Spec:
  del sizes
  (left_sum, right_sum), (left_batch, right_batch) = eqn.params['dimension_numbers']
  left, right = specs
  out = [_merged([(left[i],), (right[j],)])[0] for i, j in zip(left_batch, right_batch)]
  for spec, used in ((left, {*left_sum, *left_batch}), (right, {*right_sum, *right_batch})):
    out += [axes for i, axes in enumerate(spec) if i not in used]
  return tuple(out)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(REDUCTIONS, _drop('axes')),
    'argmax': _drop('axes'),
    'argmin': _drop('axes'),
    'squeeze': _drop('dimensions'),
    'sharding_constraint': _constraint,
    'broadcast_in_dim': _broadcast,
    'transpose': _transpose,
    'reshape': _reshape,
    'dot_general': _dot_general,
    'gather': _gather,
    'conv_general_dilated': _unknown,
    'random_bits': _unknown,
}
