"""The compiled step: what the compiler hands to the planner.

A `StepProgram` is one training step cut into programs, with the values that flow between them.
It knows stages, actors and one microbatch, but no schedule: how often and in which order the task
programs run is the planner's business. Nothing here holds JAX objects, so it pickles, and other
processes can read it without tracing anything.

How a step runs:

  1. each actor gets its pieces of the step's inputs (`StepProgram.inputs`),
  2. the outer programs of the prologue run, in list order,
  3. for every microbatch every task program runs once, in an order the schedule chooses,
  4. the outer programs of the epilogue run, in list order,
  5. `StepProgram.outputs` says which values, on which actors, are the step's results.

Values are named by integers (`ValueId`), the keys of `StepProgram.values`. Three sorts:

  * step values: made once per step (a piece of an input, an outer program's output). The same
    value may be made on several actors; each copy is equal. A reader on an actor that makes the
    value uses its own copy, any other reader gets it sent from the first actor that makes it.
  * edges: made once per microbatch by exactly one task and read by tasks of the same microbatch
    (activations, residuals, cotangents).
  * carries: live on one actor through the whole loop; a task that touches a carry takes its
    present value and gives back the next one, in place (gradient sums, stacked outputs). Before
    the loop a carry's value is that of the step value `Carry.initial`; after the loop its last
    value is the step value `Carry.final`.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import enum
import math

import ml_dtypes
import numpy as np

ValueId = int


@dataclasses.dataclass(frozen=True)
class Sharding:
  """How an array is split over the devices of an actor.

  Attributes:
    mesh: names and sizes of the mesh's axes, those with one device left out; the devices are
      numbered along them, the last axis fastest.
    spec: per dimension the axes it is split over; over the other axes the array is copied.
  """

  mesh: tuple[tuple[str, int], ...]
  spec: tuple[tuple[str, ...], ...]

  @property
  def num_parts(self) -> int:
    """How many parts the array is split into; each device holds one."""
    sizes = dict(self.mesh)
    return math.prod(sizes[name] for names in self.spec for name in names)


@dataclasses.dataclass(frozen=True)
class Aval:
  """Shape and dtype of an array; the dtype by name, as numpy (with ml_dtypes) knows it.

  `sharding` of an array on an actor with several devices; None: each has all of it.
  """

  shape: tuple[int, ...]
  dtype: str
  sharding: Sharding | None = None

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.numpy_dtype.itemsize

  @property
  def numpy_dtype(self) -> np.dtype:
    return dtype_named(self.dtype)

  def __str__(self) -> str:
    axes = self.sharding.spec if self.sharding else ((),) * len(self.shape)
    dims = (f'{n}:{"*".join(names)}' if names else str(n) for n, names in zip(self.shape, axes))
    return f'{self.dtype}[{",".join(dims)}]'


def dtype_named(name: str) -> np.dtype:
  """The numpy dtype of that name; bfloat16 and the float8 kinds are those of ml_dtypes, as in JAX.

  numpy's own look-up can give another library's: TensorFlow registers a bfloat16 of its own.
  """
  return np.dtype(getattr(ml_dtypes, name, name))


class OperandKind(enum.Enum):
  """What an input or output position of a task program stands for."""

  STEP = 'step'  # a step value
  EDGE = 'edge'  # a value of this microbatch
  CARRY = 'carry'  # a carry's present (input) or next (output) value
  INDEX = 'index'  # the microbatch's number, int32[] (inputs only)


@dataclasses.dataclass(frozen=True)
class Operand:
  """One position of a task program. `id` names a value (STEP, EDGE) or a carry (CARRY)."""

  kind: OperandKind
  id: int = -1


@dataclasses.dataclass(frozen=True)
class Executable:
  """One compilable program.

  Attributes:
    key: hash of everything that decides what is compiled; equal keys are the same program.
    inputs: avals of the arguments, in order.
    outputs: avals of the results, in order.
    donated: positions of arguments whose memory the program takes over.
    module: serialized StableHLO.
    num_devices: how many devices of its actor it runs on, together.
  """

  key: str
  inputs: tuple[Aval, ...]
  outputs: tuple[Aval, ...]
  donated: tuple[int, ...]
  module: bytes = dataclasses.field(repr=False)
  num_devices: int = 1


@dataclasses.dataclass(frozen=True)
class TaskProgram:
  """The body of the tasks (stage, phase): runs once per microbatch on the stage's actor.

  `phase` is the phase's letter (F, B, I, W). A carry appears at most once among the inputs and,
  if so, exactly once among the outputs.
  """

  stage: int
  phase: str
  executable: str  # key into StepProgram.executables
  inputs: tuple[Operand, ...]
  outputs: tuple[Operand, ...]

  @property
  def name(self) -> str:
    return f'{self.stage}{self.phase}'


@dataclasses.dataclass(frozen=True)
class OuterProgram:
  """A part of the prologue or epilogue on one actor: runs once per step. All step values."""

  actor: int
  name: str
  executable: str
  inputs: tuple[ValueId, ...]
  outputs: tuple[ValueId, ...]


@dataclasses.dataclass(frozen=True)
class Carry:
  """A value that one actor carries through the microbatch loop."""

  id: int
  actor: int
  initial: ValueId
  final: ValueId


@dataclasses.dataclass(frozen=True)
class Piece:
  """A box of a step input or output and the actors that hold it.

  Attributes:
    value: the step value.
    start: first index of the box along each axis of the whole array.
    actors: who holds it: for an input, who needs it; for an output, who has it.
  """

  value: ValueId
  start: tuple[int, ...]
  actors: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One flat argument or result of the step: its whole aval and the pieces that tile it.

  `pieces` of an input that nobody reads may be empty.
  """

  aval: Aval
  pieces: tuple[Piece, ...]
  name: str = ''


@dataclasses.dataclass(frozen=True)
class StepProgram:
  """One training step, cut for `num_actors` actors. See the module's docstring."""

  num_stages: int
  num_actors: int
  num_microbatches: int
  placement: tuple[int, ...]  # stage -> actor
  values: Mapping[ValueId, Aval]
  executables: Mapping[str, Executable]
  inputs: tuple[Leaf, ...]
  outputs: tuple[Leaf, ...]
  prologue: tuple[OuterProgram, ...]
  tasks: Mapping[tuple[int, str], TaskProgram]  # an empty task has no entry
  carries: tuple[Carry, ...]
  epilogue: tuple[OuterProgram, ...]
