"""Small hand-made plans out of real jitted functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import hashlib
import io

import jax
import numpy as np

from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Executable
from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.plan.instructions import Free
from pax_mpmd.plan.instructions import Instruction
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.plan.instructions import Recv
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send


def executable(fn: Callable, avals: Sequence[Aval], donated: tuple[int, ...] = ()) -> Executable:
  """Lowers a function of arrays to what a plan ships."""
  args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
  jitted = jax.jit(fn, keep_unused=True, donate_argnums=donated)
  lowered = jitted.lower(*args)
  buffer = io.BytesIO()
  lowered.compiler_ir('stablehlo').operation.write_bytecode(buffer)
  module = buffer.getvalue()
  leaves = jax.tree_util.tree_leaves(jax.eval_shape(fn, *args))
  outputs = tuple(Aval(leaf.shape, leaf.dtype.name) for leaf in leaves)
  key = hashlib.sha256(module).hexdigest()
  return Executable(key, tuple(avals), outputs, donated, module)


class ActorBuilder:
  """Writes one ActorPlan by named values."""

  def __init__(self, actor: int, executables: dict[str, Executable]):
    self._actor = actor
    self._executables = executables
    self._slots: list[Aval] = []
    self._names: dict[str, int] = {}
    self._inputs: list[int] = []
    self._constants: list[tuple[int, np.ndarray]] = []
    self._instructions: list[Instruction] = []

  def _new(self, name: str, aval: Aval) -> int:
    self._slots.append(aval)
    self._names[name] = len(self._slots) - 1
    return self._names[name]

  def input(self, name: str, aval: Aval) -> ActorBuilder:
    self._inputs.append(self._new(name, aval))
    return self

  def constant(self, name: str, value: np.ndarray) -> ActorBuilder:
    slot = self._new(name, Aval(value.shape, value.dtype.name))
    self._constants.append((slot, value))
    return self

  def run(self, program: Executable, inputs: str, outputs: str, label: str, stage=None):
    read = tuple(self._names[name] for name in inputs.split())
    made = tuple(self._new(n, a) for n, a in zip(outputs.split(), program.outputs))
    self._executables[program.key] = program
    self._instructions.append(Run(program.key, read, made, label, stage))
    return self

  def send(self, dst: int, names: str, label: str) -> ActorBuilder:
    self._instructions.append(Send(dst, tuple(self._names[n] for n in names.split()), label))
    return self

  def recv(self, src: int, label: str, **avals: Aval) -> ActorBuilder:
    slots = tuple(self._new(name, aval) for name, aval in avals.items())
    self._instructions.append(Recv(src, slots, label))
    return self

  def free(self, names: str) -> ActorBuilder:
    self._instructions.append(Free(tuple(self._names[n] for n in names.split())))
    return self

  def build(self, outputs: str) -> ActorPlan:
    out = tuple(self._names[name] for name in outputs.split())
    return ActorPlan(
        actor=self._actor,
        slots=tuple(self._slots),
        inputs=tuple(self._inputs),
        input_values=tuple((i, 0) for i in range(len(self._inputs))),
        constants=tuple(self._constants),
        instructions=tuple(self._instructions),
        outputs=out,
        output_values=tuple((i, 0) for i in range(len(out))),
    )


def build(num_actors: int, write: Callable[..., Sequence[str]]) -> Plan:
  """`write(*builders)` fills the builders and returns each actor's output names."""
  executables: dict[str, Executable] = {}
  builders = [ActorBuilder(actor, executables) for actor in range(num_actors)]
  outputs = write(*builders)
  return Plan(tuple(b.build(names) for b, names in zip(builders, outputs)), executables)


F32 = Aval((4, 3), 'float32')


def crossing_plan() -> Plan:
  """Two actors that both send before they receive; each adds what it gets to its own input."""
  twice = executable(lambda x: x * 2, [F32])
  add = executable(lambda x, y: x + y, [F32, F32])

  def write(a, b):
    for me, other in ((a, 1), (b, 0)):
      me.input('x', F32).run(twice, 'x', 'y', '0F0', 0).send(other, 'y', '0F0')
      me.recv(other, '0F0', z=F32).run(add, 'x z', 'w', '0B0', 0).free('x y z')
    return ['w', 'w']

  return build(2, write)


def opposite_orders_plan() -> Plan:
  """Three actors; 0 and 2 exchange two messages each, posted early and used in opposite order.

  Every Recv stands where its peer's Send stands, so it also runs where channels hold nothing.
  """
  square = executable(lambda x: x * x, [F32])
  mix = executable(lambda x, y: x - 3 * y, [F32, F32])
  accumulate = executable(lambda total, x: total + x, [F32, F32], donated=(0,))

  def write(a, b, c):
    a.input('x', F32).run(square, 'x', 'x2', '0F0', 0)
    a.send(2, 'x', '0F0').send(2, 'x2', '0F1')
    a.recv(2, '2F0', p=F32).recv(2, '2F1', q=F32)
    a.run(mix, 'q p', 'r', '0B0', 0).send(1, 'r', '0B0')
    a.run(accumulate, 'r x2', 's', '0B1', 0).free('x x2 p q')
    c.input('x', F32).run(square, 'x', 'x2', '2F0', 2)
    c.recv(0, '0F0', p=F32).recv(0, '0F1', q=F32)
    c.send(0, 'x2', '2F0').send(0, 'x', '2F1')
    c.run(mix, 'q p', 'r', '2B0', 2).send(1, 'r', '2B0').free('x x2 p q')
    b.input('x', F32).recv(0, '0B0', p=F32).recv(2, '2B0', q=F32)
    b.run(mix, 'q p', 's', '1B0', 1).run(accumulate, 's x', 't', '1B1', 1).free('p q x')
    return ['s', 't', 'r']

  return build(3, write)


def opposite_orders_expected(x0, x1, x2) -> list[list[np.ndarray]]:
  """What `opposite_orders_plan` gives, in numpy."""
  s0, s2 = x0 * x0, x2 * x2
  r0 = x2 - 3 * s2
  r2 = s0 - 3 * x0
  return [[r0 + s0], [(r2 - 3 * r0) + x1], [r2]]


def training_plan() -> Plan:
  """Actor 0 makes activations, actor 1 takes a step on its weight, which it donates."""
  forward = executable(lambda x, n: x * 2 + n.astype('float32'), [F32, Aval((), 'int32')])
  update = executable(lambda w, h: (w + 0.1 * h, (w * h).sum()), [F32, F32], donated=(0,))

  def write(a, b):
    a.constant('n', np.int32(3)).input('x', F32)
    a.run(forward, 'x n', 'h', '0F0', 0).send(1, 'h', '0F0').free('h x')
    b.input('w', F32).recv(0, '0F0', h=F32)
    b.run(update, 'w h', 'w2 loss', '1F0', 1).free('h')
    return ['', 'w2 loss']

  return build(2, write)


def waiting_plan() -> Plan:
  """Actor 0 sends x to actor 1, which counts up to n (for ever if n is inf) and sends back."""
  scalar = Aval((), 'float32')

  def count(x, n):
    return jax.lax.while_loop(lambda c: c < n, lambda c: c + 1, x)

  program = executable(count, [scalar, scalar])
  copy = executable(lambda x: x * 1, [scalar])

  def write(a, b):
    a.input('x', scalar).run(copy, 'x', 'y', '0F0', 0).send(1, 'y', '0F0')
    a.recv(1, '1F0', z=scalar).run(copy, 'z', 'w', '0B0', 0)
    b.input('n', scalar).recv(0, '0F0', y=scalar)
    b.run(program, 'y n', 'z', '1F0', 1).send(0, 'z', '1F0')
    return ['w', '']

  return build(2, write)
