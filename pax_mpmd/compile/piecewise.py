"""Equations on pieces: how each primitive applies to an array that is split along a grid."""

from __future__ import annotations

from collections.abc import Callable
import itertools
from typing import Any

import numpy as np

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.classes import Grid
from pax_mpmd.compile.pieces import Emitter
from pax_mpmd.compile.pieces import Pieces
from pax_mpmd.compile.primitives import ELEMENTWISE
from pax_mpmd.compile.primitives import REDUCTIONS
from pax_mpmd.compile.primitives import ZERO_PRESERVING


class _NotPiecewise(Exception):
  """The equation has no rule for these pieces."""


def emit(em: Emitter, eqn: Any) -> None:
  """Emits `eqn`, on pieces where that is possible."""
  values = [em.read(v) for v in eqn.invars]
  grids = [v.grid for v in values if isinstance(v, Pieces)]
  wanted = em.grids.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
  if not grids and wanted is None:
    em.eqns.append(eqn.replace(invars=values))
    return
  grid = wanted if wanted is not None else grids[0]
  rule = _rule_of(eqn)
  if rule is not None and len(eqn.outvars) == 1 and (grids or eqn.primitive.name in _MAKERS):
    mark = len(em.eqns)
    try:
      em.env[eqn.outvars[0]] = rule(em, eqn, grid)
      return
    except _NotPiecewise:
      del em.eqns[mark:]
  em.eqns.append(eqn.replace(invars=[em.whole(v, eqn) for v in eqn.invars]))


Rule = Callable[[Emitter, Any, Grid], Any]
_RULES: dict[str, Rule] = {}
# These give pieces also when no operand is split: they make values or place them into zeros.
_MAKERS = frozenset({'broadcast_in_dim', 'pad', 'concatenate'})


def _rule_of(eqn: Any) -> Rule | None:
  name = eqn.primitive.name
  if name in ELEMENTWISE:
    return _elementwise
  if name in REDUCTIONS:
    return _reduce
  return _RULES.get(name)


def _rule(name: str) -> Callable[[Rule], Rule]:
  def add(fn: Rule) -> Rule:
    _RULES[name] = fn
    return fn

  return add


def _elementwise(em: Emitter, eqn: Any, grid: Grid) -> Pieces:
  aval = eqn.outvars[0].aval
  name = eqn.primitive.name
  shapes = grid.piece_shapes(aval.shape)
  values = [em.read(v) for v in eqn.invars]
  is_array = [bool(v.aval.shape) for v in eqn.invars]
  sparse = [isinstance(v, Pieces) and v.grid == grid for v in values]

  def absent(cell: int) -> list[bool]:
    return [s and v.atoms[cell] is None for s, v in zip(sparse, values)]

  def operand(i: int, cell: int) -> Any:
    """A piece of operand i; of one that is split already, only the zeros in use are written out."""
    if sparse[i]:
      return em.piece(values[i], cell, eqn.invars[i].aval, eqn)
    return _pieces_of(em, eqn, rows, i, grid)[cell]

  rows: list[list[Any]] = []
  for v, array in zip(eqn.invars, is_array):
    rows.append([] if array else [em.whole(v, eqn)] * grid.num_cells)
  out: list[Any] = []
  for cell in range(grid.num_cells):
    gone = absent(cell)
    if name in ('add_any', 'add') and any(gone):
      left = [i for i, g in enumerate(gone) if not g]
      out.append(operand(left[0], cell) if left else None)
      continue
    if any(gone) and _keeps_zeros(eqn, gone):
      out.append(None)
      continue
    operands = [operand(i, cell) for i in range(len(values))]
    out.append(em.bind(eqn, operands, aval.update(shape=shapes[cell]), **eqn.params))
  return Pieces(grid, tuple(out))


def _pieces_of(em: Emitter, eqn: Any, rows: list[list[Any]], i: int, grid: Grid) -> list[Any]:
  """Operand i's pieces, made at the first use."""
  if not rows[i]:
    v = eqn.invars[i]
    sizes = v.aval.shape[: grid.rank]
    if sizes == grid.full_shape:
      rows[i] = em.split(v, grid, eqn)
    else:
      # An axis of size 1 stands for the same element in every cell.
      whole = em.whole(v, eqn)
      rows[i] = [
          em.box(whole, tuple((0, 1) if n == 1 else c for n, c in zip(sizes, cell)), eqn)
          for cell in grid.cells()
      ]
  return rows[i]


def _keeps_zeros(eqn: Any, gone: list[bool]) -> bool:
  """Whether the result is zeros where the operands `gone` are.

  Zeros times a factor known only at run time aren't left out: it may be infinite.
  """
  name = eqn.primitive.name
  if name in ZERO_PRESERVING:
    return True
  factors = [v for v, g in zip(eqn.invars, gone) if not g]
  finite = all(
      isinstance(v, jc.Literal) and np.ndim(v.val) == 0 and np.isfinite(v.val) for v in factors
  )
  if name == 'mul':
    return finite
  return name == 'div' and gone[0] and finite and all(v.val != 0 for v in factors)


def _reduce(em: Emitter, eqn: Any, grid: Grid) -> Any:
  axes = eqn.params['axes']
  aval = eqn.outvars[0].aval
  value = em.read(eqn.invars[0])
  if not isinstance(value, Pieces):
    raise _NotPiecewise
  grid = value.grid
  leading = set(range(grid.rank))
  if not leading & set(axes):
    atoms = em.split(eqn.invars[0], grid, eqn)
    shapes = grid.piece_shapes(aval.shape)
    return Pieces(
        grid,
        tuple(em.bind(eqn, [p], aval.update(shape=s), **eqn.params) for p, s in zip(atoms, shapes)),
    )
  if not leading <= set(axes):
    raise _NotPiecewise
  combine = jc.primitive_named(REDUCTIONS[eqn.primitive.name])
  partial = [em.bind(eqn, [p], aval, **eqn.params) for p in em.split(eqn.invars[0], grid, eqn)]
  total = partial[0]
  for p in partial[1:]:
    total = em.bind(eqn, [total, p], aval, primitive=combine)
  return total


@_rule('broadcast_in_dim')
def _broadcast_in_dim(em: Emitter, eqn: Any, grid: Grid) -> Pieces:
  aval = eqn.outvars[0].aval
  if len(eqn.invars) != 1 or tuple(aval.shape[: grid.rank]) != grid.full_shape:
    raise _NotPiecewise
  x = eqn.invars[0]
  dims = eqn.params['broadcast_dimensions']
  shapes = grid.piece_shapes(aval.shape)
  along = [
      (i, d) for i, d in enumerate(dims) if d < grid.rank and x.aval.shape[i] == aval.shape[d]
  ]
  if not along:
    operands = [em.whole(x, eqn)] * grid.num_cells
  elif [i for i, _ in along] == [d for _, d in along] == list(range(grid.rank)):
    operands = em.split(x, grid, eqn)
  else:
    raise _NotPiecewise
  out = []
  for operand, shape in zip(operands, shapes):
    params = dict(eqn.params, shape=shape)
    out.append(em.bind(eqn, [operand], aval.update(shape=shape), **params))
  return Pieces(grid, tuple(out))


@_rule('reshape')
def _reshape(em: Emitter, eqn: Any, grid: Grid) -> Pieces:
  aval = eqn.outvars[0].aval
  value = em.read(eqn.invars[0])
  if not isinstance(value, Pieces) or eqn.params.get('dimensions') is not None:
    raise _NotPiecewise
  grid = value.grid
  if tuple(aval.shape[: grid.rank]) != grid.full_shape or len(eqn.invars) != 1:
    raise _NotPiecewise
  out = []
  for atom, shape in zip(em.split(eqn.invars[0], grid, eqn), grid.piece_shapes(aval.shape)):
    params = dict(eqn.params, new_sizes=shape)
    out.append(em.bind(eqn, [atom], aval.update(shape=shape), **params))
  return Pieces(grid, tuple(out))


@_rule('transpose')
def _transpose(em: Emitter, eqn: Any, grid: Grid) -> Pieces:
  value = em.read(eqn.invars[0])
  rank = value.grid.rank
  if tuple(eqn.params['permutation'][:rank]) != tuple(range(rank)):
    raise _NotPiecewise
  return _same_params(em, eqn, value.grid)


@_rule('squeeze')
def _squeeze(em: Emitter, eqn: Any, grid: Grid) -> Pieces:
  value = em.read(eqn.invars[0])
  if any(d < value.grid.rank for d in eqn.params['dimensions']):
    raise _NotPiecewise
  return _same_params(em, eqn, value.grid)


def _same_params(em: Emitter, eqn: Any, grid: Grid) -> Pieces:
  aval = eqn.outvars[0].aval
  atoms = em.split(eqn.invars[0], grid, eqn)
  shapes = grid.piece_shapes(aval.shape)
  return Pieces(
      grid,
      tuple(em.bind(eqn, [p], aval.update(shape=s), **eqn.params) for p, s in zip(atoms, shapes)),
  )


@_rule('slice')
def _slice(em: Emitter, eqn: Any, grid: Grid) -> Any:
  value = em.read(eqn.invars[0])
  if not isinstance(value, Pieces):
    raise _NotPiecewise
  grid = value.grid
  starts, limits = eqn.params['start_indices'], eqn.params['limit_indices']
  strides = eqn.params['strides'] or (1,) * len(starts)
  if any(s != 1 for s in strides[: grid.rank]):
    raise _NotPiecewise
  aval = eqn.outvars[0].aval
  atoms = em.filled(value, eqn.invars[0].aval, eqn)
  chosen: list[Any] = []
  bounds: list[list[int]] = [[] for _ in range(grid.rank)]
  for axis in range(grid.rank):
    cuts = [b for b in grid.bounds[axis] if starts[axis] <= b <= limits[axis]]
    if cuts[:1] != [starts[axis]] or cuts[-1:] != [limits[axis]]:
      raise _NotPiecewise
    bounds[axis] = [b - starts[axis] for b in cuts]
  for atom, cell in zip(atoms, grid.cells()):
    if all(starts[j] <= a and b <= limits[j] for j, (a, b) in enumerate(cell)):
      size = atom.aval.shape
      piece_starts = (0,) * grid.rank + tuple(starts[grid.rank :])
      piece_limits = tuple(size[: grid.rank]) + tuple(limits[grid.rank :])
      shape = size[: grid.rank] + tuple(aval.shape[grid.rank :])
      if shape == size:
        chosen.append(atom)
      else:
        chosen.append(
            em.bind(
                eqn,
                [atom],
                aval.update(shape=shape),
                start_indices=piece_starts,
                limit_indices=piece_limits,
                strides=eqn.params['strides'],
            )
        )
  sub = Grid(tuple(tuple(b) for b in bounds))
  if sub == grid:
    return Pieces(grid, tuple(chosen))
  return em.join(chosen, sub, aval, eqn)


@_rule('pad')
def _pad(em: Emitter, eqn: Any, grid: Grid) -> Pieces:
  x, padding = eqn.invars
  config = eqn.params['padding_config']
  aval = eqn.outvars[0].aval
  value = em.read(x)
  if isinstance(value, Pieces) and all(c == (0, 0, 0) for c in config[: value.grid.rank]):
    out = []
    fill = em.whole(padding, eqn)
    shapes = value.grid.piece_shapes(aval.shape)
    for atom, shape in zip(em.split(x, value.grid, eqn), shapes):
      out.append(em.bind(eqn, [atom, fill], aval.update(shape=shape), padding_config=config))
    return Pieces(value.grid, tuple(out))
  if tuple(aval.shape[: grid.rank]) != grid.full_shape:
    raise _NotPiecewise
  if not (isinstance(padding, jc.Literal) and padding.val == 0):
    raise _NotPiecewise
  if any(interior for _, _, interior in config[: grid.rank]) or any(
      low < 0 or high < 0 for low, high, _ in config[: grid.rank]
  ):
    raise _NotPiecewise
  lows = [low for low, _, _ in config[: grid.rank]]
  sizes = x.aval.shape
  inner = ((0, 0, 0),) * grid.rank + tuple(config[grid.rank :])
  source = em.whole(x, eqn)
  out = []
  for cell, shape in zip(grid.cells(), grid.piece_shapes(aval.shape)):
    inside = [
        (a - lows[j] >= 0 and b - lows[j] <= sizes[j]) for j, (a, b) in enumerate(cell)
    ]
    outside = [
        (b <= lows[j] or a >= lows[j] + sizes[j]) for j, (a, b) in enumerate(cell)
    ]
    if any(outside):
      out.append(None)
      continue
    if not all(inside):
      raise _NotPiecewise
    box = tuple((a - lows[j], b - lows[j]) for j, (a, b) in enumerate(cell))
    part = em.box(source, box, eqn)
    if any(c != (0, 0, 0) for c in inner):
      part = em.bind(eqn, [part, padding], aval.update(shape=shape), padding_config=inner)
    out.append(part)
  return Pieces(grid, tuple(out))


@_rule('concatenate')
def _concatenate(em: Emitter, eqn: Any, grid: Grid) -> Pieces:
  aval = eqn.outvars[0].aval
  axis = eqn.params['dimension']
  if tuple(aval.shape[: grid.rank]) != grid.full_shape:
    raise _NotPiecewise
  if axis >= grid.rank:
    rows = [em.split(v, grid, eqn) for v in eqn.invars]
    shapes = grid.piece_shapes(aval.shape)
    return Pieces(
        grid,
        tuple(
            em.bind(eqn, list(ps), aval.update(shape=s), **eqn.params)
            for ps, s in zip(zip(*rows), shapes)
        ),
    )
  if grid.rank != 1:
    raise _NotPiecewise
  ends = list(itertools.accumulate((v.aval.shape[0] for v in eqn.invars), initial=0))
  if tuple(ends) != grid.bounds[0]:
    raise _NotPiecewise
  return Pieces(grid, tuple(em.whole(v, eqn) for v in eqn.invars))
