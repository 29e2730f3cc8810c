"""Where the equations outside the loop belong.

An equation with a large operand runs where that operand lives: that actor is its home. Homes start
at the loop's operands and results and spread along the equations, back and forth, until nothing
changes; that takes optimizer moments to their parameters. Everything else (scalars, learning
rates, the batch's reshapes, constants and masks made of them) has no home and runs wherever its
result is asked for: repeating it is cheaper than a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.partition import CutLoop
from pax_mpmd.compile.primitives import HEAVY
from pax_mpmd.compile.program import OperandKind
from pax_mpmd.compile.trace import loop_of

# Values of at most this many elements (scalars, counts, random keys) don't decide where an
# equation runs.
_SMALL_ELEMENTS = 4


@dataclasses.dataclass(frozen=True)
class Outer:
  """The part of a step outside its loop.

  Attributes:
    jaxpr: the step.
    constants: its constants, which every program can have.
    light: what light equations make of constants and small values, however large it is.
    eqns: the equations before and after the loop, with those hoisted out of it.
    producer: per variable the index of the equation that makes it.
    task_reads: per variable the actors whose tasks read it, ascending.
    batch: variables of which a task reads one microbatch's row.
    carry_initial: per loop result the variable that holds its value before the loop.
    carry_actor: per loop result its actor.
    carry_of: the loop's results with their actors.
    next_value_of: result position -> argument position whose place it takes in the next step.
  """

  jaxpr: Any
  constants: frozenset[Any]
  light: frozenset[Any]
  eqns: Sequence[Any]
  producer: Mapping[Any, int]
  task_reads: Mapping[Any, Sequence[int]]
  batch: frozenset[Any]
  carry_initial: Sequence[Any]
  carry_actor: Sequence[int]
  carry_of: Mapping[Any, int]
  next_value_of: Mapping[int, int]

  def is_constant(self, atom: Any) -> bool:
    """Whether `atom` is known at compile time."""
    return isinstance(atom, jc.Literal) or atom in self.constants


@dataclasses.dataclass(frozen=True)
class Homes:
  """Actors by variable and by index of equation; what isn't in it has no home."""

  values: Mapping[Any, int]
  equations: Mapping[int, int]


def outer_of(
    jaxpr: Any, cut: CutLoop, placement: Sequence[int], next_value_of: Mapping[int, int]
) -> Outer:
  """Collects what lies outside the loop of a step."""
  at = jaxpr.eqns.index(loop_of(jaxpr))
  zeros, carry_initial = _carry_zeros(cut)
  eqns = [*jaxpr.eqns[:at], *cut.hoisted, *zeros, *jaxpr.eqns[at + 1 :]]
  carry_actor = [placement[cut.owner(out)[0]] for out in range(len(cut.outs))]
  task_reads: dict[Any, set[int]] = {}
  batch: set[Any] = set()
  for task in cut.tasks.values():
    for op in task.inputs:
      if op.kind is OperandKind.STEP:
        v = cut.operands[op.id]
        task_reads.setdefault(v, set()).add(placement[task.stage])
        if cut.is_batch[op.id]:
          batch.add(v)
  return Outer(
      jaxpr=jaxpr,
      constants=frozenset(jaxpr.constvars),
      light=_light(eqns, frozenset(jaxpr.constvars)),
      eqns=eqns,
      producer={v: i for i, e in enumerate(eqns) for v in e.outvars},
      task_reads={v: sorted(actors) for v, actors in task_reads.items()},
      batch=frozenset(batch),
      carry_initial=carry_initial,
      carry_actor=carry_actor,
      carry_of={v: a for v, a in zip(cut.outs, carry_actor) if not jc.is_drop(v)},
      next_value_of=next_value_of,
  )


def find_homes(outer: Outer) -> Homes:
  """Finds the homes; see the module's docstring."""
  values: dict[Any, int] = dict(outer.carry_of)
  equations: dict[int, int] = {}
  for v, actors in outer.task_reads.items():
    if v not in outer.batch and _is_large(outer, v):
      values.setdefault(v, actors[0])
  pairs = [
      (outer.jaxpr.invars[arg], outer.jaxpr.outvars[out])
      for out, arg in outer.next_value_of.items()
  ]
  pairs = [(x, y) for x, y in pairs if _is_large(outer, x) and _is_large(outer, y)]

  def spread(source: Any, targets: Iterable[Any]) -> None:
    if source in values:
      for v in targets:
        values.setdefault(v, values[source])

  def settle(i: int, by_operands: bool) -> None:
    eqn = outer.eqns[i]
    large = [v for v in eqn.invars if _is_large(outer, v)]
    if not large:
      return
    where = equations.get(i)
    if where is None:
      where = next((values[v] for v in eqn.outvars if v in values), None)
    if where is None and by_operands:
      known = [v for v in large if v in values]
      where = values[max(known, key=_size)] if known else None
    if where is None:
      return
    equations[i] = where
    for v in [*eqn.outvars, *large]:
      if not jc.is_drop(v) and v not in outer.batch:
        values.setdefault(v, where)

  def follow_results() -> None:
    # A new value belongs where the old one is. Of a weight that is cast before the loop, only the
    # cast's home is known at first; it leads to the weight's, and that to its update's.
    while True:
      before = len(values), len(equations)
      for x, y in pairs:
        spread(x, [y])
        spread(y, [x])
      for i in reversed(range(len(outer.eqns))):
        settle(i, by_operands=False)
      if before == (len(values), len(equations)):
        return

  while True:
    before = len(values), len(equations)
    follow_results()
    for i in range(len(outer.eqns)):
      settle(i, by_operands=True)
    if before == (len(values), len(equations)):
      return Homes(values, equations)


def _size(v: Any) -> int:
  return math.prod(v.aval.shape)


def _is_large(outer: Outer, atom: Any) -> bool:
  if outer.is_constant(atom) or atom in outer.light:
    return False
  return _size(atom) > _SMALL_ELEMENTS


def _light(eqns: Sequence[Any], constants: frozenset[Any]) -> frozenset[Any]:
  light = set(constants)
  for eqn in eqns:
    if eqn.primitive.name not in HEAVY and all(
        isinstance(x, jc.Literal) or x in light or _size(x) <= _SMALL_ELEMENTS
        for x in eqn.invars
    ):
      light.update(eqn.outvars)
  return frozenset(light - constants)


def _carry_zeros(cut: CutLoop) -> tuple[list[Any], list[Any]]:
  """Equations that make the value of each loop result before the loop, and their variables."""
  eqns, initial = [], []
  for aval in map(jc.physical_aval, cut.out_avals):
    zero = jc.Literal(np.zeros((), aval.dtype), aval.update(shape=()))
    out = jc.new_var(aval)
    eqns.append(
        jc.new_eqn([zero], [out], jc.broadcast_in_dim_p, jc.broadcast_params(aval.shape))
    )
    initial.append(out)
  return eqns, initial
