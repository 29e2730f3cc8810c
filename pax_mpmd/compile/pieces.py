"""Values split along a grid, and the equations that split and join them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.classes import Grid


@dataclasses.dataclass(frozen=True)
class Pieces:
  """A value as its pieces, cell by cell; None stands for zeros."""

  grid: Grid
  atoms: tuple[Any | None, ...]


class Emitter:
  """Collects equations on values that may be split.

  Attributes:
    env: value of each variable so far: an atom, or Pieces. Variables not in it stand for
      themselves.
    eqns: the equations emitted.
    notes: a line for each gather.
  """

  def __init__(self, grids: dict[Any, Grid]):
    self.grids = grids
    self.env: dict[Any, Any] = {}
    self.eqns: list[Any] = []
    self.notes: list[str] = []

  def read(self, atom: Any) -> Any:
    return atom if isinstance(atom, jc.Literal) else self.env.get(atom, atom)

  def bind(self, like: Any, invars: list[Any], aval: Any, primitive: Any = None, **params) -> Any:
    """Appends an equation with one result and returns its variable."""
    out = jc.new_var(aval)
    primitive = like.primitive if primitive is None else primitive
    self.eqns.append(jc.new_eqn(invars, [out], primitive, params, like))
    return out

  def filled(self, value: Pieces, aval: Any, like: Any | None = None) -> list[Any]:
    """The atoms of `value`, zeros written out."""
    shapes = value.grid.piece_shapes(aval.shape)
    return [
        self._zeros(aval.update(shape=s), like) if p is None else p
        for p, s in zip(value.atoms, shapes)
    ]

  def piece(self, value: Pieces, cell: int, aval: Any, like: Any | None = None) -> Any:
    """The atom of one cell of `value`, whose whole aval is `aval`, zeros written out."""
    atom = value.atoms[cell]
    if atom is None:
      atom = self._zeros(aval.update(shape=value.grid.piece_shapes(aval.shape)[cell]), like)
    return atom

  def _zeros(self, aval: Any, like: Any | None) -> Any:
    zero = jc.Literal(np.zeros((), aval.dtype), aval.update(shape=()))
    out = jc.new_var(aval)
    params = jc.broadcast_params(aval.shape)
    self.eqns.append(jc.new_eqn([zero], [out], jc.broadcast_in_dim_p, params, like))
    return out

  def whole(self, atom: Any, eqn: Any | None = None) -> Any:
    """The value of `atom` as one atom; gathers pieces, and notes it if `eqn` is what needs it."""
    value = self.read(atom)
    if not isinstance(value, Pieces):
      return value
    if eqn is not None:
      self.notes.append(
          f'{atom.aval.str_short()} is gathered for {eqn.primitive.name} at {jc.source_of(eqn)},'
          ' which has no piecewise form'
      )
    joined = self.join(self.filled(value, atom.aval, eqn), value.grid, atom.aval, eqn)
    self.env[atom] = joined
    return joined

  def join(self, atoms: list[Any], grid: Grid, aval: Any, like: Any | None) -> Any:
    shape = list(aval.shape)
    given = atoms
    counts = [len(b) - 1 for b in grid.bounds]
    for axis in reversed(range(grid.rank)):
      groups = [atoms[i : i + counts[axis]] for i in range(0, len(atoms), counts[axis])]
      atoms = []
      for group in groups:
        if len(group) == 1:
          atoms.append(group[0])
          continue
        sizes = list(group[0].aval.shape)
        sizes[axis] = shape[axis]
        out = jc.new_var(aval.update(shape=tuple(sizes)))
        self.eqns.append(
            jc.new_eqn(group, [out], jax.lax.concatenate_p, {'dimension': axis}, like)
        )
        atoms.append(out)
    (joined,) = atoms
    if joined in given:
      return joined
    # XLA takes a reduction of a concatenation apart and counts its initial value once per operand.
    out = jc.new_var(aval)
    self.eqns.append(jc.new_eqn([joined], [out], jc.optimization_barrier_p, {}, like))
    return out

  def split(self, atom: Any, grid: Grid, like: Any | None = None) -> list[Any]:
    """The value of `atom` as its pieces along `grid`."""
    value = self.read(atom)
    if isinstance(value, Pieces):
      if value.grid == grid:
        return self.filled(value, atom.aval, like)
      value = self.whole(atom)
    return [self.box(value, cell, like) for cell in grid.cells()]

  def box(self, atom: Any, cell: tuple[tuple[int, int], ...], like: Any | None) -> Any:
    shape = atom.aval.shape
    starts = tuple(a for a, _ in cell) + (0,) * (len(shape) - len(cell))
    limits = tuple(b for _, b in cell) + tuple(shape[len(cell) :])
    if starts == (0,) * len(shape) and limits == tuple(shape):
      return atom
    out = jc.new_var(atom.aval.update(shape=tuple(b - a for a, b in zip(starts, limits))))
    params = {'start_indices': starts, 'limit_indices': limits, 'strides': None}
    self.eqns.append(jc.new_eqn([atom], [out], jax.lax.slice_p, params, like))
    return out
