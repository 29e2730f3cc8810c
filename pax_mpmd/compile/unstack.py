"""Stage-stacked arrays -> one value per stage's piece.

In: a traced step (trace.py). Models store the weights of all stages in one array `[S, ...]` (or
`[R, S, ...]`) and the loop's body uses static slices of it; gradients come back as zero-padded
slices, summed.
Out: the same step in which each such array, its gradient, and everything that the step computes
from them along the leading axes (casts, moments, updates) is a tuple of arrays, one per cell of a
grid over the leading axes, with the shape of that cell; plus the grid of each input and result.
Holds: splitting the inputs, running the new jaxpr and joining the results is the old jaxpr.

What can't be computed cell by cell gathers: the pieces are concatenated, the equation runs on the
whole array, and a note is kept. That is always right, and costs the transfer of the array.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.classes import Grid
from pax_mpmd.compile.classes import grids_of_step
from pax_mpmd.compile.pieces import Emitter
from pax_mpmd.compile.pieces import Pieces
from pax_mpmd.compile.piecewise import emit
from pax_mpmd.compile.trace import TracedStep


@dataclasses.dataclass(frozen=True)
class UnstackedStep:
  """A step on pieces.

  Attributes:
    jaxpr: the step; its invars and outvars are the pieces of all arguments and results, in order.
    consts: values of jaxpr.constvars.
    in_grids: per original argument its grid, None where it is one piece.
    out_grids: likewise per original result.
    notes: a line for each gather, for the log.
  """

  jaxpr: Any
  consts: tuple[Any, ...]
  in_grids: tuple[Grid | None, ...]
  out_grids: tuple[Grid | None, ...]
  notes: tuple[str, ...]


def unstack(step: TracedStep, num_stages: int) -> UnstackedStep:
  """Splits stage-stacked values of `step` into pieces. See the module's docstring.

  Raises:
    PartitionError: the number of `pipeline_yield` calls doesn't fit `num_stages`.
  """
  grids = grids_of_step(step.jaxpr, num_stages)
  emitter = Emitter(grids)
  in_grids: list[Grid | None] = []
  invars: list[Any] = []
  for v in step.jaxpr.invars:
    grid = grids.get(v)
    in_grids.append(grid)
    if grid is None:
      invars.append(v)
      continue
    pieces = [jc.new_var(v.aval.update(shape=s)) for s in grid.piece_shapes(v.aval.shape)]
    invars.extend(pieces)
    emitter.env[v] = Pieces(grid, tuple(pieces))

  for eqn in step.jaxpr.eqns:
    if eqn.primitive.name == 'accumulate_grads':
      _unstack_loop(emitter, eqn, grids)
    else:
      emit(emitter, eqn)

  out_grids: list[Grid | None] = []
  outvars: list[Any] = []
  for v in step.jaxpr.outvars:
    value = emitter.read(v)
    if isinstance(value, Pieces):
      out_grids.append(value.grid)
      outvars.extend(emitter.filled(value, v.aval))
    else:
      out_grids.append(None)
      outvars.append(value)

  jaxpr = jc.new_jaxpr(step.jaxpr.constvars, invars, outvars, emitter.eqns)
  jaxpr, _ = jc.dce(jaxpr, [True] * len(outvars))
  return UnstackedStep(
      jaxpr, step.consts, tuple(in_grids), tuple(out_grids), tuple(emitter.notes)
  )


def _unstack_loop(emitter: Emitter, eqn: Any, grids: dict[Any, Grid]) -> None:
  """Emits the loop with pieces for its stacked constants and for its stacked sums."""
  params = dict(eqn.params)
  body = params['jaxpr'].jaxpr
  num_consts, num_summed = params['num_consts'], params['num_summed']
  inner = Emitter(grids)
  consts: list[Any] = []
  body_consts: list[Any] = []
  for operand, v in zip(eqn.invars[:num_consts], body.invars[:num_consts]):
    grid = grids.get(v)
    if grid is None:
      consts.append(emitter.whole(operand))
      body_consts.append(v)
      continue
    outer = emitter.split(operand, grid)
    pieces = tuple(jc.new_var(p.aval) for p in outer)
    consts.extend(outer)
    body_consts.extend(pieces)
    inner.env[v] = Pieces(grid, pieces)
  for body_eqn in body.eqns:
    emit(inner, body_eqn)

  body_outs: list[Any] = []
  outvars: list[Any] = []
  new_num_summed = 0
  for i, (v, out) in enumerate(zip(body.outvars, eqn.outvars)):
    value = inner.read(v)
    if i < num_summed and isinstance(value, Pieces):
      shapes = value.grid.piece_shapes(v.aval.shape)
      outer = [
          None if p is None else jc.new_var(v.aval.update(shape=s))
          for p, s in zip(value.atoms, shapes)
      ]
      body_outs.extend(p for p in value.atoms if p is not None)
      outvars.extend(p for p in outer if p is not None)
      emitter.env[out] = Pieces(value.grid, tuple(outer))
    else:
      body_outs.append(inner.whole(v))
      outvars.append(out)
    if i < num_summed:
      new_num_summed = len(outvars)

  new_body = jc.new_jaxpr((), [*body_consts, *body.invars[num_consts:]], body_outs, inner.eqns)
  new_body, _ = jc.dce(new_body, [True] * len(body_outs))
  params.update(
      jaxpr=jc.ClosedJaxpr(new_body, ()), num_consts=len(consts), num_summed=new_num_summed
  )
  batch = [emitter.whole(x) for x in eqn.invars[num_consts:]]
  emitter.eqns.append(eqn.replace(invars=[*consts, *batch], outvars=outvars, params=params))
  emitter.notes.extend(inner.notes)


def split_inputs(step: UnstackedStep, args: Sequence[Any]) -> list[Any]:
  """Whole arguments -> the arguments of `step.jaxpr`."""
  out: list[Any] = []
  for x, grid in zip(args, step.in_grids):
    out.extend([x] if grid is None else [x[box] for box in grid.boxes()])
  return out


def join_outputs(step: UnstackedStep, outs: Sequence[Any]) -> list[Any]:
  """Results of `step.jaxpr` -> whole results, as numpy arrays."""
  import numpy as np

  it = iter(outs)
  joined: list[Any] = []
  for grid in step.out_grids:
    if grid is None:
      joined.append(next(it))
      continue
    pieces = [np.asarray(x) for x in itertools.islice(it, grid.num_cells)]
    whole = np.empty(grid.full_shape + pieces[0].shape[grid.rank :], pieces[0].dtype)
    for box, piece in zip(grid.boxes(), pieces):
      whole[box] = piece
    joined.append(whole)
  return joined
