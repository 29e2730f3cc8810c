"""The plan: for each actor, the list of instructions it runs every step.

Pure data, no JAX: it pickles, prints and can be checked (`verify.py`) before any process starts.
Values live in slots, numbered from 0 on each actor. A slot is written once per step: by being an
input, a constant, an output of a Run or by a Recv. It is readable until a Free or until a Run
that donates it.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

import numpy as np

from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Executable

Slot = int


@dataclasses.dataclass(frozen=True)
class Run:
  """Runs a program on slots.

  Attributes:
    executable: key into Plan.executables.
    inputs: one slot per argument. The slots at the executable's `donated` positions are gone
      afterwards.
    outputs: one new slot per result.
    label: for people and errors: a task's text such as '2F0', or 'prologue', 'epilogue.1'.
    stage: the task's stage, None outside the microbatch loop.
  """

  executable: str
  inputs: tuple[Slot, ...]
  outputs: tuple[Slot, ...]
  label: str
  stage: int | None = None


@dataclasses.dataclass(frozen=True)
class Send:
  """Sends the values of slots to actor `dst` as one message. `label` says who made them."""

  dst: int
  slots: tuple[Slot, ...]
  label: str


@dataclasses.dataclass(frozen=True)
class Recv:
  """Takes the next message from actor `src` into new slots. `label` equals the Send's."""

  src: int
  slots: tuple[Slot, ...]
  label: str


@dataclasses.dataclass(frozen=True)
class Free:
  """Forgets slots."""

  slots: tuple[Slot, ...]


Instruction = Run | Send | Recv | Free


@dataclasses.dataclass(frozen=True)
class ActorPlan:
  """What one actor does in a step.

  Attributes:
    actor: the pipeline rank.
    slots: aval of every slot.
    inputs: slots filled by the driver's step message, in the order of `input_values`.
    input_values: for each of those the (argument position, piece position) it comes from.
    constants: slots that hold the same array in every step (microbatch numbers); never freed.
    instructions: the list, in order.
    outputs: slots that are results; still readable when the list ends.
    output_values: for each of those the (result position, piece position) it is a copy of.
  """

  actor: int
  slots: tuple[Aval, ...]
  inputs: tuple[Slot, ...]
  input_values: tuple[tuple[int, int], ...]
  constants: tuple[tuple[Slot, np.ndarray], ...]
  instructions: tuple[Instruction, ...]
  outputs: tuple[Slot, ...]
  output_values: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Plan:
  """The whole step: one ActorPlan per actor and the programs they run."""

  actors: tuple[ActorPlan, ...]
  executables: Mapping[str, Executable]
