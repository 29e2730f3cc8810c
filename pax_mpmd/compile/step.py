"""The compiler: a step function -> `StepProgram`, by the passes of this package in their order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
from typing import Any

from pax_mpmd.compile import shardings as shardings_lib
from pax_mpmd.compile.branches import flatten_branches
from pax_mpmd.compile.classes import Grid
from pax_mpmd.compile.export import aval_of
from pax_mpmd.compile.export import export
from pax_mpmd.compile.last_yield import notes_on_last_yield
from pax_mpmd.compile.partition import partition
from pax_mpmd.compile.placement import place
from pax_mpmd.compile.program import Leaf
from pax_mpmd.compile.program import Piece
from pax_mpmd.compile.program import StepProgram
from pax_mpmd.compile.repeats import merge_repeats
from pax_mpmd.compile.shared import delay_shared_sums
from pax_mpmd.compile.trace import loop_of
from pax_mpmd.compile.trace import mesh_sizes
from pax_mpmd.compile.trace import TracedStep
from pax_mpmd.compile.unstack import unstack
from pax_mpmd.compile.unstack import UnstackedStep


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """A compiled step and what the caller needs around it.

  Attributes:
    program: what the planner takes.
    out_tree: the tree structure of the step's result.
    notes: a line for every place where a slower way had to be taken.
  """

  program: StepProgram
  out_tree: Any
  notes: tuple[str, ...]


def compile_step(traced: TracedStep, *, placement: Sequence[int], num_actors: int,
                 in_names: Sequence[str], donated: Sequence[bool],
                 next_value_of: Mapping[int, int],
                 split_stages: Collection[int] = (), mesh: Any | None = None,
                 in_specs: Sequence[Any] = ()) -> CompiledStep:
  """Compiles a traced step for a placement.

  Args:
    traced: the step.
    placement: stage -> actor.
    num_actors: number of actors.
    in_names: per flat argument its name for messages.
    donated: per flat argument whether the caller gives it up.
    next_value_of: flat result -> flat argument whose place it takes in the next step.
    split_stages: the stages whose backward pass is split into I and W.
    mesh: a `jax.sharding.Mesh` like that of each actor's devices; None: they have one each.
    in_specs: per flat argument its PartitionSpec on that mesh, or None.

  Raises:
    PartitionError: the step can't be cut.
  """
  num_stages = len(placement)
  traced = merge_repeats(flatten_branches(traced), num_stages)
  step = delay_shared_sums(unstack(traced, num_stages), num_stages)
  cut = partition(step.jaxpr, num_stages, split_stages)
  inputs = _leaves(step.in_grids, [v.aval for v in traced.jaxpr.invars], in_names)
  outputs = _leaves(step.out_grids, [v.aval for v in traced.jaxpr.outvars], None)
  pairs = _piece_pairs(step, inputs, outputs, next_value_of)
  placed = place(step.jaxpr, cut, placement, pairs)
  sizes = mesh_sizes(mesh)
  shardings = shardings_lib.shardings_of(
      step.jaxpr, placed, sizes, _piece_specs(step, inputs, in_specs, sizes), pairs
  )
  piece_donated = [d for leaf, d in zip(inputs, donated) for _ in leaf.pieces]
  program = export(
      step.jaxpr,
      placed,
      dict(zip(step.jaxpr.constvars, step.consts)),
      placement,
      num_actors,
      inputs,
      outputs,
      piece_donated,
      mesh if sizes else None,
      shardings,
  )
  last_yield = notes_on_last_yield(traced.jaxpr, num_stages)
  notes = (*traced.notes, *last_yield, *step.notes, *cut.notes, *placed.notes)
  return CompiledStep(program, traced.out_tree, notes)


def num_microbatches_of(traced: TracedStep) -> int:
  """The number of microbatches of a traced step."""
  return loop_of(traced.jaxpr).params['num_microbatches']


def _leaves(
    grids: Sequence[Grid | None], avals: Sequence[Any], names: Sequence[str] | None
) -> list[Leaf]:
  """Leaves whose pieces' values are, for now, positions among the step's pieces."""
  leaves = []
  position = 0
  for i, (grid, aval) in enumerate(zip(grids, avals)):
    rank = len(aval.shape)
    starts = [(0,) * rank]
    if grid is not None:
      starts = [
          tuple(a for a, _ in cell) + (0,) * (rank - grid.rank) for cell in grid.cells()
      ]
    pieces = tuple(Piece(position + k, start, ()) for k, start in enumerate(starts))
    position += len(pieces)
    leaves.append(
        Leaf(
            aval_of(aval),
            pieces,
            name=names[i] if names else '',
        )
    )
  return leaves


def _piece_specs(
    step: UnstackedStep, inputs: Sequence[Leaf], in_specs: Sequence[Any], sizes: Mapping[str, int]
) -> dict[Any, shardings_lib.Spec]:
  """`in_specs` by the variables of the pieces."""
  specs = {}
  for leaf, spec in zip(inputs, in_specs if sizes else ()):
    for piece in leaf.pieces:
      v = step.jaxpr.invars[piece.value]
      specs[v] = shardings_lib.spec_of(spec, v.aval.shape, sizes)
  return specs


def _piece_pairs(
    step: UnstackedStep,
    inputs: Sequence[Leaf],
    outputs: Sequence[Leaf],
    next_value_of: Mapping[int, int],
) -> dict[int, int]:
  """`next_value_of` by pieces, where result and argument are split alike."""
  pairs = {}
  for out, arg in next_value_of.items():
    if step.out_grids[out] == step.in_grids[arg]:
      pairs.update(
          (y.value, x.value) for y, x in zip(outputs[out].pieces, inputs[arg].pieces)
      )
  return pairs
