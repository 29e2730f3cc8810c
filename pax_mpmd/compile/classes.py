"""Which values of a step are split into pieces, and along which grid.

Values that an equation computes from each other cell by cell along their leading axis belong to
one class (a stacked weight, its gradient, its moments, its update). A class is split where the
loop's body slices one of its members, constant over the microbatches, along the leading axes, or
sums what is padded with zeros along them (the gradient of a slice); the bounds make the grid.
Where all cells of a grid would serve the same stages (a padded vocabulary cut to its size, queries
and keys in one matrix), there is nothing to gain, and the class stays whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses
import itertools
import math
from typing import Any

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.primitives import ELEMENTWISE
from pax_mpmd.compile.primitives import REDUCTIONS
from pax_mpmd.compile.segments import find_segments
from pax_mpmd.compile.segments import FREE
from pax_mpmd.compile.segments import Segments
from pax_mpmd.compile.trace import loop_of

_Box = tuple[tuple[int, int], ...]  # (start, limit) along each axis


@dataclasses.dataclass(frozen=True)
class Grid:
  """Cuts of the leading axes: `bounds[j]` are the ascending cut positions of axis j, ends included.

  Cells are numbered in row-major order.
  """

  bounds: tuple[tuple[int, ...], ...]

  @property
  def rank(self) -> int:
    return len(self.bounds)

  @property
  def full_shape(self) -> tuple[int, ...]:
    return tuple(b[-1] for b in self.bounds)

  @property
  def num_cells(self) -> int:
    return math.prod(len(b) - 1 for b in self.bounds)

  def cells(self) -> Iterator[tuple[tuple[int, int], ...]]:
    """The (start, limit) of every leading axis, cell by cell."""
    return itertools.product(*(itertools.pairwise(b) for b in self.bounds))

  def boxes(self) -> Iterator[tuple[slice, ...]]:
    """Index expressions of the cells."""
    for cell in self.cells():
      yield tuple(slice(a, b) for a, b in cell)

  def piece_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of the pieces of an array of the given whole shape."""
    assert tuple(shape[: self.rank]) == self.full_shape, (shape, self)
    return [tuple(b - a for a, b in cell) + tuple(shape[self.rank :]) for cell in self.cells()]


class _Classes:
  """Disjoint sets of variables."""

  def __init__(self) -> None:
    self._parent: dict[Any, Any] = {}

  def find(self, v: Any) -> Any:
    root = v
    while (parent := self._parent.get(root, root)) is not root:
      root = parent
    while (parent := self._parent.get(v, v)) is not root:
      self._parent[v] = root
      v = parent
    return root

  def unite(self, variables: Iterable[Any]) -> None:
    roots = [self.find(v) for v in variables]
    for other in roots[1:]:
      if other is not roots[0]:
        self._parent[other] = roots[0]


def _linked(eqn: Any) -> list[Any]:
  """The variables of an equation that share their leading axis, cell by cell."""
  name = eqn.primitive.name
  out = eqn.outvars[0]
  if jc.is_drop(out) or not out.aval.shape:
    return []
  shape = out.aval.shape
  arrays = [v for v in eqn.invars if isinstance(v, jc.Var) and v.aval.shape]
  if name in ELEMENTWISE:
    return [out, *(v for v in arrays if v.aval.shape[0] == shape[0])]
  if not arrays:
    return []
  x = arrays[0]
  p = eqn.params
  same_first = x.aval.shape[0] == shape[0]
  keeps = False
  if name == 'broadcast_in_dim':
    keeps = same_first and p['broadcast_dimensions'][:1] == (0,)
  elif name in REDUCTIONS:
    keeps = 0 not in p['axes']
  elif name == 'reshape':
    keeps = same_first
  elif name == 'transpose':
    keeps = p['permutation'][0] == 0
  elif name == 'squeeze':
    keeps = 0 not in p['dimensions']
  elif name == 'slice':
    keeps = same_first
  elif name == 'pad':
    keeps = p['padding_config'][0] == (0, 0, 0)
  elif name == 'concatenate' and p['dimension'] != 0:
    return [out, *arrays]
  return [out, x] if keeps else []


def invariant_vars(body: Any, num_consts: int) -> set[Any]:
  """The variables of a loop body that are the same for every microbatch."""
  known = set(body.invars[:num_consts])
  for eqn in body.eqns:
    if all(isinstance(v, jc.Literal) or v in known for v in eqn.invars) and not eqn.effects:
      if eqn.primitive.name != 'pipeline_yield':
        known.update(eqn.outvars)
  return known


def _sum_vars(body: Any, num_summed: int) -> set[Any]:
  """The variables that reach the loop's sums through elementwise equations or pads."""
  chain = {v for v in body.outvars[:num_summed] if isinstance(v, jc.Var)}
  for eqn in reversed(body.eqns):
    if eqn.outvars[0] in chain and (
        eqn.primitive.name in ELEMENTWISE or eqn.primitive.name == 'pad'
    ):
      shape = eqn.outvars[0].aval.shape
      chain.update(
          v for v in eqn.invars if isinstance(v, jc.Var) and v.aval.shape == shape
      )
  return chain


def _box(eqn: Any, invariant: set[Any], sums: set[Any]) -> tuple[Any, _Box | None]:
  """The stacked array that an equation takes a box of, or puts one into, and the box."""
  p = eqn.params
  if eqn.primitive.name == 'slice' and eqn.invars[0] in invariant:
    x = eqn.invars[0]
    if p['strides'] is None or all(s == 1 for s in p['strides']):
      return x, tuple(zip(p['start_indices'], p['limit_indices']))
  elif eqn.primitive.name == 'pad' and eqn.outvars[0] in sums:
    out = eqn.outvars[0]
    if out.aval.shape and all(c[0] >= 0 <= c[1] and c[2] == 0 for c in p['padding_config']):
      sizes = eqn.invars[0].aval.shape
      return out, tuple((c[0], c[0] + n) for c, n in zip(p['padding_config'], sizes))
  return None, None


def _stages_of_invariants(
    body: Any, invariant: set[Any], segments: Segments
) -> dict[Any, frozenset[int]]:
  """Per loop-invariant variable the stages that use it, or something invariant made of it."""
  stages: dict[Any, frozenset[int]] = {}
  for eqn in reversed(body.eqns):
    if eqn.outvars[0] in invariant:
      uses = frozenset().union(*(stages.get(v, frozenset()) for v in eqn.outvars))
    else:
      segment = segments.of(eqn.outvars[0])
      # What follows from the microbatch's inputs alone comes before the first mark.
      uses = frozenset({0 if segment == FREE else segments.stage(segment)})
    for x in eqn.invars:
      if not isinstance(x, jc.Literal):
        stages[x] = stages.get(x, frozenset()) | uses
  return stages


def grids_of_step(jaxpr: Any, num_stages: int) -> dict[Any, Grid]:
  """The grid of every variable of the step, and of its loop's body, that is to be split."""
  loop = loop_of(jaxpr)
  body = loop.params['jaxpr'].jaxpr
  num_consts, num_summed = loop.params['num_consts'], loop.params['num_summed']
  invariant = invariant_vars(body, num_consts)
  sums = _sum_vars(body, num_summed)
  classes = _Classes()
  for eqn in jaxpr.eqns:
    if eqn is not loop:
      classes.unite(_linked(eqn))
  for eqn in body.eqns:
    if eqn.outvars[0] in invariant or eqn.outvars[0] in sums:
      classes.unite(v for v in _linked(eqn) if v in invariant or v in sums)
  for outer, inner in zip(loop.invars[:num_consts], body.invars[:num_consts]):
    if isinstance(outer, jc.Var):
      classes.unite((outer, inner))
  for outer, inner in zip(loop.outvars[:num_summed], body.outvars[:num_summed]):
    if isinstance(inner, jc.Var) and not jc.is_drop(outer):
      classes.unite((outer, inner))

  segments = find_segments(body, num_stages)
  stages_of = _stages_of_invariants(body, invariant, segments)
  cuts: dict[Any, list[tuple[_Box, frozenset[int]]]] = {}
  shapes: dict[Any, tuple[int, ...]] = {}
  for eqn in body.eqns:
    x, box = _box(eqn, invariant, sums)
    if box is None or box[0] == (0, x.aval.shape[0]):
      continue
    out = eqn.outvars[0]
    if out in invariant:
      stages = stages_of.get(out, frozenset())
    else:
      stages = frozenset({segments.stage(max(segments.of(out), 0))})
    root = classes.find(x)
    cuts.setdefault(root, []).append((box, stages))
    shapes[root] = x.aval.shape

  grids = {}
  for root, boxes in cuts.items():
    grid = _grid([box for box, _ in boxes], shapes[root])
    if _separates_stages(grid, boxes):
      grids[root] = grid
  members = [*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)]
  members += [*body.invars, *(v for e in body.eqns for v in e.outvars)]
  out: dict[Any, Grid] = {}
  for v in members:
    if jc.is_drop(v):
      continue
    grid = grids.get(classes.find(v))
    if grid is not None and tuple(v.aval.shape[: grid.rank]) == grid.full_shape:
      out[v] = grid
  return out


def _separates_stages(grid: Grid, boxes: list[tuple[_Box, frozenset[int]]]) -> bool:
  """Whether different cells of the grid serve different stages."""
  served = set()
  for cell in grid.cells():
    inside = [
        stages
        for box, stages in boxes
        if all(a <= start and limit <= b for (start, limit), (a, b) in zip(cell, box))
    ]
    served.add(frozenset().union(*inside))
  return len(served - {frozenset()}) > 1


def _grid(boxes: list[_Box], shape: tuple[int, ...]) -> Grid:
  def cut_axes(box):
    n = 0
    for (start, limit), size in zip(box, shape):
      if (start, limit) == (0, size) and size != 1:
        break
      n += 1
    return n

  rank = max(1, min(cut_axes(box) for box in boxes))
  bounds = []
  for axis in range(rank):
    points = {0, shape[axis]}
    for box in boxes:
      points.update(box[axis])
    bounds.append(tuple(sorted(points)))
  return Grid(tuple(bounds))
