"""Loop body -> the bodies of its tasks.

In: a step whose stacked arrays are pieces and whose shared sums are delayed (unstack.py,
shared.py). Out: a `CutLoop`: one body per (stage, phase), the edges between them, and the
loop-invariant equations, moved in front of the loop.
Holds: running the hoisted equations once and then, for every microbatch, F_0 .. F_S-1 B_S-1 .. B_0,
is the loop.

Where an equation goes:
  * loop-invariant (it depends on no microbatch): in front of the loop, once per step. Mere layout
    (reshapes, broadcasts) is repeated by the tasks that use it, which costs nothing;
  * derived from the microbatch's inputs alone, and light: repeated by each task that uses it, so
    that masks and positions are never sent nor kept;
  * what the next stages or the stacked results need: the stage's forward task, as early as its
    operands allow;
  * what only the backward pass needs: the stage's backward task;
  * the rest: the first task in which all operands exist.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.classes import invariant_vars
from pax_mpmd.compile.primitives import CHEAP_LAYOUT
from pax_mpmd.compile.primitives import HEAVY
from pax_mpmd.compile.program import Operand
from pax_mpmd.compile.program import OperandKind
from pax_mpmd.compile.segments import find_segments
from pax_mpmd.compile.segments import FREE
from pax_mpmd.compile.segments import Segments
from pax_mpmd.compile.trace import loop_of

# A constant up to this size may be an operand of a repeated equation, whatever the result's size.
_SMALL_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class TaskBody:
  """The computation of one (stage, phase) on one microbatch.

  `jaxpr`'s arguments go with `inputs`: a batch operand's argument is the microbatch's own slice.
  Its results go with `outputs`: a CARRY result is what the microbatch adds (or its row).
  Ids: STEP indexes CutLoop.operands, EDGE CutLoop.edges, CARRY the loop's results.
  """

  stage: int
  phase: str
  jaxpr: Any
  inputs: tuple[Operand, ...]
  outputs: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True)
class CutLoop:
  """The loop, cut at its marks.

  Attributes:
    num_microbatches: M.
    num_summed: how many of the results are sums; the others are stacked.
    operands: the step's atoms that the tasks read.
    is_batch: per operand whether a task reads its microbatch's row only.
    edges: aval per edge.
    tasks: the bodies by (stage, phase); empty ones are left out.
    hoisted: equations to run once before the loop.
    outs: the loop's results: variables of the step.
    out_avals: avals of the results.
    notes: a line for every large array that travels beside the gradients at the marks.
  """

  num_microbatches: int
  num_summed: int
  operands: tuple[Any, ...]
  is_batch: tuple[bool, ...]
  edges: tuple[Any, ...]
  tasks: dict[tuple[int, str], TaskBody]
  hoisted: tuple[Any, ...]
  outs: tuple[Any, ...]
  out_avals: tuple[Any, ...]
  notes: tuple[str, ...]

  def owner(self, out: int) -> tuple[int, str]:
    """The task that adds to result `out`."""
    carry = Operand(OperandKind.CARRY, out)
    return next(key for key, task in self.tasks.items() if carry in task.outputs)


def _nbytes(aval: Any) -> int:
  stored = jc.physical_aval(aval)
  return math.prod(stored.shape) * np.dtype(stored.dtype).itemsize


def partition(jaxpr: Any, num_stages: int) -> CutLoop:
  """Cuts the loop of the step `jaxpr` into tasks. See the module's docstring."""
  loop = loop_of(jaxpr)
  body = loop.params['jaxpr'].jaxpr
  segments = find_segments(body, num_stages)
  return _Cutter(loop, body, segments).cut()


class _Cutter:
  """Working state of `partition`."""

  def __init__(self, loop: Any, body: Any, segments: Segments):
    self.loop = loop
    self.body = body
    self.segments = segments
    self.num_consts = loop.params['num_consts']
    self.num_summed = loop.params['num_summed']
    self.producer = {v: i for i, e in enumerate(body.eqns) for v in e.outvars}
    self.invariant = invariant_vars(body, self.num_consts)
    self.outer_of = dict(zip(body.invars, loop.invars))
    self.alias = self._aliases()
    self.light = self._light()
    self.at = self._assign()
    self.operands: list[Any] = []
    self.is_batch: list[bool] = []
    self.operand_index: dict[Any, int] = {}
    self.hoisted: list[Any] = []
    self.hoisted_vars: set[Any] = set()
    self.notes: list[str] = []

  # -- what each variable is -------------------------------------------------------------------

  def _aliases(self) -> dict[Any, Any]:
    """Marks are identities: each of their results stands for its operand."""
    alias: dict[Any, Any] = {}
    for i in sorted(self.segments.marks):
      eqn = self.body.eqns[i]
      for v, x in zip(eqn.outvars, eqn.invars):
        alias[v] = x if isinstance(x, jc.Literal) else alias.get(x, x)
    return alias

  def resolve(self, atom: Any) -> Any:
    return atom if isinstance(atom, jc.Literal) else self.alias.get(atom, atom)

  def _light(self) -> set[Any]:
    """Variables to be recomputed, from the microbatch's inputs, wherever they are used."""
    light = set(self.body.invars[self.num_consts :])
    for i, eqn in enumerate(self.body.eqns):
      if eqn.outvars[0] in self.invariant or eqn.effects or i in self.segments.marks:
        continue
      if eqn.primitive.name in HEAVY:
        continue
      budget = max(sum(_nbytes(v.aval) for v in eqn.outvars), _SMALL_BYTES)
      fits = True
      for x in map(self.resolve, eqn.invars):
        if not isinstance(x, jc.Literal) and x not in light:
          fits &= x in self.invariant and _nbytes(x.aval) <= budget
      if fits and all(self.segments.of(x) < self.segments.num_stages for x in eqn.invars):
        light.update(eqn.outvars)
    return light

  def is_main(self, i: int) -> bool:
    """Whether equation i belongs to exactly one task."""
    v = self.body.eqns[i].outvars[0]
    return i not in self.segments.marks and v not in self.invariant and v not in self.light

  # -- which segment each equation runs in -----------------------------------------------------

  def _assign(self) -> dict[int, int]:
    """The segment of every main equation. See the module's docstring for the rules."""
    seg = self.segments
    last_forward = seg.num_stages - 1
    needed = self._needed_forward()
    first_use: dict[Any, int] = {}

    def use(atom: Any, segment: int) -> None:
      atom = self.resolve(atom)
      if not isinstance(atom, jc.Literal):
        first_use[atom] = min(first_use.get(atom, segment), segment)

    at: dict[int, int] = {}
    for v in self.body.outvars:
      if not seg.has_backward:
        use(v, last_forward)
      else:
        use(v, 2 * seg.num_stages - 1)
    for i in reversed(range(len(self.body.eqns))):
      eqn = self.body.eqns[i]
      if i in seg.marks:
        direction, boundary = seg.marks[i]
        for x in eqn.invars:
          # The value must exist when the stage before the mark ends.
          end = 2 * seg.num_stages - 2 - boundary if direction == 'backward' else boundary
          use(x, end)
        continue
      if not self.is_main(i):
        continue
      uses = [first_use[v] for v in eqn.outvars if v in first_use]
      first = min(uses, default=2 * seg.num_stages - 1)
      earliest = max((seg.of(x) for x in eqn.invars), default=FREE)
      if not seg.has_backward:
        where = earliest if earliest != FREE else min(first, last_forward)
      elif any(v in needed for v in eqn.outvars):
        where = earliest if earliest != FREE else min(first, last_forward)
      elif earliest == FREE:
        where = first
      elif earliest < seg.num_stages:
        backward = seg.backward(earliest)
        where = backward if first >= backward else earliest
      else:
        where = earliest
      at[i] = where
      for x in eqn.invars:
        use(x, where)
    return at

  def _needed_forward(self) -> set[Any]:
    """Variables that the forward marks and the stacked results depend on."""
    seg = self.segments
    needed: set[Any] = set()

    def need(atom: Any) -> None:
      atom = self.resolve(atom)
      if not isinstance(atom, jc.Literal) and seg.of(atom) < seg.num_stages:
        needed.add(atom)

    for v in self.body.outvars[self.num_summed :]:
      need(v)
    for i in reversed(range(len(self.body.eqns))):
      eqn = self.body.eqns[i]
      if i in seg.marks:
        if seg.marks[i][0] != 'backward':
          for x in eqn.invars:
            need(x)
      elif any(v in needed for v in eqn.outvars):
        for x in eqn.invars:
          need(x)
    return needed

  # -- cutting ---------------------------------------------------------------------------------

  def cut(self) -> CutLoop:
    seg = self.segments
    owner = self._owners()
    edge_ids = self._edges(owner)
    tasks: dict[tuple[int, str], TaskBody] = {}
    for segment in range(2 * seg.num_stages):
      task = self._task(segment, owner, edge_ids)
      if task is not None:
        tasks[task.stage, task.phase] = task
    return CutLoop(
        num_microbatches=self.loop.params['num_microbatches'],
        num_summed=self.num_summed,
        operands=tuple(self.operands),
        is_batch=tuple(self.is_batch),
        edges=tuple(jc.strip_weak_type(v.aval) for v in edge_ids),
        tasks=tasks,
        hoisted=tuple(self.hoisted),
        outs=tuple(self.loop.outvars),
        out_avals=tuple(jc.strip_weak_type(v.aval) for v in self.loop.outvars),
        notes=tuple(self.notes),
    )

  def _owners(self) -> dict[int, int]:
    """The segment that adds to each of the loop's results."""
    seg = self.segments
    owner = {}
    for out, v in enumerate(self.body.outvars):
      v = self.resolve(v)
      i = None if isinstance(v, jc.Literal) else self.producer.get(v)
      owner[out] = self.at[i] if i is not None and self.is_main(i) else seg.num_stages - 1
    return owner

  def _edges(self, owner: dict[int, int]) -> dict[Any, int]:
    """Numbers the main variables that another segment reads, in order of production."""
    readers: dict[Any, set[int]] = {}
    for i, eqn in enumerate(self.body.eqns):
      if i in self.at:
        for x in map(self.resolve, eqn.invars):
          if not isinstance(x, jc.Literal):
            readers.setdefault(x, set()).add(self.at[i])
    for out, v in enumerate(self.body.outvars):
      v = self.resolve(v)
      if not isinstance(v, jc.Literal):
        readers.setdefault(v, set()).add(owner[out])
    at_marks = {
        x
        for i in self.segments.marks
        for x in map(self.resolve, self.body.eqns[i].invars)
        if not isinstance(x, jc.Literal)
    }
    ids: dict[Any, int] = {}
    for i, eqn in enumerate(self.body.eqns):
      if i not in self.at:
        continue
      for v in eqn.outvars:
        others = readers.get(v, set()) - {self.at[i]}
        if others:
          if v not in at_marks:
            self._note_stray(v, self.at[i], others)
          assert min(others) > self.at[i], (eqn, self.at[i], others)
          ids[v] = len(ids)
    return ids

  def _note_stray(self, v: Any, made: int, readers: set[int]) -> None:
    """Notes a large value that one stage's backward hands to another's, other than at a mark."""
    seg = self.segments
    stages = {seg.stage(r) for r in readers} - {seg.stage(made)}
    if seg.phase(made) == 'B' and stages and _nbytes(v.aval) > _SMALL_BYTES:
      self.notes.append(
          f'{v.aval.str_short()} of the backward pass of stage {seg.stage(made)} is sent to stages'
          f' {sorted(stages)} for every microbatch: what is done with it inside the loop needs'
          f' values of those stages (made at {jc.source_of(self.body.eqns[self.producer[v]])})'
      )

  def _operand(self, outer: Any, is_batch: bool) -> Operand:
    index = self.operand_index.get((outer, is_batch))
    if index is None:
      index = len(self.operands)
      self.operand_index[outer, is_batch] = index
      self.operands.append(outer)
      self.is_batch.append(is_batch)
    return Operand(OperandKind.STEP, index)

  def _task(self, segment: int, owner: dict[int, int], edge_ids: dict[Any, int]) -> TaskBody | None:
    eqns: list[Any] = []
    made: set[Any] = set()
    inputs: dict[Any, Operand] = {}

    def get(atom: Any) -> Any:
      """`atom` as an atom of the task, with what makes it brought in."""
      atom = self.resolve(atom)
      if isinstance(atom, jc.Literal) or atom in made or atom in inputs:
        return atom
      i = self.producer.get(atom)
      if i is None:
        outer = self.outer_of[atom]
        if isinstance(outer, jc.Literal):
          return outer
        inputs[atom] = self._operand(outer, atom not in self.invariant)
      elif atom in self.invariant and not self._repeats(i):
        inputs[atom] = self._operand(self._hoist(atom), False)
      elif self.is_main(i) and self.at[i] != segment:
        inputs[atom] = Operand(OperandKind.EDGE, edge_ids[atom])
      else:
        assert not self.is_main(i), atom
        add(i)
      return atom

    def add(i: int) -> None:
      eqn = self.body.eqns[i]
      invars = [get(x) for x in eqn.invars]
      eqns.append(eqn.replace(invars=invars))
      made.update(eqn.outvars)

    for i in range(len(self.body.eqns)):
      if self.at.get(i) == segment:
        add(i)
    outvars: list[Any] = []
    outputs: list[Operand] = []
    for v, edge in edge_ids.items():
      if self.at[self.producer[v]] == segment:
        outvars.append(v)
        outputs.append(Operand(OperandKind.EDGE, edge))
    for out, v in enumerate(self.body.outvars):
      if owner[out] == segment:
        outvars.append(get(v))
        outputs.append(Operand(OperandKind.CARRY, out))
    if not outputs:
      return None
    jaxpr = jc.new_jaxpr((), list(inputs), outvars, eqns)
    return TaskBody(
        stage=self.segments.stage(segment),
        phase=self.segments.phase(segment),
        jaxpr=jaxpr,
        inputs=tuple(inputs.values()),
        outputs=tuple(outputs),
    )

  def _repeats(self, i: int) -> bool:
    """Whether loop-invariant equation i is repeated by its users instead of hoisted."""
    eqn = self.body.eqns[i]
    if eqn.primitive.name in CHEAP_LAYOUT:
      return True
    return all(isinstance(x, jc.Literal) for x in eqn.invars)

  def _hoist(self, atom: Any) -> Any:
    """Moves what makes loop-invariant `atom` in front of the loop; returns the step's atom."""
    if isinstance(atom, jc.Literal):
      return atom
    if atom in self.outer_of:
      return self.outer_of[atom]
    if atom not in self.hoisted_vars:
      eqn = self.body.eqns[self.producer[atom]]
      invars = [self._hoist(x) for x in eqn.invars]
      self.hoisted.append(eqn.replace(invars=invars))
      self.hoisted_vars.update(eqn.outvars)
    return atom
