"""Prologue and epilogue -> programs on actors.

In: a step (unstacked) with its loop cut, the stages' actors, and which results are the next
values of which arguments. Out: a `PlacedStep`: the equations outside the loop as programs on
actors, and who holds each argument and result.
Holds: every operand of a program is made on its actor, sent to it by an earlier program, or an
argument there.

Three steps, each from the result of the one before:

  1. homes (homes.py): where an equation has to run, if anywhere in particular;
  2. demand: starting from what the loop reads and what the step returns, which equations run on
     which actors. One of these pairs is called an instance;
  3. levels: how many messages, one after the other, an instance has to wait for. The instances of
     one actor and level become one program.

Of sums over actors (global norms) each actor receives the parts and adds them itself, in the same
order, to the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.assign import nbytes
from pax_mpmd.compile.assign import SMALL_BYTES
from pax_mpmd.compile.homes import find_homes
from pax_mpmd.compile.homes import Homes
from pax_mpmd.compile.homes import Outer
from pax_mpmd.compile.homes import outer_of
from pax_mpmd.compile.partition import CutLoop

Instance = tuple[int, int]  # (index of the equation, actor)
Need = tuple[Any, int]  # (variable, actor that reads it)


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
    output_actors: per result the actors that have it at the end.
    carry_initial: per loop result the variable that holds its value before the loop.
    carry_actor: per loop result its actor.
    prologue, epilogue: programs in an order in which each only needs earlier ones.
    notes: a line for each place that brings large arrays of several actors together.
  """

  cut: CutLoop
  input_actors: tuple[tuple[int, ...], ...]
  output_actors: tuple[tuple[int, ...], ...]
  carry_initial: tuple[Any, ...]
  carry_actor: tuple[int, ...]
  prologue: tuple[OuterBody, ...]
  epilogue: tuple[OuterBody, ...]
  notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Demand:
  """What has to run, and who has to hold which argument, so that certain needs are met."""

  instances: frozenset[Instance]
  holders: Mapping[Any, frozenset[int]]


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
  outer = outer_of(jaxpr, cut, placement, next_value_of)
  homes = find_homes(outer)
  loop_needs: list[Need] = [(v, a) for v, actors in outer.task_reads.items() for a in actors]
  loop_needs += zip(outer.carry_initial, outer.carry_actor)
  in_prologue = _demand(outer, homes, loop_needs).instances
  demand, output_actors = _place_results(outer, homes, loop_needs)
  result_needs = [(v, a) for v, actors in zip(jaxpr.outvars, output_actors) for a in actors]
  level = _levels(outer, homes, demand)
  level = _latest_levels(outer, homes, level, in_prologue, result_needs)
  prologue, epilogue = _programs(outer, homes, level, in_prologue, loop_needs + result_needs)
  return PlacedStep(
      cut=cut,
      input_actors=tuple(tuple(sorted(demand.holders[v])) for v in jaxpr.invars),
      output_actors=tuple(tuple(sorted(w)) for w in output_actors),
      carry_initial=tuple(outer.carry_initial),
      carry_actor=tuple(outer.carry_actor),
      prologue=prologue,
      epilogue=epilogue,
      notes=_gathers(outer, homes, demand),
  )


def _gathers(outer: Outer, homes: Homes, demand: _Demand) -> tuple[str, ...]:
  """A note for each equation that needs large arrays of other actors, by the user's line.

  The sum of a shared weight's parts is none: it is what the weight's sharing costs.
  """
  sums = set(outer.carry_of)  # results of the loop, and sums of such
  sent: dict[tuple[int, str, str], dict[Any, int]] = {}
  for i, eqn in enumerate(outer.eqns):
    operands = [v for v in eqn.invars if isinstance(v, jc.Var)]
    if eqn.primitive.name == 'add' and sums.issuperset(operands):
      sums.update(eqn.outvars)
      continue
    actor = homes.equations.get(i)
    if actor is None or (i, actor) not in demand.instances:
      continue
    for v in operands:
      if not _is_there(outer, homes, demand, v, actor) and nbytes(v.aval) > SMALL_BYTES:
        key = (actor, eqn.primitive.name, jc.source_of(eqn))
        sent.setdefault(key, {})[v] = nbytes(v.aval)
  return tuple(
      f'{name} at {line} mixes what lives on different actors: {sum(values.values())} bytes are'
      f' sent to actor {actor} for it, once per step'
      for (actor, name, line), values in sent.items()
  )


def _source(outer: Outer, homes: Homes, v: Any, actor: int) -> Instance | None:
  """The instance that `actor` gets `v` from; None if no equation makes it."""
  i = outer.producer.get(v) if isinstance(v, jc.Var) else None
  return None if i is None else (i, homes.equations.get(i, actor))


def _is_there(outer: Outer, homes: Homes, demand: _Demand, atom: Any, actor: int) -> bool:
  """Whether `actor` has the value without being sent it."""
  if outer.is_constant(atom):
    return True
  if atom in outer.carry_of:
    return outer.carry_of[atom] == actor
  source = _source(outer, homes, atom, actor)
  return actor in demand.holders[atom] if source is None else source[1] == actor


def _demand(outer: Outer, homes: Homes, needs: Sequence[Need]) -> _Demand:
  """Follows `needs` back to the step's arguments and the loop's results."""
  wanted: dict[Any, set[int]] = {}
  for v, a in needs:
    wanted.setdefault(v, set()).add(a)
  instances: set[Instance] = set()
  for i in reversed(range(len(outer.eqns))):
    actors = {a for v in outer.eqns[i].outvars for a in wanted.get(v, ())}
    if not actors:
      continue
    if i in homes.equations:
      actors = {homes.equations[i]}
    instances.update((i, a) for a in actors)
    for x in outer.eqns[i].invars:
      if isinstance(x, jc.Var):
        wanted.setdefault(x, set()).update(actors)
  holders = {}
  for v in outer.jaxpr.invars:
    actors = wanted.get(v, set())
    if v in homes.values and v not in outer.batch:
      # Tasks read their own copy; anybody else gets it sent from home.
      copies = set(outer.task_reads.get(v, ()))
      actors = copies | ({homes.values[v]} if actors - copies else set())
    holders[v] = frozenset(actors)
  return _Demand(frozenset(instances), holders)


def _place_results(
    outer: Outer, homes: Homes, loop_needs: Sequence[Need]
) -> tuple[_Demand, list[set[int]]]:
  """Decides on which actors each result is wanted; returns the whole step's demand as well."""
  outs, args = outer.jaxpr.outvars, outer.jaxpr.invars
  arguments = set(args)
  is_argument = [v in arguments for v in outs]
  wanted: list[set[int]] = [
      set() if i in outer.next_value_of or is_argument[i] else {_likely(outer, homes, v)}
      for i, v in enumerate(outs)
  ]
  # A result goes where the argument that it replaces is held; its being there can make more
  # actors hold arguments. Both only grow, so this ends.
  while True:
    needs = [*loop_needs, *((v, a) for v, w in zip(outs, wanted) for a in w)]
    demand = _demand(outer, homes, needs)
    before = [set(w) for w in wanted]
    for i, arg in outer.next_value_of.items():
      x = args[arg]
      wanted[i] |= demand.holders[x] or {homes.values.get(x, _likely(outer, homes, outs[i]))}
    for i, v in enumerate(outs):
      if is_argument[i] and not wanted[i]:
        wanted[i] = set(demand.holders[v]) or {homes.values.get(v, 0)}
    if wanted == before:
      return demand, wanted


def _likely(outer: Outer, homes: Homes, v: Any) -> int:
  """An actor that has, or is near, what `v` is made of."""
  while v not in homes.values:
    i = outer.producer.get(v)
    operands = [] if i is None else [x for x in outer.eqns[i].invars if isinstance(x, jc.Var)]
    known = [x for x in operands if x in homes.values]
    made = [x for x in operands if x in outer.producer]
    if not known and not made:
      return 0
    v = known[0] if known else made[0]
  return homes.values[v]


def _levels(outer: Outer, homes: Homes, demand: _Demand) -> dict[Instance, int]:
  """Per instance how many messages, one after the other, come before it."""
  level: dict[Instance, int] = {}

  def arrives(x: Any, actor: int) -> int:
    source = _source(outer, homes, x, actor)
    made = level[source] if source is not None else 0
    return made + int(not _is_there(outer, homes, demand, x, actor))

  for i, actor in sorted(demand.instances):
    level[i, actor] = max((arrives(x, actor) for x in outer.eqns[i].invars), default=0)
  return level


def _latest_levels(
    outer: Outer,
    homes: Homes,
    earliest: Mapping[Instance, int],
    in_prologue: frozenset[Instance],
    result_needs: Sequence[Need],
) -> dict[Instance, int]:
  """Moves instances of the epilogue to the last level at which nobody waits for them.

  That keeps chains of elementwise equations in one program, beside their reader, instead of
  handing every intermediate array from an early program to a late one.
  """
  last: dict[int, int] = {}
  for (_, a), value in earliest.items():
    last[a] = max(last.get(a, 0), value)
  due: dict[Instance, int] = {}

  def ask(source: Instance | None, at: int) -> None:
    if source is not None:
      due[source] = min(due.get(source, at), at)

  for v, a in result_needs:
    source = _source(outer, homes, v, a)
    ask(source, last[source[1]] if source else 0)  # a copy that is sent may leave at the end
  level = dict(earliest)
  for i, actor in sorted(earliest, reverse=True):
    if (i, actor) not in in_prologue:
      level[i, actor] = max(earliest[i, actor], due.get((i, actor), earliest[i, actor]))
    for x in outer.eqns[i].invars:
      source = _source(outer, homes, x, actor)
      ask(source, level[i, actor] - int(source is not None and source[1] != actor))
  return level


def _programs(
    outer: Outer,
    homes: Homes,
    level: Mapping[Instance, int],
    in_prologue: frozenset[Instance],
    needs: Sequence[Need],
) -> tuple[tuple[OuterBody, ...], tuple[OuterBody, ...]]:
  """Groups the instances to programs, by section, level and actor."""
  groups: dict[tuple[int, int, int], list[int]] = {}
  program_of: dict[Instance, tuple[int, int, int]] = {}
  for i, actor in sorted(level):
    section = 0 if (i, actor) in in_prologue else 1
    key = (section, level[i, actor], actor)
    groups.setdefault(key, []).append(i)
    program_of[i, actor] = key

  reads: dict[tuple[int, int, int], list[Any]] = {}
  exports: dict[tuple[int, int, int], set[Any]] = {key: set() for key in groups}
  readers = list(needs)
  for key, indices in groups.items():
    actor = key[2]
    inputs: dict[Any, None] = {}
    for i in indices:
      for x in outer.eqns[i].invars:
        source = _source(outer, homes, x, actor)
        if isinstance(x, jc.Var) and (source is None or program_of[source] != key):
          inputs[x] = None
    reads[key] = list(inputs)
    readers += [(x, actor) for x in inputs]
  for v, actor in readers:
    source = _source(outer, homes, v, actor)
    if source is not None:
      exports[program_of[source]].add(v)

  sections: tuple[list[OuterBody], list[OuterBody]] = ([], [])
  for key in sorted(groups):
    section, at, actor = key
    eqns = [outer.eqns[i] for i in groups[key]]
    outs = [v for e in eqns for v in e.outvars if v in exports[key]]
    consts = [v for v in reads[key] if outer.is_constant(v)]
    args = [v for v in reads[key] if not outer.is_constant(v)]
    sections[section].append(OuterBody(actor, at, jc.new_jaxpr(consts, args, outs, eqns)))
  return tuple(sections[0]), tuple(sections[1])
