"""One equation -> two: what other stages wait for, and the rest.

A stage's backward pass is split into I (the gradient of the stage's input) and W (the gradients of
its weights). Equations go to one or the other as wholes, but a scan over layers, a checkpointed
block or a branch gives both in one equation. Such an equation is taken apart here.
In: an equation with a body, and which of its results are needed early. Out: two equations; the
first gives the needed results, the second, which may run much later, the others.
Holds: together they compute what the one did, and no equation of the body is in both: what the
second needs of the first is handed over, for a scan stacked over its steps.

The body is halved backwards from its results: what the needed ones depend on is the first half.
For a scan that is a fixed point, as a needed result may depend on a carry of the step before. See
`assign.py` for the step's own equations, which fall apart by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import dataclasses
from typing import Any

import jax

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.primitives import CHEAP_LAYOUT
from pax_mpmd.compile.primitives import ELEMENTWISE


def split(eqn: Any, needed: Sequence[bool]) -> tuple[Any, Any] | None:
  """Takes an equation apart.

  Args:
    eqn: the equation.
    needed: for each of its results whether it is needed early.

  Returns:
    The two equations, the first to run first; None where that can't be done, or nothing would be
    left for the second.
  """
  rule = _RULES.get(eqn.primitive.name)
  return None if rule is None or eqn.effects else rule(eqn, list(needed))


@dataclasses.dataclass(frozen=True)
class _Halves:
  """A body's equations, halved; `rest` may read what `first` makes, not the other way round."""

  first: tuple[Any, ...]
  rest: tuple[Any, ...]

  def handed_over(self, outs: Iterable[Any], also: Iterable[Any] = ()) -> list[Any]:
    """What the rest, with the results `outs`, reads of what the first half makes or `also`."""
    made = {v for e in self.first for v in e.outvars} | set(also)
    return [v for v in _read(self.rest, outs) if v in made]


def _halve(eqns: Sequence[Any], outs: Sequence[Any], needed: Sequence[bool]) -> _Halves:
  """Halves a body with the results `outs`."""
  early = {v for v, n in zip(outs, needed) if n and not isinstance(v, jc.Literal)}
  first: list[Any] = []
  rest: list[Any] = []
  for eqn in reversed(eqns):
    flags = [v in early for v in eqn.outvars]
    halves = None
    if any(flags) and not all(n or jc.is_drop(v) for n, v in zip(flags, eqn.outvars)):
      halves = split(eqn, flags)
    if halves is not None:
      rest.append(halves[1])
      eqn = halves[0]
    elif not any(flags):
      rest.append(eqn)
      continue
    first.append(eqn)
    early.update(v for v in eqn.invars if not isinstance(v, jc.Literal))
  first.reverse()
  rest.reverse()
  return _Halves(tuple(first), (*_constants(first, rest), *rest))


def _constants(first: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
  """Equations of `first` that make constants which `rest` reads: cheaper made again than kept."""
  wanted = set(_read(rest, ()))
  return [
      e
      for e in first
      if all(isinstance(x, jc.Literal) for x in e.invars)
      and (e.primitive.name in CHEAP_LAYOUT or e.primitive.name in ELEMENTWISE)
      and any(v in wanted for v in e.outvars)
  ]


def _read(eqns: Iterable[Any], outs: Iterable[Any]) -> list[Any]:
  """The variables that equations with the results `outs` read and don't make, in order."""
  made: set[Any] = set()
  read: dict[Any, None] = {}
  for eqn in eqns:
    read.update((v, None) for v in eqn.invars if not isinstance(v, jc.Literal) and v not in made)
    made.update(eqn.outvars)
  read.update((v, None) for v in outs if not isinstance(v, jc.Literal) and v not in made)
  return list(read)


def _split_checkpoint(eqn: Any, needed: list[bool]) -> tuple[Any, Any] | None:
  """Both halves stay checkpointed, so that neither is merged with the forward pass."""
  body = eqn.params['jaxpr']
  halves = _halve(body.eqns, body.outvars, needed)
  if not halves.rest:
    return None
  now = [i for i, n in enumerate(needed) if n]
  later = [i for i, n in enumerate(needed) if not n and not jc.is_drop(eqn.outvars[i])]
  outer = dict(zip(body.invars, eqn.invars))
  handed = {
      v: jc.new_var(v.aval) for v in halves.handed_over(body.outvars[i] for i in later)
  }

  def part(eqns: Sequence[Any], outs: list[Any], outvars: list[Any]) -> Any:
    read = [v for v in _read(eqns, outs) if v not in body.constvars]
    jaxpr = jc.new_jaxpr(body.constvars, read, outs, eqns)
    invars = [handed[v] if v in handed else outer[v] for v in read]
    params = jc.checkpoint_params(eqn.params, jaxpr)
    return jc.new_eqn(invars, outvars, eqn.primitive, params, eqn)

  return (
      part(
          halves.first,
          [*(body.outvars[i] for i in now), *handed],
          [*(eqn.outvars[i] for i in now), *handed.values()],
      ),
      part(halves.rest, [body.outvars[i] for i in later], [eqn.outvars[i] for i in later]),
  )


def _split_scan(eqn: Any, needed: list[bool]) -> tuple[Any, Any] | None:
  closed = eqn.params['jaxpr']
  body = closed.jaxpr
  num_consts, num_carry = jc.scan_sizes(eqn)
  carries = body.invars[num_consts : num_consts + num_carry]
  while True:
    halves = _halve(body.eqns, body.outvars, needed)
    read = set(_read(halves.first, (v for v, n in zip(body.outvars, needed) if n)))
    more = [i for i in range(num_carry) if not needed[i] and carries[i] in read]
    if not more:
      break
    for i in more:
      needed[i] = True
  if not halves.rest:
    return None
  results = range(num_carry, len(body.outvars))
  now = [i for i in results if needed[i]]
  later = [i for i in results if not needed[i] and not jc.is_drop(eqn.outvars[i])]
  carried_now = [i for i in range(num_carry) if needed[i]]
  carried_later = [i for i in range(num_carry) if not needed[i]]
  outer = dict(zip(body.invars, eqn.invars))
  given = {*body.invars[:num_consts], *body.invars[num_consts + num_carry :]}
  stacked = {
      body.outvars[i]: eqn.outvars[i]
      for i in now
      if isinstance(body.outvars[i], jc.Var) and body.outvars[i] not in given
  }
  handed = [
      v
      for v in halves.handed_over(
          (body.outvars[i] for i in carried_later + later), (carries[i] for i in carried_now)
      )
      if v not in stacked
  ]
  for v in handed:
    shape = (eqn.params['length'], *v.aval.shape)
    stacked[v] = jc.new_var(jc.ShapedArray(shape, v.aval.dtype))

  def part(
      eqns: Sequence[Any],
      carried: list[int],
      ys: list[int],
      gives: list[Any] | tuple[()],
      takes: dict[Any, Any],
  ) -> Any:
    outs = [*(body.outvars[i] for i in carried + ys), *gives]
    read = set(_read(eqns, outs))
    own = [carries[i] for i in carried]
    consts = [v for v in body.invars[:num_consts] if v in read]
    xs = [v for v in body.invars[num_consts + num_carry :] if v in read]
    taken = [v for v in takes if v in read]
    invars = [*consts, *own, *xs, *taken]
    jaxpr = jc.ClosedJaxpr(jc.new_jaxpr(body.constvars, invars, outs, eqns), closed.consts)
    params = jc.scan_params(eqn.params, jaxpr, len(consts), len(own))
    args = [outer[v] for v in consts + own + xs] + [takes[v] for v in taken]
    outvars = [eqn.outvars[i] for i in carried + ys] + [stacked[v] for v in gives]
    return jc.new_eqn(args, outvars, eqn.primitive, params, eqn)

  return (
      part(halves.first, carried_now, now, handed, {}),
      part(halves.rest, carried_later, later, (), stacked),
  )


def _split_cond(eqn: Any, needed: list[bool]) -> tuple[Any, Any] | None:
  """Every branch hands over its own values, and zeros in place of the other branches'."""
  index, *operands = eqn.invars
  branches = eqn.params['branches']
  halves = [_halve(b.jaxpr.eqns, b.jaxpr.outvars, needed) for b in branches]
  if not any(h.rest for h in halves):
    return None
  now = [i for i, n in enumerate(needed) if n]
  later = [i for i, n in enumerate(needed) if not n and not jc.is_drop(eqn.outvars[i])]
  handed = [
      h.handed_over(b.jaxpr.outvars[i] for i in later) for h, b in zip(halves, branches)
  ]
  if any(jc.is_key(v.aval) for vs in handed for v in vs):
    return None  # there is no zero of that type
  between = [jc.new_var(v.aval) for vs in handed for v in vs]
  num = len(operands)

  def first(which: int) -> Callable[..., Any]:
    branch = branches[which]
    own = handed[which]

    def run(*args: Any) -> list[Any]:
      outs = [branch.jaxpr.outvars[i] for i in now] + own
      jaxpr = jc.new_jaxpr(branch.jaxpr.constvars, branch.jaxpr.invars, outs, halves[which].first)
      values = jc.eval_jaxpr(jaxpr, branch.consts, *args)
      results = values[: len(now)]
      for k, vs in enumerate(handed):
        zeros = [jax.numpy.zeros(v.aval.shape, v.aval.dtype) for v in vs]
        results += values[len(now) :] if k == which else zeros
      return results

    return run

  def rest(which: int) -> Callable[..., Any]:
    branch = branches[which]
    start = sum(map(len, handed[:which]))

    def run(*args: Any) -> list[Any]:
      own = args[num + start : num + start + len(handed[which])]
      invars = [*branch.jaxpr.invars, *handed[which]]
      outs = [branch.jaxpr.outvars[i] for i in later]
      jaxpr = jc.new_jaxpr(branch.jaxpr.constvars, invars, outs, halves[which].rest)
      return jc.eval_jaxpr(jaxpr, branch.consts, *args[:num], *own)

    return run

  def part(make: Callable[[int], Callable[..., Any]], args: list[Any], outvars: list[Any]) -> Any:
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in args]
    params = dict(
        eqn.params, branches=tuple(jc.trace(make(k), avals) for k in range(len(branches)))
    )
    if 'linear' in params:
      params['linear'] = (False,) * len(args)
    return jc.new_eqn([index, *args], outvars, eqn.primitive, params, eqn)

  return (
      part(first, operands, [*(eqn.outvars[i] for i in now), *between]),
      part(rest, [*operands, *between], [eqn.outvars[i] for i in later]),
  )


_RULES: dict[str, Callable[[Any, list[bool]], tuple[Any, Any] | None]] = {
    'checkpoint': _split_checkpoint,
    'cond': _split_cond,
    'remat': _split_checkpoint,
    'remat2': _split_checkpoint,
    'scan': _split_scan,
}
