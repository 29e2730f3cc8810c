"""A small step written by hand, with everything that the planner has to cope with.

Values are whole numbers modulo a prime, and every program is a Python function on them, so that a
plan can be run without JAX and its results compared exactly. Gradient sums are the only sums, so
that their order doesn't matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses

from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Carry
from pax_mpmd.compile.program import Executable
from pax_mpmd.compile.program import Leaf
from pax_mpmd.compile.program import Operand
from pax_mpmd.compile.program import OperandKind
from pax_mpmd.compile.program import OuterProgram
from pax_mpmd.compile.program import Piece
from pax_mpmd.compile.program import StepProgram
from pax_mpmd.compile.program import TaskProgram

PRIME = 2**61 - 1
Function = Callable[..., tuple[int, ...]]


def mix(*values: int) -> int:
  """A number that depends on every one of the values and on their order."""
  result = 17
  for value in values:
    result = (result * 1000003 + value * value + 5) % PRIME
  return result


@dataclasses.dataclass(frozen=True)
class Synthetic:
  """A step, the function of each of its executables and values for its inputs."""

  step: StepProgram
  functions: Mapping[str, Function]
  inputs: Mapping[tuple[int, int], int]  # (argument, piece) -> value


class _Builder:
  """Collects values, executables and programs."""

  def __init__(self):
    self.values: dict[int, Aval] = {}
    self.executables: dict[str, Executable] = {}
    self.functions: dict[str, Function] = {}
    self.tasks: dict[tuple[int, str], TaskProgram] = {}
    self.carries: list[Carry] = []

  def value(self, *shape: int, dtype: str = 'float32') -> int:
    self.values[len(self.values)] = Aval(shape, dtype)
    return len(self.values) - 1

  def carry(self, actor: int, *shape: int) -> Carry:
    carry = Carry(100 + len(self.carries), actor, self.value(*shape), self.value(*shape))
    self.carries.append(carry)
    return carry

  def _aval(self, operand: Operand) -> Aval:
    if operand.kind is OperandKind.INDEX:
      return Aval((), 'int32')
    if operand.kind is OperandKind.CARRY:
      return self.values[self.carries[operand.id - 100].initial]
    return self.values[operand.id]

  def executable(
      self, key: str, inputs: Sequence[Aval], outputs: Sequence[Aval], donated, function: Function
  ) -> str:
    self.executables[key] = Executable(key, tuple(inputs), tuple(outputs), tuple(donated), b'')
    self.functions[key] = function
    return key

  def task(
      self, stage: int, phase: str, inputs: Sequence[Operand], outputs: Sequence[Operand],
      function: Function,
  ) -> None:
    key = f'task{stage}{phase}'
    donated = [i for i, o in enumerate(inputs) if o.kind is OperandKind.CARRY]
    avals = [[self._aval(o) for o in operands] for operands in (inputs, outputs)]
    self.executable(key, *avals, donated, function)
    self.tasks[stage, phase] = TaskProgram(stage, phase, key, tuple(inputs), tuple(outputs))

  def outer(
      self, actor: int, name: str, inputs: Sequence[int], outputs: Sequence[int],
      function: Function, donated: Sequence[int] = (),
  ) -> OuterProgram:
    key = f'{name}@{actor}'
    avals = [[self.values[v] for v in ids] for ids in (inputs, outputs)]
    self.executable(key, *avals, donated, function)
    return OuterProgram(actor, name, key, tuple(inputs), tuple(outputs))


def _step(value: int) -> Operand:
  return Operand(OperandKind.STEP, value)


def _edge(value: int) -> Operand:
  return Operand(OperandKind.EDGE, value)


def _carry(carry: Carry) -> Operand:
  return Operand(OperandKind.CARRY, carry.id)


INDEX = Operand(OperandKind.INDEX)


def synthetic_step(
    placement: Sequence[int],
    num_microbatches: int,
    phases: Sequence[str] | None = None,
    empty: Sequence[tuple[int, str]] = (),
) -> Synthetic:
  """A training step of one weight per stage, with tied first and last weights and clipping.

  Stage 0 and the last one share the weight `tied`, which both actors hold; a skip edge goes from
  the first stage's forward to the last one's, and one from the last one's backward to the
  first's. Losses are stacked. After the loop the squared gradients are summed on actor 0, sent to
  all, and the weights, whose memory is taken over, are updated.

  Args:
    placement: the actor of each stage.
    num_microbatches: number of microbatches.
    phases: for each stage 'FB', 'FIW' or 'F' (the same for all: evaluation); by default 'FB'.
    empty: tasks (stage, phase) to leave out; only W ones can be.

  Returns:
    The step and the functions of its programs.
  """
  num_stages, num_actors = len(placement), max(placement) + 1
  phases = list(phases or ['FB'] * num_stages)
  train = phases[0] != 'F'
  last = num_stages - 1
  b = _Builder()
  weights = [b.value(8, 8 + s) for s in range(num_stages)]
  tied = b.value(32, 8)
  batch, rate = b.value(num_microbatches, 4), b.value()
  casts = [b.value(8, 8 + s, dtype='bfloat16') for s in range(num_stages)]
  used_rate = b.value()
  tied_actors = tuple(dict.fromkeys((placement[0], placement[last])))
  unread = b.value(3)

  prologue = [
      b.outer(0, 'prologue.rate', [rate], [used_rate], lambda r: (mix(r, 1),)),
      *(
          b.outer(placement[s], f'prologue.cast{s}', [weights[s]], [casts[s]],
                  lambda w, s=s: (mix(w, 2, s),))
          for s in range(num_stages)
      ),
  ]

  def zero(carry: Carry) -> None:
    prologue.append(
        b.outer(carry.actor, f'prologue.zero{carry.id}', [], [carry.initial], lambda: (0,))
    )

  activations = [b.value(4, 8 + s) for s in range(num_stages)]
  residuals = [b.value(4, 16 + s) for s in range(num_stages)]
  skip, back_skip = b.value(4, 2), b.value(4, 3)
  losses = b.carry(placement[last], num_microbatches)
  zero(losses)
  for s in range(num_stages):
    inputs = [_step(casts[s])]
    inputs += [_step(tied)] if s in (0, last) else []
    inputs += [_step(batch), INDEX] if s == 0 else [_edge(activations[s - 1])]
    outputs = [_edge(activations[s])] if s < last else []
    outputs += [_edge(residuals[s])] if train else []
    outputs += [_edge(skip)] if s == 0 and last > 1 else []
    if s == last:
      inputs += [_edge(skip)] if last > 1 else []
      inputs.append(_carry(losses))
      inputs += [INDEX] if last > 0 else []
      outputs.append(_carry(losses))

    def forward(*args, s=s, inputs=tuple(inputs), outputs=tuple(outputs)):
      return _apply(inputs, outputs, args, 1000 + s)

    b.task(s, 'F', inputs, outputs, forward)

  epilogue: list[OuterProgram] = []
  outputs: list[Leaf] = []
  if train:
    sums = [b.carry(placement[s], 8, 8 + s) for s in range(num_stages)]
    tied_sums = {s: b.carry(placement[s], 32, 8) for s in dict.fromkeys((0, last))}
    for carry in (*sums, *tied_sums.values()):
      zero(carry)
    cotangents = [b.value(4, 8 + s) for s in range(num_stages)]
    split = [b.value(4, 40 + s) for s in range(num_stages)]
    for s in range(num_stages):
      inputs = [_edge(residuals[s]), _step(casts[s])]
      inputs += [_edge(cotangents[s])] if s < last else []
      inputs += [_edge(back_skip)] if s == 0 and last > 1 else []
      made = [_edge(cotangents[s - 1])] if s > 0 else []
      made += [_edge(back_skip)] if s == last and last > 1 else []
      summed = [_carry(sums[s])] + ([_carry(tied_sums[s])] if s in tied_sums else [])
      if phases[s] == 'FB':
        todo = [('B', inputs + summed, made + summed)]
      else:
        todo = [('I', inputs, [*made, _edge(split[s])]), ('W', [_edge(split[s]), *summed], summed)]
      for phase, ins, outs in todo:
        if (s, phase) in empty:
          continue

        def backward(*args, s=s, phase=phase, ins=tuple(ins), outs=tuple(outs)):
          return _apply(ins, outs, args, 2000 + s + ord(phase))

        b.task(s, phase, ins, outs, backward)

    # Norm: per actor, then on actor 0, then everywhere; updates; the tied weight on its first
    # actor, which sends it to the other.
    parts, new_weights = [], []
    for s in range(num_stages):
      parts.append(b.value())
      epilogue.append(
          b.outer(placement[s], f'epilogue.square{s}', [sums[s].final], [parts[-1]],
                  lambda g: (mix(g, 3),))
      )
    tied_sum, tied_new, norm = b.value(32, 8), b.value(32, 8), b.value()
    finals = [carry.final for carry in tied_sums.values()]
    epilogue += [
        b.outer(tied_actors[0], 'epilogue.tie', finals, [tied_sum],
                lambda *gs: (sum(gs) % PRIME,)),
        b.outer(0, 'epilogue.norm', [*parts, tied_sum], [norm], mix),
    ]
    for s in range(num_stages):
      new_weights.append(b.value(8, 8 + s))
      epilogue.append(
          b.outer(placement[s], f'epilogue.update{s}',
                  [weights[s], sums[s].final, norm, used_rate], [new_weights[-1]], _tuple_mix,
                  donated=[0, 1])
      )
    epilogue.append(
        b.outer(tied_actors[0], 'epilogue.update_tied', [tied, tied_sum, norm], [tied_new],
                _tuple_mix)
    )
    b.functions['epilogue.norm@0'] = _tuple_mix
    pieces = tuple(
        Piece(v, (s, 0, 0), (placement[s],)) for s, v in enumerate(new_weights)
    )
    outputs += [
        Leaf(Aval((num_stages, 8, 8), 'float32'), pieces, 'weights'),
        Leaf(Aval((32, 8), 'float32'), (Piece(tied_new, (0, 0), tied_actors),), 'tied'),
        Leaf(Aval((), 'float32'), (Piece(norm, (), tuple(range(num_actors))),), 'norm'),
    ]
  outputs.append(
      Leaf(b.values[losses.final], (Piece(losses.final, (0,), (losses.actor,)),), 'losses')
  )
  inputs = (
      Leaf(
          Aval((num_stages, 8, 8), 'float32'),
          tuple(Piece(v, (s, 0, 0), (placement[s],)) for s, v in enumerate(weights)),
          'weights',
      ),
      Leaf(b.values[tied], (Piece(tied, (0, 0), tied_actors),), 'tied'),
      Leaf(b.values[batch], (Piece(batch, (0, 0), (placement[0],)),), 'batch'),
      Leaf(b.values[rate], (Piece(rate, (), (0,)),), 'rate'),
      Leaf(b.values[unread], (Piece(unread, (0,), (0,)),), 'unread'),
  )
  step = StepProgram(
      num_stages=num_stages,
      num_actors=num_actors,
      num_microbatches=num_microbatches,
      placement=tuple(placement),
      values=b.values,
      executables=b.executables,
      inputs=inputs,
      outputs=tuple(outputs),
      prologue=tuple(prologue),
      tasks=b.tasks,
      carries=tuple(b.carries),
      epilogue=tuple(epilogue),
  )
  given = {
      (i, j): mix(i, j, 99) for i, leaf in enumerate(inputs) for j in range(len(leaf.pieces))
  }
  return Synthetic(step, b.functions, given)


def _tuple_mix(*args: int) -> tuple[int, ...]:
  return (mix(*args),)


def _apply(
    inputs: Sequence[Operand], outputs: Sequence[Operand], args: Sequence[int], salt: int
) -> tuple[int, ...]:
  """Results of a task: carries get something added, everything else is a mix."""
  assert len(args) == len(inputs)
  present = {
      o.id: arg for o, arg in zip(inputs, args, strict=True) if o.kind is OperandKind.CARRY
  }
  rest = [arg for o, arg in zip(inputs, args, strict=True) if o.kind is not OperandKind.CARRY]
  return tuple(
      (present[o.id] + mix(salt, i, *rest)) % PRIME
      if o.kind is OperandKind.CARRY
      else mix(salt, i, *rest)
      for i, o in enumerate(outputs)
  )


def evaluate_step(synthetic: Synthetic) -> dict[tuple[int, int], int]:
  """The results of the step, (result, piece) -> value, straight from its definition.

  All tasks of a microbatch run before the next one, without actors, slots or messages.
  """
  step, functions = synthetic.step, synthetic.functions
  values = {
      piece.value: synthetic.inputs[i, j]
      for i, leaf in enumerate(step.inputs)
      for j, piece in enumerate(leaf.pieces)
  }

  def outer(programs: Sequence[OuterProgram]) -> None:
    for program in programs:
      results = functions[program.executable](*(values[v] for v in program.inputs))
      values.update(zip(program.outputs, results, strict=True))

  outer(step.prologue)
  carried = {carry.id: values[carry.initial] for carry in step.carries}
  stages = range(step.num_stages)
  order = [(s, 'F') for s in stages] + [(s, p) for s in reversed(stages) for p in 'BIW']
  for m in range(step.num_microbatches):
    edges: dict[int, int] = {}
    for stage_phase in order:
      if stage_phase not in step.tasks:
        continue
      program = step.tasks[stage_phase]
      tables = {OperandKind.STEP: values, OperandKind.EDGE: edges, OperandKind.CARRY: carried}
      args = [
          m if o.kind is OperandKind.INDEX else tables[o.kind][o.id] for o in program.inputs
      ]
      for o, result in zip(program.outputs, functions[program.executable](*args), strict=True):
        tables[o.kind][o.id] = result
  values.update((carry.final, carried[carry.id]) for carry in step.carries)
  outer(step.epilogue)
  return {
      (i, j): values[piece.value]
      for i, leaf in enumerate(step.outputs)
      for j, piece in enumerate(leaf.pieces)
  }
