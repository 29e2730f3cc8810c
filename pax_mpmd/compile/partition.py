"""Loop body -> the bodies of its tasks.

In: a step whose stacked arrays are pieces and whose shared sums are delayed (unstack.py,
shared.py). Out: a `CutLoop`: one body per (stage, phase), the edges between them, and the
loop-invariant equations, moved in front of the loop.
Holds: running the hoisted equations once and then, for every microbatch, F_0 .. F_S-1 B_S-1 .. B_0,
is the loop. Where a stage is split, I stands for its B, and its W may run at any time after that.

`assign.py` says where each equation goes. Loop-invariant ones run once per step, in front of the
loop; but mere layout (reshapes, broadcasts) is repeated by the tasks that use it, which costs
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
import dataclasses
from typing import Any

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.assign import assign
from pax_mpmd.compile.assign import Assignment
from pax_mpmd.compile.assign import nbytes
from pax_mpmd.compile.assign import SMALL_BYTES
from pax_mpmd.compile.classes import invariant_vars
from pax_mpmd.compile.primitives import CHEAP_LAYOUT
from pax_mpmd.compile.program import Operand
from pax_mpmd.compile.program import OperandKind
from pax_mpmd.compile.segments import find_segments
from pax_mpmd.compile.trace import loop_of


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

  def in_order(self) -> list[TaskBody]:
    """The tasks of a microbatch in plain order; the weights' gradients (W) last of all."""
    rank = {'F': 0, 'B': 1, 'I': 1, 'W': 2}
    keys = sorted(self.tasks, key=lambda k: (rank[k[1]], k[0] if k[1] == 'F' else -k[0]))
    return [self.tasks[key] for key in keys]

  def owner(self, out: int) -> tuple[int, str]:
    """The task that adds to result `out`."""
    carry = Operand(OperandKind.CARRY, out)
    return next(key for key, task in self.tasks.items() if carry in task.outputs)


def partition(jaxpr: Any, num_stages: int, split_stages: Collection[int] = ()) -> CutLoop:
  """Cuts the loop of the step `jaxpr` into tasks. See the module's docstring.

  Args:
    jaxpr: the step.
    num_stages: number of stages.
    split_stages: the stages that get I and W instead of B.
  """
  loop = loop_of(jaxpr)
  body = loop.params['jaxpr'].jaxpr
  num_consts = loop.params['num_consts']
  invariant = invariant_vars(body, num_consts)
  assignment = assign(
      body,
      find_segments(body, num_stages),
      invariant,
      num_consts,
      loop.params['num_summed'],
      split_stages,
  )
  return _Cutter(loop, body, invariant, assignment).cut()


class _Cutter:
  """Working state of `partition`."""

  def __init__(self, loop: Any, body: Any, invariant: set[Any], assignment: Assignment):
    self.loop = loop
    self.body = body
    self.invariant = invariant
    self.assignment = assignment
    self.eqns = assignment.eqns
    self.slots = assignment.slots
    self.resolve = assignment.resolve
    self.num_summed = loop.params['num_summed']
    self.producer = {v: i for i, e in enumerate(self.eqns) for v in e.outvars}
    self.outer_of = dict(zip(body.invars, loop.invars))
    self.operands: list[Any] = []
    self.is_batch: list[bool] = []
    self.operand_index: dict[Any, int] = {}
    self.hoisted: list[Any] = []
    self.hoisted_vars: set[Any] = set()
    self.notes: list[str] = []

  def cut(self) -> CutLoop:
    owner = self._owners()
    edge_ids = self._edges(owner)
    eqns: dict[int, list[int]] = {}
    for i, slot in enumerate(self.slots):
      if slot is not None:
        eqns.setdefault(slot, []).append(i)
    results: dict[int, list[tuple[Any, Operand]]] = {}
    for v, edge in edge_ids.items():
      made = self.slots[self.producer[v]]
      results.setdefault(made, []).append((v, Operand(OperandKind.EDGE, edge)))
    for out, v in enumerate(self.body.outvars):
      results.setdefault(owner[out], []).append((v, Operand(OperandKind.CARRY, out)))
    tasks: dict[tuple[int, str], TaskBody] = {}
    for slot in sorted(results):
      task = self._task(slot, eqns.get(slot, ()), results[slot], edge_ids)
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
    """The slot of the task that adds to each of the loop's results."""
    owner = {}
    for out, v in enumerate(self.body.outvars):
      v = self.resolve(v)
      i = None if isinstance(v, jc.Literal) else self.producer.get(v)
      slot = self.slots[i] if i is not None else None
      owner[out] = 2 * (self.assignment.segments.num_stages - 1) if slot is None else slot
    return owner

  def _edges(self, owner: dict[int, int]) -> dict[Any, int]:
    """Numbers the variables that another task reads, in order of production."""
    readers: dict[Any, set[int]] = {}
    at_marks: set[Any] = set()
    for slot, eqn in zip(self.slots, self.eqns):
      for x in map(self.resolve, eqn.invars):
        if isinstance(x, jc.Literal):
          continue
        if slot is not None:
          readers.setdefault(x, set()).add(slot)
        elif eqn.primitive.name == 'pipeline_yield':
          at_marks.add(x)
    for out, v in enumerate(self.body.outvars):
      v = self.resolve(v)
      if not isinstance(v, jc.Literal):
        readers.setdefault(v, set()).add(owner[out])
    ids: dict[Any, int] = {}
    for slot, eqn in zip(self.slots, self.eqns):
      if slot is None:
        continue
      for v in eqn.outvars:
        others = readers.get(v, set()) - {slot}
        if others:
          if v not in at_marks:
            self._note_stray(v, slot, others)
          assert min(others) > slot, (eqn, slot, others)
          ids[v] = len(ids)
    return ids

  def _note_stray(self, v: Any, made: int, readers: set[int]) -> None:
    """Notes a large value that one stage's backward hands to another's, other than at a mark."""
    own = self.assignment.stage(made)
    stages = {self.assignment.stage(r) for r in readers} - {own}
    if self.assignment.phase(made) != 'F' and stages and nbytes(v.aval) > SMALL_BYTES:
      self.notes.append(
          f'{v.aval.str_short()} of the backward pass of stage {own} is sent to stages'
          f' {sorted(stages)} for every microbatch: what is done with it inside the loop needs'
          f' values of those stages (made at {jc.source_of(self.eqns[self.producer[v]])})'
      )

  def _operand(self, outer: Any, is_batch: bool) -> Operand:
    index = self.operand_index.get((outer, is_batch))
    if index is None:
      index = len(self.operands)
      self.operand_index[outer, is_batch] = index
      self.operands.append(outer)
      self.is_batch.append(is_batch)
    return Operand(OperandKind.STEP, index)

  def _task(
      self,
      slot: int,
      members: Sequence[int],
      results: Sequence[tuple[Any, Operand]],
      edge_ids: dict[Any, int],
  ) -> TaskBody:
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
      elif self.slots[i] not in (None, slot):
        inputs[atom] = Operand(OperandKind.EDGE, edge_ids[atom])
      else:
        assert self.slots[i] is None, atom
        add(i)
      return atom

    def add(i: int) -> None:
      eqn = self.eqns[i]
      invars = [get(x) for x in eqn.invars]
      eqns.append(eqn.replace(invars=invars))
      made.update(eqn.outvars)

    for i in members:
      add(i)
    outvars = [get(v) for v, _ in results]
    jaxpr = jc.new_jaxpr((), list(inputs), outvars, eqns)
    return TaskBody(
        stage=self.assignment.stage(slot),
        phase=self.assignment.phase(slot),
        jaxpr=jaxpr,
        inputs=tuple(inputs.values()),
        outputs=tuple(op for _, op in results),
    )

  def _repeats(self, i: int) -> bool:
    """Whether loop-invariant equation i is repeated by its users instead of hoisted."""
    eqn = self.eqns[i]
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
      eqn = self.eqns[self.producer[atom]]
      invars = [self._hoist(x) for x in eqn.invars]
      self.hoisted.append(eqn.replace(invars=invars))
      self.hoisted_vars.update(eqn.outvars)
    return atom
