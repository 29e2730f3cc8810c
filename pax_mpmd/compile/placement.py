"""Prologue and epilogue -> programs on actors.

In: a step (unstacked) with its loop cut, the stages' actors, and which results are the next
values of which arguments. Out: a `PlacedStep`: the equations outside the loop as programs on
actors, and who holds each argument and result.
Holds: every operand of a program is made on its actor, sent to it by an earlier program, or an
argument there.

An equation with a large operand runs where that operand lives; that is its home. Homes start at
the loop's operands and results and spread over the equations until nothing changes, which takes
optimizer moments to their parameters. Everything else (scalars, learning rates, the batch's
reshapes, constants) has no home and runs wherever its result is asked for: repeating it is cheaper
than a message. Of sums over actors (global norms) each actor thus receives the parts and adds
them itself, in the same order, to the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.partition import CutLoop
from pax_mpmd.compile.program import OperandKind
from pax_mpmd.compile.trace import loop_of

# Values of at most this many elements (scalars, counts, random keys) don't decide where an
# equation runs.
_SMALL_ELEMENTS = 4


@dataclasses.dataclass(frozen=True)
class OuterBody:
  """A program of the prologue or epilogue; its jaxpr's variables are the step's."""

  actor: int
  level: int
  jaxpr: Any


@dataclasses.dataclass(frozen=True)
class PlacedStep:
  """A step, placed.

  Attributes:
    input_actors: per argument (piece) of the step's jaxpr the actors that need it, ascending.
    output_actors: per result the actors that have it at the end; empty for constants.
    carry_initial: per loop result the variable that holds its value before the loop.
    carry_actor: per loop result its actor.
    prologue, epilogue: programs in an order in which each only needs earlier ones.
  """

  cut: CutLoop
  input_actors: tuple[tuple[int, ...], ...]
  output_actors: tuple[tuple[int, ...], ...]
  carry_initial: tuple[Any, ...]
  carry_actor: tuple[int, ...]
  prologue: tuple[OuterBody, ...]
  epilogue: tuple[OuterBody, ...]
  notes: tuple[str, ...]


def place(
    jaxpr: Any, cut: CutLoop, placement: Sequence[int], next_value_of: Mapping[int, int]
) -> PlacedStep:
  """Places the equations outside the loop.

  Args:
    jaxpr: the step.
    cut: its loop.
    placement: stage -> actor.
    next_value_of: result position -> argument position, for results that take the argument's
      place in the next step and so should be where that is.
  """
  return _Placer(jaxpr, cut, placement, next_value_of).place()


def _size(v: Any) -> int:
  return math.prod(v.aval.shape)


class _Placer:
  """Working state of `place`."""

  def __init__(self, jaxpr, cut: CutLoop, placement, next_value_of):
    self.jaxpr = jaxpr
    self.cut = cut
    self.next_value_of = next_value_of
    loop = loop_of(jaxpr)
    at = jaxpr.eqns.index(loop)
    zeros, self.carry_initial = _carry_zeros(cut)
    self.eqns = [*jaxpr.eqns[:at], *cut.hoisted, *zeros, *jaxpr.eqns[at + 1 :]]
    self.producer = {v: i for i, e in enumerate(self.eqns) for v in e.outvars}
    self.constvars = set(jaxpr.constvars)
    self.invars = set(jaxpr.invars)
    self.carry_actor = [placement[cut.owner(out)[0]] for out in range(len(cut.outs))]
    self.carry_of = {v: a for v, a in zip(cut.outs, self.carry_actor) if not jc.is_drop(v)}
    # Which actors' tasks read which values, ascending.
    self.task_reads: dict[Any, list[int]] = {}
    batch: set[Any] = set()
    for task in cut.tasks.values():
      for op in task.inputs:
        if op.kind is OperandKind.STEP:
          v = cut.operands[op.id]
          actors = self.task_reads.setdefault(v, [])
          if placement[task.stage] not in actors:
            actors.append(placement[task.stage])
            actors.sort()
          if cut.is_batch[op.id]:
            batch.add(v)
    self.batch = batch
    self.home: dict[Any, int] = {}
    self.eqn_home: dict[int, int] = {}
    self.notes: list[str] = []

  # -- homes -----------------------------------------------------------------------------------

  def _find_homes(self) -> None:
    home = self.home
    home.update(self.carry_of)
    for v, actors in self.task_reads.items():
      if v not in self.batch and v not in self.constvars and _size(v) > _SMALL_ELEMENTS:
        home.setdefault(v, actors[0])
    outs = self.jaxpr.outvars
    for out, arg in self.next_value_of.items():
      x, y = self.jaxpr.invars[arg], outs[out]
      if isinstance(y, jc.Var) and x in home and _size(y) > _SMALL_ELEMENTS:
        home.setdefault(y, home[x])
    changed = True
    while changed:
      before = len(home), len(self.eqn_home)
      for i in reversed(range(len(self.eqns))):
        self._settle(i)
      for out, arg in self.next_value_of.items():
        x, y = self.jaxpr.invars[arg], outs[out]
        if isinstance(y, jc.Var) and y in home and _size(x) > _SMALL_ELEMENTS:
          home.setdefault(x, home[y])
      for i in range(len(self.eqns)):
        self._settle(i, by_operands=True)
      changed = before != (len(home), len(self.eqn_home))

  def _settle(self, i: int, by_operands: bool = False) -> None:
    """Finds the home of equation i, from its results or its operands, and spreads it."""
    eqn = self.eqns[i]
    large = [
        v
        for v in eqn.invars
        if isinstance(v, jc.Var) and v not in self.constvars and _size(v) > _SMALL_ELEMENTS
    ]
    if not large:
      return
    where = self.eqn_home.get(i)
    if where is None:
      where = next((self.home[v] for v in eqn.outvars if v in self.home), None)
    if where is None and by_operands:
      known = [v for v in large if v in self.home]
      if known:
        where = self.home[max(known, key=_size)]
    if where is None:
      return
    self.eqn_home[i] = where
    for v in eqn.outvars:
      if not jc.is_drop(v):
        self.home.setdefault(v, where)
    for v in large:
      if v not in self.batch:
        self.home.setdefault(v, where)

  # -- demand ----------------------------------------------------------------------------------

  def place(self) -> PlacedStep:
    self._find_homes()
    loop_needs = [(v, a) for v, actors in self.task_reads.items() for a in actors]
    loop_needs += zip(self.carry_initial, self.carry_actor)
    in_prologue, self.holders = self._demand(loop_needs)
    instances, output_actors = self._place_outputs(loop_needs)
    self.level = self._latest_levels(self._levels(instances), in_prologue, output_actors)
    prologue, epilogue = self._programs(in_prologue, output_actors)
    return PlacedStep(
        cut=self.cut,
        input_actors=tuple(tuple(sorted(self.holders[v])) for v in self.jaxpr.invars),
        output_actors=tuple(tuple(sorted(w)) for w in output_actors),
        carry_initial=tuple(self.carry_initial),
        carry_actor=tuple(self.carry_actor),
        prologue=prologue,
        epilogue=epilogue,
        notes=tuple(self.notes),
    )

  def _demand(
      self, needs: Sequence[tuple[Any, int]]
  ) -> tuple[set[tuple[int, int]], dict[Any, set[int]]]:
    """What has to be there so that each (variable, actor) of `needs` is.

    Returns:
      The instances (equation, actor), and per argument who must hold it.
    """
    wanted: dict[Any, set[int]] = {}
    for v, a in needs:
      wanted.setdefault(v, set()).add(a)
    instances: set[tuple[int, int]] = set()
    for i in reversed(range(len(self.eqns))):
      actors = {a for v in self.eqns[i].outvars for a in wanted.get(v, ())}
      if not actors:
        continue
      if i in self.eqn_home:
        actors = {self.eqn_home[i]}
      instances.update((i, a) for a in actors)
      for x in self.eqns[i].invars:
        if isinstance(x, jc.Var):
          wanted.setdefault(x, set()).update(actors)
    holders = {}
    for v in self.jaxpr.invars:
      actors = wanted.get(v, set())
      if v in self.home and v not in self.batch:
        # Tasks read their own copy; anybody else gets it sent from home.
        copies = set(self.task_reads.get(v, ()))
        actors = copies | ({self.home[v]} if actors - copies else set())
      holders[v] = set(actors)
    return instances, holders

  def _levels(self, instances: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Per instance how many messages, one after the other, come before it."""
    level: dict[tuple[int, int], int] = {}

    def there(x: Any, actor: int) -> int:
      if isinstance(x, jc.Literal) or x in self.constvars:
        return 0
      if x in self.carry_of:
        return int(self.carry_of[x] != actor)
      source = self._source(x, actor)
      if source is None:
        return int(actor not in self.holders[x])
      return level[source] + int(source[1] != actor)

    for i, actor in sorted(instances):
      level[i, actor] = max((there(x, actor) for x in self.eqns[i].invars), default=0)
    return level

  def _latest_levels(
      self,
      earliest: dict[tuple[int, int], int],
      in_prologue: set[tuple[int, int]],
      output_actors: Sequence[Sequence[int]],
  ) -> dict[tuple[int, int], int]:
    """Moves instances of the epilogue to the last level at which nobody waits for them.

    That keeps chains of elementwise equations in one program, beside their reader, instead of
    handing every intermediate array from an early program to a late one.
    """
    last = {a: 0 for _, a in earliest}
    for (_, a), value in earliest.items():
      last[a] = max(last[a], value)
    due: dict[tuple[int, int], int] = {}
    for v, actors in zip(self.jaxpr.outvars, output_actors):
      for a in actors:
        source = self._source(v, a)
        if source is not None:
          # A copy that is sent to `a` may leave at the end.
          due[source] = min(due.get(source, last[source[1]]), last[source[1]])
    level = dict(earliest)
    for i, actor in sorted(earliest, reverse=True):
      if (i, actor) not in in_prologue:
        level[i, actor] = max(earliest[i, actor], due.get((i, actor), earliest[i, actor]))
      for x in self.eqns[i].invars:
        source = self._source(x, actor)
        if source is not None:
          at = level[i, actor] - int(source[1] != actor)
          due[source] = min(due.get(source, at), at)
    return level

  def _place_outputs(
      self, loop_needs: Sequence[tuple[Any, int]]
  ) -> tuple[set[tuple[int, int]], list[set[int]]]:
    """Decides where each result is; sets `holders` to fit. Returns the instances as well."""
    outs = self.jaxpr.outvars
    wanted: list[set[int]] = [set() for _ in outs]
    for i, v in enumerate(outs):
      if i not in self.next_value_of and v not in self.holders:
        wanted[i] = {self._likely(v)}
    while True:
      needs = [*loop_needs, *((v, a) for v, w in zip(outs, wanted) for a in w)]
      instances, self.holders = self._demand(needs)
      before = [set(w) for w in wanted]
      for i, arg in self.next_value_of.items():
        x = self.jaxpr.invars[arg]
        wanted[i] |= self.holders[x] or {self.home.get(x, self._likely(outs[i]))}
      for i, v in enumerate(outs):
        if v in self.holders and not wanted[i]:
          wanted[i] = self.holders[v] or {self.home.get(v, 0)}
      if wanted == before:
        return instances, wanted

  def _likely(self, v: Any) -> int:
    """An actor that has, or is near, what `v` is made of."""
    while v not in self.home:
      i = self.producer.get(v)
      operands = [] if i is None else [x for x in self.eqns[i].invars if isinstance(x, jc.Var)]
      known = [x for x in operands if x in self.home]
      made = [x for x in operands if x in self.producer]
      if not known and not made:
        return 0
      v = known[0] if known else made[0]
    return self.home[v]

  # -- programs --------------------------------------------------------------------------------

  def _source(self, v: Any, actor: int) -> tuple[int, int] | None:
    """The instance (equation, actor) that `actor` gets `v` from; None if no equation makes it."""
    i = self.producer.get(v) if isinstance(v, jc.Var) else None
    return None if i is None else (i, self.eqn_home.get(i, actor))

  def _programs(
      self, in_prologue: set[tuple[int, int]], output_actors: Sequence[Sequence[int]]
  ) -> tuple[tuple[OuterBody, ...], tuple[OuterBody, ...]]:
    """Groups the instances to programs, by section, level and actor."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    program_of: dict[tuple[int, int], tuple[int, int, int]] = {}
    for i, actor in sorted(self.level):
      section = 0 if (i, actor) in in_prologue else 1
      key = (section, self.level[i, actor], actor)
      groups.setdefault(key, []).append(i)
      program_of[i, actor] = key

    reads: dict[tuple[int, int, int], list[Any]] = {}
    exports: dict[tuple[int, int, int], set[Any]] = {key: set() for key in groups}
    readers = [(v, a) for v, actors in self.task_reads.items() for a in actors]
    readers += list(zip(self.carry_initial, self.carry_actor))
    readers += [(v, a) for v, actors in zip(self.jaxpr.outvars, output_actors) for a in actors]
    for key, indices in groups.items():
      actor = key[2]
      inputs: dict[Any, None] = {}
      for i in indices:
        for x in self.eqns[i].invars:
          source = self._source(x, actor)
          if isinstance(x, jc.Var) and (source is None or program_of[source] != key):
            inputs[x] = None
      reads[key] = list(inputs)
      readers += [(x, actor) for x in inputs]
    for v, actor in readers:
      source = self._source(v, actor)
      if source is not None:
        exports[program_of[source]].add(v)

    sections: tuple[list[OuterBody], list[OuterBody]] = ([], [])
    for key in sorted(groups):
      section, level, actor = key
      eqns = [self.eqns[i] for i in groups[key]]
      outs = [v for e in eqns for v in e.outvars if v in exports[key]]
      consts = [v for v in reads[key] if v in self.constvars]
      args = [v for v in reads[key] if v not in self.constvars]
      sections[section].append(OuterBody(actor, level, jc.new_jaxpr(consts, args, outs, eqns)))
    return tuple(sections[0]), tuple(sections[1])


def _carry_zeros(cut: CutLoop) -> tuple[list[Any], list[Any]]:
  """Equations that make the value of each loop result before the loop, and their variables."""
  import numpy as np

  eqns, initial = [], []
  for aval in map(jc.physical_aval, cut.out_avals):
    zero = jc.Literal(np.zeros((), aval.dtype), aval.update(shape=()))
    out = jc.new_var(aval)
    eqns.append(
        jc.new_eqn([zero], [out], jc.broadcast_in_dim_p, jc.broadcast_params(aval.shape))
    )
    initial.append(out)
  return eqns, initial
