"""How a traced result of a batch follows from those of its microbatches, read off its jaxpr.

A loss or a metric is mostly a sum over tokens divided by something: by the sum of their weights, by
that plus an epsilon or at least 1, by the number of tokens whatever their weights are. Sums add up
over microbatches; quotients don't, unless each is multiplied by its own divisor and the sum divided
by the batch's. So the divisor has to be known exactly. `Trace.combination` follows a result
backwards through what is linear in it, down to the sums, and collects the divisions on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np

from pax_mpmd.compile import jax_compat
from pax_mpmd.pax import mixing

__all__ = ['Combination', 'Trace']

_CALLS = frozenset((
    'checkpoint', 'closed_call', 'core_call', 'custom_jvp_call', 'custom_vjp_call_jaxpr', 'jit',
    'pjit', 'remat2',
))
# What changes neither the numbers nor, where sizes agree, their order.
_LAYOUT = frozenset((
    'broadcast_in_dim', 'convert_element_type', 'copy', 'copy_p', 'expand_dims', 'reduce_precision',
    'reduce_sum', 'reshape', 'sharding_constraint', 'squeeze',
))
# Linear in the one operand.
_LINEAR = frozenset(('reduce_sum', 'reshape', 'rev', 'slice', 'squeeze', 'transpose'))
_DEEPEST = 8  # how far expressions are compared
_MOST_TERMS = 1000  # of a result; no loss has so many


@dataclasses.dataclass(frozen=True)
class Combination:
  """How a result follows from those of the microbatches.

  Attributes:
    kind: 'same' in all of them; 'sum'; 'mean'; 'max' or 'min'; 'ratio', a quotient; 'unknown' where
      it is none of these as far as can be seen; or 'impossible' where it can't be combined.
    weight: of a ratio, the name of the weight that its divisor is made of.
    divisor: of a ratio, the divisor as a function of that weight; both scalars.
    why: of what is impossible, why, as the end of a sentence.
  """

  kind: str
  weight: str | None = None
  divisor: Callable[[Any], Any] | None = None
  why: str = ''


@dataclasses.dataclass(frozen=True, eq=False)
class _Scope:
  """A jaxpr, or one within another, with where its inputs come from."""

  jaxpr: Any
  inputs: Mapping[Any, Any]  # variable -> _Value of the outer scope, or a constant's value
  positions: Mapping[Any, int]  # of the outermost scope: variable -> number of the argument
  varying: set[Any]
  made: dict[Any, tuple[Any, int]]
  inner: dict[int, _Scope]
  in_pipeline: bool = False


_Value = tuple[_Scope, Any]


@dataclasses.dataclass(frozen=True)
class _Term:
  """A summand of a result: `kind` divided by all of `divisors`."""

  kind: str  # 'same', 'sum', 'max', 'min' or 'other'
  size: int = 1  # of what is summed
  divisors: tuple[_Value, ...] = ()
  mixes: str = ''  # how it takes examples together in yet another way


class Trace:
  """A jaxpr, looked at backwards from its results."""

  def __init__(self, closed: Any, varying: Sequence[bool], batch_size: int):
    """Constructor.

    Args:
      closed: the ClosedJaxpr.
      varying: which of its arguments differ between microbatches.
      batch_size: examples of a batch, the size of leading axes.
    """
    jaxpr = closed.jaxpr
    self._batch_size = batch_size
    self._unmixed: set[Any] = set()  # where `_mixes` has found nothing
    self._outer = _scope(
        jaxpr,
        dict(zip(jaxpr.constvars, closed.consts)),
        {v: i for i, v in enumerate(jaxpr.invars)},
        {v for v, x in zip(jaxpr.invars, varying) if x},
    )

  def combination(
      self, i: int, weights: Mapping[str, int], leave_out: Sequence[int] = ()
  ) -> Combination:
    """How result i follows from those of the microbatches.

    Args:
      i: number of the result.
      weights: name -> number of the result that is that weight, a sum over the batch.
      leave_out: results that, where they are summands of result i, are none of its business.
    """
    left_out = {self._id(self._skip_layout(self._result(j))) for j in leave_out}
    terms = list(itertools.islice(self._terms(self._result(i), left_out), _MOST_TERMS))
    if len(terms) == _MOST_TERMS:
      return Combination('unknown')
    mixes = next((term.mixes for term in terms if term.mixes), '')
    if mixes:
      return Combination('impossible', why=mixes)
    found = [self._of_term(term, weights) for term in terms if term.kind != 'same']
    if not found:
      return Combination('same')
    if leave_out and any(c.kind == 'ratio' for c in found):
      # What the pipeline added may have come here in other ways.
      found = [c for c in found if c.kind in ('ratio', 'impossible')]
    for kind in ('unknown', 'impossible'):
      if any(c.kind == kind for c in found):
        return next(c for c in found if c.kind == kind)
    if not all(_agree(found[0], other) for other in found):
      return Combination('impossible', why='is a sum of terms with different divisors')
    if found[0].kind != 'mean' and len(found) < len(terms):
      return Combination('unknown')  # divisors as such don't add up, so 3 + x / divisor doesn't
    return found[0]

  def is_count(self, i: int) -> bool:
    """Whether result i, a scalar, grows with the batch: it depends on it, or counts examples."""
    value = self._result(i)
    return self._varies(value) or self._counts_examples(value, 0)

  def _result(self, i: int) -> _Value:
    return self._outer, self._outer.jaxpr.outvars[i]

  def _of_term(self, term: _Term, weights: Mapping[str, int]) -> Combination:
    constant = [d for d in term.divisors if not self._varies(d)]
    varying = [d for d in term.divisors if self._varies(d)]
    if len(varying) > 1:
      return Combination('unknown')
    if varying:
      for name, j in weights.items():
        divisor = self._function_of(varying[0], self._result(j))
        if divisor is not None:
          return Combination('ratio', name, divisor)
      return Combination('impossible', why='is divided by what is none of the returned weights')
    if term.kind != 'sum':
      return Combination('unknown' if term.kind == 'other' else term.kind)
    if any(self._counts_examples(d, term.size) for d in constant):
      return Combination('mean')
    return Combination('sum')

  def _counts_examples(self, divisor: _Value, size: int) -> bool:
    """Whether a constant divisor is the number of examples or of their parts."""
    value = self._constant(divisor)
    if value is None or np.size(value) > 1:
      return False
    number = float(np.reshape(value, ()))
    return number > 0 and size % number == 0 and number % self._batch_size == 0

  # Where values come from.

  def _resolve(self, value: _Value) -> _Value:
    """The value itself in the scope that makes it: through calls, in and out."""
    scope, atom = value
    while not isinstance(atom, jax_compat.Literal):
      if isinstance(scope.inputs.get(atom), tuple):
        scope, atom = scope.inputs[atom]
      elif atom in scope.made and _is_call(scope.made[atom][0]):
        eqn, k = scope.made[atom]
        scope = self._enter(scope, eqn)
        atom = scope.jaxpr.outvars[k]
      else:
        break
    return scope, atom

  def _enter(self, scope: _Scope, eqn: Any) -> _Scope:
    if id(eqn) not in scope.inner:
      (jaxpr,) = jax_compat.inner_jaxprs(eqn)
      closed = [p for p in eqn.params.values() if getattr(p, 'jaxpr', None) is jaxpr]
      consts = closed[0].consts if closed else ()
      outer = [(scope, x) for x in eqn.invars]
      inputs = {**dict(zip(jaxpr.constvars, consts)), **dict(zip(jaxpr.invars, outer))}
      varying = {v for v, x in zip(jaxpr.invars, outer) if self._varies(x)}
      scope.inner[id(eqn)] = dataclasses.replace(
          _scope(jaxpr, inputs, {}, varying), in_pipeline=_in_pipeline(scope, eqn)
      )
    return scope.inner[id(eqn)]

  def _varies(self, value: _Value) -> bool:
    scope, atom = value
    return not isinstance(atom, jax_compat.Literal) and atom in scope.varying

  def _made(self, value: _Value) -> tuple[Any, list[_Value]] | None:
    """The equation that makes a value, and its operands; None for inputs and constants."""
    scope, atom = value
    if isinstance(atom, jax_compat.Literal) or atom not in scope.made:
      return None
    eqn, _ = scope.made[atom]
    return eqn, [(scope, x) for x in eqn.invars]

  def _skip_layout(self, value: _Value) -> _Value:
    """The value before changes of its layout and type only."""
    while True:
      value = self._resolve(value)
      made = self._made(value)
      if made is None or made[0].primitive.name not in _LAYOUT:
        return value
      (operand, *_) = made[1]
      if _size(operand) != _size(value):
        return value
      value = operand

  def _id(self, value: _Value) -> Any:
    scope, atom = value
    return (id(scope), id(atom))

  def _key(self, value: _Value, depth: int = 0) -> Any:
    """Equal for equal expressions, up to layout."""
    value = self._skip_layout(value)
    scope, atom = value
    if isinstance(atom, jax_compat.Literal):
      return ('literal', np.asarray(atom.val).tobytes())
    if atom in scope.positions:
      return ('argument', scope.positions[atom])
    made = self._made(value)
    if made is None or depth == _DEEPEST or scope.made[atom][1]:
      return self._id(value)
    eqn, operands = made
    name = eqn.primitive.name
    if name == 'reduce_sum' and _size(value) == 1:
      params = ''  # of everything
    elif jax_compat.inner_jaxprs(eqn):
      return self._id(value)
    else:
      params = '' if name in _LAYOUT else str(eqn.params)
    return (name, params, *(self._key(x, depth + 1) for x in operands))

  # What they are made of.

  def _terms(
      self, value: _Value, left_out: set[Any], divisors: tuple[_Value, ...] = ()
  ) -> Iterator[_Term]:
    value = self._skip_layout(value)
    if not self._varies(value):
      constant = self._constant(value)
      if constant is None or np.any(constant):
        yield _Term('same')
      return
    if self._id(value) in left_out:
      return
    made = self._made(value)
    name, operands = ('', []) if made is None else (made[0].primitive.name, made[1])

    def follow(x: _Value, divisors: tuple[_Value, ...]) -> Iterator[_Term]:
      return self._terms(x, left_out, divisors)

    if name in ('add', 'add_any', 'sub', 'neg'):
      for x in operands:
        yield from follow(x, divisors=divisors)
    elif name == 'select_n':
      for x in operands[1:]:
        yield from follow(x, divisors=divisors)
    elif name == 'mul' and not all(map(self._varies, operands)):
      yield from follow(next(filter(self._varies, operands)), divisors=divisors)
    elif name == 'mul' and (rest := self._cancelled(operands, divisors)) is not None:
      yield from follow(*rest)
    elif name == 'div' and self._varies(operands[0]):
      yield from follow(operands[0], divisors=(*divisors, operands[1]))
    elif name in ('reduce_sum', 'reduce_max', 'reduce_min') and self._has_batch(operands[0]):
      kind = name.removeprefix('reduce_')
      mixes = self._mixes(operands)
      if kind == 'sum' or not divisors:
        yield _Term(kind, _size(operands[0]) // _size(value), divisors, mixes)
      else:
        yield _Term('other', divisors=divisors, mixes=mixes)
    elif name == 'dot_general' and mixing.sums_over_batch(made[0], self._batch_size):
      yield _Term('sum', _size(operands[0]), divisors, self._mixes(operands))
    elif name in _LINEAR and not self._has_batch(operands[0]):
      yield from follow(operands[0], divisors=divisors)
    elif made is None or self._has_batch(value) or _in_pipeline(value[0], made[0]):
      yield _Term('other', divisors=divisors)
    else:
      yield _Term('other', divisors=divisors, mixes=mixing.of_statistics(made[0]))

  def _cancelled(
      self, factors: Sequence[_Value], divisors: tuple[_Value, ...]
  ) -> tuple[_Value, tuple[_Value, ...]] | None:
    """The other factor and divisors where one factor is a divisor, too; (x * w) / w, say."""
    for factor, other in zip(factors, reversed(factors)):
      for i, divisor in enumerate(divisors):
        if self._key(factor) == self._key(divisor):
          return other, divisors[:i] + divisors[i + 1 :]
    return None

  def _has_batch(self, value: _Value) -> bool:
    return mixing.has_batch(value[1], self._batch_size)

  def _mixes(self, values: Sequence[_Value]) -> str:
    """How arrays of examples depend on more than the example; nothing where no sign of it is seen.

    A pipeline's stages see microbatches in Pax as well, so what they mix is no matter.
    """
    left, seen = list(values), set()
    while left:
      value = self._resolve(left.pop())
      key = self._id(value)
      if not self._varies(value) or key in seen or key in self._unmixed:
        continue
      seen.add(key)
      made = self._made(value)
      if made is None or _in_pipeline(value[0], made[0]):
        continue
      mixes = mixing.of_examples(made[0], [self._varies(x) for x in made[1]], self._batch_size)
      if mixes:
        return mixes
      left += made[1]
    self._unmixed |= seen
    return ''

  def _function_of(self, value: _Value, weight: _Value) -> Callable[[Any], Any] | None:
    """`value` as a function of `weight`, both scalars; None if it's no function of it alone."""
    leaf = self._key(weight)

    def build(value: _Value) -> Callable[[Any], Any] | None:
      value = self._resolve(value)
      aval = value[1].aval
      if self._key(value) == leaf:
        return lambda w: jax.numpy.reshape(w, aval.shape).astype(aval.dtype)
      if not self._varies(value):
        constant = self._constant(value)
        return None if constant is None else lambda w: constant
      made = self._made(value)
      if made is None or _size(value) != 1 or any(_size(x) != 1 for x in made[1]):
        return None
      eqn, operands = made
      if jax_compat.inner_jaxprs(eqn) or len(eqn.outvars) != 1:
        return None
      parts = [build(x) for x in operands]
      if any(part is None for part in parts):
        return None
      return lambda w: eqn.primitive.bind(*(part(w) for part in parts), **eqn.params)

    return build(value)

  def _constant(self, value: _Value) -> Any:
    """The number of what depends on no argument; None where it does, or is hard to say."""
    value = self._resolve(value)
    scope, atom = value
    if isinstance(atom, jax_compat.Literal):
      return np.asarray(atom.val, atom.aval.dtype)
    made = self._made(value)
    if made is None:
      known = scope.inputs.get(atom)
      return None if known is None or isinstance(known, jax.core.Tracer) else np.asarray(known)
    eqn, operands = made
    if jax_compat.inner_jaxprs(eqn) or len(eqn.outvars) != 1:
      return None
    values = [self._constant(x) for x in operands]
    if any(x is None for x in values):
      return None
    with jax.ensure_compile_time_eval():
      return np.asarray(eqn.primitive.bind(*map(jax.numpy.asarray, values), **eqn.params))


def _scope(jaxpr: Any, inputs: Any, positions: Any, varying: set[Any]) -> _Scope:
  made = {}
  for eqn in jaxpr.eqns:
    made.update({v: (eqn, k) for k, v in enumerate(eqn.outvars)})
    if any(not isinstance(x, jax_compat.Literal) and x in varying for x in eqn.invars):
      varying.update(eqn.outvars)
  return _Scope(jaxpr, inputs, positions, varying, made, {})


def _in_pipeline(scope: _Scope, eqn: Any) -> bool:
  # The names of what is inside a call don't hold those around it.
  return scope.in_pipeline or '/pipeline/' in f'/{eqn.source_info.name_stack}/'


def _is_call(eqn: Any) -> bool:
  if eqn.primitive.name not in _CALLS:
    return False
  inner = jax_compat.inner_jaxprs(eqn)
  return len(inner) == 1 and len(inner[0].invars) == len(eqn.invars)


def _size(value: _Value) -> int:
  return math.prod(value[1].aval.shape)


def _agree(a: Combination, b: Combination) -> bool:
  """Whether two summands combine alike, up to an epsilon in their divisors."""
  if a.kind != b.kind or a.kind in ('max', 'min'):
    return a is b
  if a.kind != 'ratio':
    return True
  with jax.ensure_compile_time_eval():
    points = [np.float32(10.0), np.float32(1e4)]
    numbers = [[np.float32(c.divisor(jax.numpy.asarray(x))) for x in points] for c in (a, b)]
  # A constant factor of both terms is no difference.
  ratios = np.divide(*numbers)
  return bool(np.allclose(ratios, ratios[0], rtol=1e-5))
