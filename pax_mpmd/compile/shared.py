"""The delayed sum of a shared weight's gradients.

A weight used by several stages (a tied embedding) has a gradient that is a sum of one part per
use. Summed inside the loop, a weight-sized part would cross between actors for every microbatch.
In: an unstacked step. Out: the same step, in which the loop accumulates one sum per stage, and the
parts are added once, after the loop:

  sum_i L(a_i + b_i)  =  sum_i L(a_i)  +  sum_i L(b_i)

L is whatever linear equations lie between the addition and the loop's result: the transposes of
casts, scales, reshapes and slices of the weight. They stay inside the loop, applied to each part,
so that parts are accumulated in the result's dtype (linear.py).

Precondition, checked for every value taken apart: inside the loop it is read for nothing but the
loop's sums, so nobody can see the per-microbatch total. Where it doesn't hold the addition stays,
the parts are sent, and a note says so. The split is by stage, not by actor, so that results don't
depend on the placement.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.linear import is_backward_mark
from pax_mpmd.compile.linear import is_sum
from pax_mpmd.compile.linear import Linearity
from pax_mpmd.compile.primitives import ELEMENTWISE
from pax_mpmd.compile.segments import find_segments
from pax_mpmd.compile.segments import FREE
from pax_mpmd.compile.segments import Segments
from pax_mpmd.compile.trace import loop_of
from pax_mpmd.compile.unstack import UnstackedStep

Parts = dict[int, Any]  # stage (or FREE) -> the atom that is this stage's part of a sum


def delay_shared_sums(step: UnstackedStep, num_stages: int) -> UnstackedStep:
  """Accumulates the gradient parts of different stages apart. See the module's docstring."""
  loop = loop_of(step.jaxpr)
  body = loop.params['jaxpr'].jaxpr
  num_summed = loop.params['num_summed']
  segments = find_segments(body, num_stages)
  splitter = _Splitter(loop, segments)

  after: list[Any] = []  # equations of the step, right after the loop
  body_outs: list[Any] = []
  outvars: list[Any] = []
  for v, out in zip(body.outvars[:num_summed], loop.outvars[:num_summed]):
    parts = splitter.one_atom_per_stage(v)
    body_outs.extend(parts)
    if len(parts) == 1:
      outvars.append(out)
      continue
    sums = [jc.new_var(out.aval) for _ in parts]
    outvars.extend(sums)
    total = sums[0]
    for part in sums[1:-1]:
      total = _add(after, total, part)
    after.append(jc.new_eqn([total, sums[-1]], [out], jax.lax.add_p, {}, loop))

  new_body = jc.new_jaxpr(
      (), body.invars, [*body_outs, *body.outvars[num_summed:]], splitter.eqns
  )
  new_body, _ = jc.dce(new_body, [True] * len(new_body.outvars))
  params = dict(loop.params, num_summed=len(outvars), jaxpr=jc.ClosedJaxpr(new_body, ()))
  new_loop = loop.replace(outvars=[*outvars, *loop.outvars[num_summed:]], params=params)
  eqns: list[Any] = []
  for eqn in step.jaxpr.eqns:
    eqns.extend([new_loop, *after] if eqn is loop else [eqn])
  jaxpr = jc.new_jaxpr(step.jaxpr.constvars, step.jaxpr.invars, step.jaxpr.outvars, eqns)
  notes = _kept_sums(new_body, len(outvars), segments)
  return dataclasses.replace(step, jaxpr=jaxpr, notes=(*step.notes, *notes))


class _Splitter:
  """Writes values of a loop's body as sums of one part per stage.

  Attributes:
    eqns: the body's equations, and after each one those that make the parts of its result.
  """

  def __init__(self, loop: Any, segments: Segments):
    body = loop.params['jaxpr'].jaxpr
    self._segments = segments
    self._linearity = Linearity(body, loop.params['num_consts'], segments)
    self._seen = self._seen_inside(body, loop.params['num_summed'])
    self._parts: dict[Any, Parts] = {}
    self.eqns: list[Any] = []
    for eqn in body.eqns:
      self.eqns.append(eqn)
      self._take_apart(eqn)

  def one_atom_per_stage(self, atom: Any) -> list[Any]:
    """Atoms whose sum is `atom`, one for each stage that takes part in it.

    What belongs to no stage (weight decay, say) is added to the first one.
    """
    parts = dict(self._parts_of(atom))
    free = parts.pop(FREE, None)
    if len(parts) < 2:
      return [atom]
    first, *others = parts.values()
    return [first if free is None else _add(self.eqns, first, free), *others]

  def _seen_inside(self, body: Any, num_summed: int) -> set[Any]:
    """Variables whose value for one microbatch something inside the loop can see."""
    seen = {v for v in body.outvars[num_summed:] if isinstance(v, jc.Var)}
    for eqn in reversed(body.eqns):
      if is_backward_mark(eqn):
        pairs = zip(eqn.invars, eqn.outvars)
        seen.update(x for x, v in pairs if v in seen and isinstance(x, jc.Var))
        continue
      linear_in = () if seen.intersection(eqn.outvars) else self._linearity.operands(eqn)
      seen.update(
          x for i, x in enumerate(eqn.invars) if isinstance(x, jc.Var) and i not in linear_in
      )
    return seen

  def _parts_of(self, atom: Any) -> Parts:
    """The parts of `atom`: those found, else the atom as its stage's only part."""
    if isinstance(atom, jc.Var) and atom in self._parts:
      return self._parts[atom]
    segment = self._segments.of(atom)
    return {FREE if segment == FREE else self._segments.stage(segment): atom}

  def _take_apart(self, eqn: Any) -> None:
    """Finds the parts of what `eqn` makes, if nothing sees it and it may have several."""
    if is_backward_mark(eqn):
      # The identity, result by result. Without it a part of a sum stays where it was made.
      pairs = [(x, v) for x, v in zip(eqn.invars, eqn.outvars) if v not in self._seen]
      self._parts.update((v, self._parts_of(x)) for x, v in pairs)
      return
    if self._seen.intersection(eqn.outvars):
      return
    operands = {i: self._parts_of(eqn.invars[i]) for i in self._linearity.operands(eqn)}
    stages = dict.fromkeys(stage for parts in operands.values() for stage in parts)
    in_parts = any(isinstance(x, jc.Var) and x in self._parts for x in eqn.invars)
    if in_parts or len(stages) > 1:
      made = {
          stage: self._part(eqn, {i: p[stage] for i, p in operands.items() if stage in p})
          for stage in stages
      }
      for k, v in enumerate(eqn.outvars):
        self._parts[v] = {stage: atoms[k] for stage, atoms in made.items()}

  def _part(self, eqn: Any, operands: dict[int, Any]) -> list[Any]:
    """The results of `eqn` for the given linear operands, where the others are zeros."""
    if is_sum(eqn) and len(operands) == 1:
      ((i, part),) = operands.items()
      if eqn.primitive.name != 'sub' or i == 0:
        return [part]
      return [_bind(self.eqns, jax.lax.neg_p, [part], part.aval, eqn)]
    invars = [operands.get(i, x) for i, x in enumerate(eqn.invars)]
    outvars = [jc.new_var(v.aval) for v in eqn.outvars]
    self.eqns.append(jc.new_eqn(invars, outvars, eqn.primitive, eqn.params, eqn))
    return outvars


def _kept_sums(body: Any, num_summed: int, segments: Segments) -> list[str]:
  """A note for each sum over stages that stays in the loop on its way to a loop's result.

  Sums are followed through elementwise equations (a clip, a mask) on arrays of their shape.
  """
  followed = {v for v in body.outvars[:num_summed] if isinstance(v, jc.Var)}
  outermost: dict[Any, Any] = {}  # operand of a sum -> the equation that the whole sum ends with
  stages: dict[int, set[int]] = {}  # by the identity of that equation
  sums: list[Any] = []
  for eqn in reversed(body.eqns):
    out = eqn.outvars[0]
    if out not in followed or eqn.primitive.name not in ELEMENTWISE:
      continue
    same = [x for x in eqn.invars if isinstance(x, jc.Var) and x.aval.shape == out.aval.shape]
    followed.update(same)
    if is_sum(eqn):
      last = outermost.get(out, eqn)
      sums.append(last)
      outermost.update((x, last) for x in same)
      made_in = [segments.of(x) for x in same]
      stages.setdefault(id(last), set()).update(segments.stage(s) for s in made_in if s != FREE)
  return [
      f'the value {eqn.outvars[0].aval.str_short()} is summed over the stages'
      f' {sorted(stages[id(eqn)])} for every microbatch, not once after the loop: it is used inside'
      f' the loop (sum at {jc.source_of(eqn)})'
      for eqn in {id(e): e for e in sums}.values()
      if len(stages[id(eqn)]) > 1
  ]


def _add(eqns: list[Any], x: Any, y: Any) -> Any:
  return _bind(eqns, jax.lax.add_p, [x, y], x.aval)


def _bind(eqns: list[Any], primitive: Any, invars: list[Any], aval: Any, like: Any = None) -> Any:
  """Appends an equation with one result and no parameters; returns its variable."""
  out = jc.new_var(aval)
  eqns.append(jc.new_eqn(invars, [out], primitive, {}, like))
  return out
