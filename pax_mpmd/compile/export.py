"""Placed step -> `StepProgram`: every body lowered to StableHLO that another process compiles.

Bodies that are equal up to the names of their variables are lowered once and share a key, so
equal stages become one program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.mend import mend
from pax_mpmd.compile.partition import CutLoop
from pax_mpmd.compile.partition import TaskBody
from pax_mpmd.compile.placement import OuterBody
from pax_mpmd.compile.placement import PlacedStep
from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Carry
from pax_mpmd.compile.program import Executable
from pax_mpmd.compile.program import Leaf
from pax_mpmd.compile.program import Operand
from pax_mpmd.compile.program import OperandKind
from pax_mpmd.compile.program import OuterProgram
from pax_mpmd.compile.program import Piece
from pax_mpmd.compile.program import Sharding
from pax_mpmd.compile.program import StepProgram
from pax_mpmd.compile.program import TaskProgram
from pax_mpmd.compile.program import ValueId
from pax_mpmd.compile.shardings import Shardings


def aval_of(aval: Any, sharding: Sharding | None = None) -> Aval:
  """An Aval from JAX's; between programs, typed random keys are their uint32 data."""
  stored = jc.physical_aval(aval)
  if sharding is not None and len(sharding.spec) != len(stored.shape):
    sharding = None
  return Aval(tuple(map(int, stored.shape)), np.dtype(stored.dtype).name, sharding)


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], mesh: Any) -> list[Any]:
  """Evaluates `jaxpr` on arguments and to results as they are between programs."""
  if mesh is not None:
    jaxpr = mend(jaxpr, mesh)
  args = [jc.wrap_key(x, v.aval) for x, v in zip(args, jaxpr.invars)]
  return [jc.unwrap_key(x) for x in jc.eval_jaxpr(jaxpr, consts, *args)]


def _bytes_of(constant: Any) -> bytes:
  x = np.asarray(jc.unwrap_key(constant) if isinstance(constant, jax.Array) else constant)
  return f'{x.dtype}{x.shape}'.encode() + x.tobytes()


def lower(
    fn: Callable[..., Sequence[Any]],
    avals: Sequence[Aval],
    out_avals: Sequence[Aval],
    donated: Sequence[int],
    mesh: Any | None = None,
) -> Executable:
  """Lowers a function of flat arguments; its key is that of what came out.

  Args:
    fn: the function.
    avals: of its arguments.
    out_avals: of its results.
    donated: positions of arguments whose memory it takes over.
    mesh: an actor's mesh; None: it has one device.
  """

  def named(aval: Aval) -> Any:
    spec = aval.sharding.spec if aval.sharding else ()
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

  args = [jax.ShapeDtypeStruct(a.shape, a.numpy_dtype) for a in avals]
  ins = outs = None
  if mesh is not None:
    ins, outs = [[named(a) for a in group] for group in (avals, out_avals)]
  module = jc.lower_to_stablehlo(fn, args, tuple(donated), ins, outs)
  key = hashlib.sha256(module + repr(tuple(donated)).encode()).hexdigest()[:16]
  num_devices = mesh.size if mesh is not None else 1
  return Executable(key, tuple(avals), tuple(out_avals), tuple(donated), module, num_devices)


def fingerprint(jaxpr: Any, consts: Sequence[Any] = ()) -> str:
  """A text that is equal for jaxprs, and their constants, equal up to variables' names."""
  digest = hashlib.sha256()
  _fingerprint(jaxpr, digest)
  for x in consts:
    digest.update(_bytes_of(x))
  return digest.hexdigest()


class Exporter:
  """Lowers bodies and numbers values.

  Args:
    constants: values of the step's constants.
    mesh: an actor's mesh, None where it has one device.
    shardings: how values are spread over it.
  """

  def __init__(self, constants: dict[Any, Any], mesh: Any | None, shardings: Shardings):
    self.constants = constants
    self._mesh = mesh
    self._shardings = shardings
    self.executables: dict[str, Executable] = {}
    self.values: dict[ValueId, Aval] = {}
    self._ids: dict[Any, ValueId] = {}
    self._lowered: dict[str, str] = {}  # identity -> key

  def value(self, v: Any) -> ValueId:
    """The number of the step value that variable `v` names."""
    if v not in self._ids:
      self._ids[v] = len(self.values)
      self.values[self._ids[v]] = aval_of(v.aval, self._shardings.of(v))
    return self._ids[v]

  def new_value(self, aval: Aval) -> ValueId:
    key = len(self.values)
    self.values[key] = aval
    return key

  def executable(
      self,
      fn: Callable[..., Sequence[Any]],
      avals: Sequence[Aval],
      out_avals: Sequence[Aval],
      donated: Sequence[int],
      *identity: Any,
  ) -> str:
    """Lowers `fn` unless a program with the same `identity` has been; returns the program's key.

    `identity` tells bodies of this step apart (it may hold addresses of functions). The key is
    that of what came out, so it also holds among other steps and in other processes.
    """
    text = repr((identity, [str(a) for a in (*avals, *out_avals)], tuple(donated)))
    if text not in self._lowered:
      executable = lower(fn, avals, out_avals, donated, self._mesh)
      self._lowered[text] = executable.key
      self.executables[executable.key] = executable
    return self._lowered[text]

  def fingerprint(self, jaxpr: Any) -> str:
    """A text that is equal for jaxprs equal up to their variables' names."""
    return fingerprint(jaxpr, [self.constants[v] for v in jaxpr.constvars])

  # -- the microbatch loop ---------------------------------------------------------------------

  def task(
      self,
      cut: CutLoop,
      body: TaskBody,
      edge_ids: Sequence[ValueId],
      carry_ids: Sequence[ValueId],
  ) -> TaskProgram:
    """Lowers a task body together with the access to its rows and carries.

    `edge_ids` and `carry_ids` have the values of the loop's edges and of its carries' beginnings.
    """
    jaxpr, kept, consts = self._bind_constants(cut, body)
    carries = [op.id for op in body.outputs if op.kind is OperandKind.CARRY]
    rows = [op.kind is OperandKind.STEP and cut.is_batch[op.id] for op in kept]
    stacked = [c >= cut.num_summed for c in carries]
    with_index = any(rows) or any(stacked)
    num_args = len(kept)
    is_carry = [op.kind is OperandKind.CARRY for op in body.outputs]

    def run(*args):
      index = args[-1] if with_index else None
      carried = list(args[num_args : num_args + len(carries)])
      xs = [
          jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False) if row else x
          for x, row in zip(args, rows)
      ]
      outs = []
      for x, carry in zip(evaluate(jaxpr, consts, xs, self._mesh), is_carry):
        if not carry:
          outs.append(x)
          continue
        present = carried.pop(0)
        if stacked[len(carries) - len(carried) - 1]:
          outs.append(jax.lax.dynamic_update_index_in_dim(present, x, index, 0))
        else:
          outs.append(present + x)
      return outs

    inputs = [
        Operand(OperandKind.EDGE, edge_ids[op.id])
        if op.kind is OperandKind.EDGE
        else Operand(OperandKind.STEP, self.value(cut.operands[op.id]))
        for op in kept
    ]
    avals = [self.values[op.id] for op in inputs]
    inputs += [Operand(OperandKind.CARRY, c) for c in carries]
    carry_avals = [self.values[carry_ids[c]] for c in carries]
    avals += carry_avals
    if with_index:
      inputs.append(Operand(OperandKind.INDEX))
      avals.append(Aval((), 'int32'))
    outputs = [
        Operand(OperandKind.EDGE, edge_ids[op.id]) if op.kind is OperandKind.EDGE else op
        for op in body.outputs
    ]
    out_avals = [self.values[carry_ids[op.id] if c else op.id] for op, c in zip(outputs, is_carry)]
    key = self.executable(
        run,
        avals,
        out_avals,
        range(num_args, num_args + len(carries)),
        'task',
        self.fingerprint(jaxpr),
        rows,
        stacked,
        is_carry,
        cut.num_microbatches,
    )
    return TaskProgram(body.stage, body.phase, key, tuple(inputs), tuple(outputs))

  def _bind_constants(self, cut: CutLoop, body: TaskBody) -> tuple[Any, list[Operand], list[Any]]:
    """Turns operands that are constants of the step into constants of the body's jaxpr."""
    constvars, invars, kept = [], [], []
    for v, op in zip(body.jaxpr.invars, body.inputs):
      outer = cut.operands[op.id] if op.kind is OperandKind.STEP else None
      if outer in self.constants and not cut.is_batch[op.id]:
        self.constants.setdefault(v, self.constants[outer])
        constvars.append(v)
      else:
        invars.append(v)
        kept.append(op)
    jaxpr = jc.new_jaxpr(constvars, invars, body.jaxpr.outvars, body.jaxpr.eqns)
    return jaxpr, kept, [self.constants[v] for v in constvars]

  # -- prologue and epilogue -------------------------------------------------------------------

  def outer(self, body: OuterBody, name: str, donatable: Sequence[Any]) -> OuterProgram:
    """Lowers a program of the prologue or epilogue.

    It takes over arguments in `donatable`, the first ones first, as long as they fit a result.
    """
    jaxpr = body.jaxpr
    consts = [self.constants[v] for v in jaxpr.constvars]
    inputs = tuple(self.value(v) for v in jaxpr.invars)
    outputs = tuple(self.value(v) for v in jaxpr.outvars)
    avals = [self.values[i] for i in inputs]
    out_avals = [self.values[i] for i in outputs]
    spare = list(out_avals)
    donated = []
    position = {v: i for i, v in enumerate(jaxpr.invars)}
    for i in map(position.__getitem__, donatable):
      if avals[i] in spare:
        spare.remove(avals[i])
        donated.append(i)
    donated.sort()

    def run(*args):
      return evaluate(jaxpr, consts, args, self._mesh)

    key = self.executable(run, avals, out_avals, donated, 'outer', self.fingerprint(jaxpr))
    return OuterProgram(body.actor, name, key, inputs, outputs)


def _fingerprint(jaxpr: Any, digest: Any) -> None:
  numbers: dict[Any, int] = {}

  def name(atom: Any) -> str:
    if isinstance(atom, jc.Literal):
      return f'{np.asarray(atom.val)!r}:{atom.aval.str_short()}'
    if jc.is_drop(atom):
      return '_'
    return str(numbers.setdefault(atom, len(numbers)))

  for v in [*jaxpr.constvars, *jaxpr.invars]:
    digest.update(f'{name(v)}:{v.aval.str_short()};'.encode())
  for eqn in jaxpr.eqns:
    digest.update(f'{eqn.primitive.name}({",".join(map(name, eqn.invars))})'.encode())
    for key in sorted(eqn.params):
      digest.update(f'{key}='.encode())
      _fingerprint_param(eqn.params[key], digest)
    outs = ','.join(f'{name(v)}:{v.aval.str_short()}' for v in eqn.outvars)
    digest.update(f'->{outs};'.encode())
  digest.update(','.join(map(name, jaxpr.outvars)).encode())


def _fingerprint_param(value: Any, digest: Any) -> None:
  if isinstance(value, (tuple, list)):
    for v in value:
      _fingerprint_param(v, digest)
      digest.update(b',')
  elif isinstance(value, jc.ClosedJaxpr):
    _fingerprint(value.jaxpr, digest)
    for x in value.consts:
      digest.update(_bytes_of(x))
  elif isinstance(value, jc.Jaxpr):
    _fingerprint(value, digest)
  else:
    digest.update(repr(value).encode())


def export(
    jaxpr: Any,
    placed: PlacedStep,
    constants: dict[Any, Any],
    placement: Sequence[int],
    num_actors: int,
    inputs: Sequence[Leaf],
    outputs: Sequence[Leaf],
    donated: Sequence[bool],
    mesh: Any | None,
    shardings: Shardings,
) -> StepProgram:
  """Lowers all bodies of a placed step.

  Args:
    jaxpr: the step.
    placed: the same, placed.
    constants: values of jaxpr.constvars.
    placement: stage -> actor.
    num_actors: number of actors.
    inputs, outputs: the step's leaves; their pieces' values are positions in jaxpr's arguments
      and results, and their actors are filled in here.
    donated: per argument of jaxpr whether the caller gives it up.
    mesh: a mesh like that of each actor; None where it has one device.
    shardings: how values are spread over it.
  """
  cut = placed.cut
  exporter = Exporter(dict(constants), mesh, shardings)
  edge_ids = [
      exporter.new_value(aval_of(a, shardings.of_edge(i))) for i, a in enumerate(cut.edges)
  ]
  initial = [exporter.value(v) for v in placed.carry_initial]
  tasks = {key: exporter.task(cut, body, edge_ids, initial) for key, body in cut.tasks.items()}
  carries = tuple(
      Carry(c, actor, first, exporter.value(out))
      for c, (actor, first, out) in enumerate(zip(placed.carry_actor, initial, cut.outs))
  )
  prologue = tuple(exporter.outer(b, f'prologue.{b.level}', ()) for b in placed.prologue)
  donatable = _donatable(jaxpr, placed, donated)
  epilogue = tuple(
      exporter.outer(b, f'epilogue.{b.level}', donatable[i])
      for i, b in enumerate(placed.epilogue)
  )

  def finish(leaf: Leaf, variables, actors) -> Leaf:
    pieces = tuple(
        Piece(exporter.value(variables[p.value]), p.start, actors[p.value])
        for p in leaf.pieces
        if actors[p.value]
    )
    return dataclasses.replace(leaf, pieces=pieces)

  return StepProgram(
      num_stages=len(placement),
      num_actors=num_actors,
      num_microbatches=cut.num_microbatches,
      placement=tuple(placement),
      values=exporter.values,
      executables=exporter.executables,
      inputs=tuple(finish(x, jaxpr.invars, placed.input_actors) for x in inputs),
      outputs=tuple(finish(x, jaxpr.outvars, placed.output_actors) for x in outputs),
      prologue=prologue,
      tasks=tasks,
      carries=carries,
      epilogue=epilogue,
  )


def _donatable(jaxpr: Any, placed: PlacedStep, donated: Sequence[bool]) -> list[list[Any]]:
  """Per epilogue program the values it is the last to read on its actor, and may overwrite.

  Arguments of the step come first: nothing else ends their lives within the step.
  """
  results = {v for v in jaxpr.outvars if isinstance(v, jc.Var)}
  # Who has a copy that nobody outside the epilogue needs any more.
  holders: dict[Any, set[int]] = {}
  for v, actors, is_donated in zip(jaxpr.invars, placed.input_actors, donated):
    if is_donated:
      holders[v] = set(actors)
  for v, actor in zip(placed.cut.outs, placed.carry_actor):
    if not jc.is_drop(v):
      holders[v] = {actor}
  for body in placed.epilogue:
    for v in body.jaxpr.outvars:
      holders.setdefault(v, set()).add(body.actor)
  sent = {
      v
      for body in (*placed.prologue, *placed.epilogue)
      for v in body.jaxpr.invars
      if v in holders and body.actor not in holders[v]
  }
  out: list[list[Any]] = [[] for _ in placed.epilogue]
  given_up = {v for v, d in zip(jaxpr.invars, donated) if d}
  taken: set[tuple[Any, int]] = set()
  for i, body in reversed(list(enumerate(placed.epilogue))):
    for v in sorted(body.jaxpr.invars, key=lambda v: v not in given_up):
      # A value that is sent may still be read by a message.
      if v not in holders or v in results or v in sent or (v, body.actor) in taken:
        continue
      taken.add((v, body.actor))
      out[i].append(v)
  return out
