"""`MpmdArray`: an array whose pieces live on actors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pax_mpmd.compile.program import Aval
from pax_mpmd.errors import MpmdError
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.base import Runtime
from pax_mpmd.runtime.buffers import Buffer
from pax_mpmd.runtime.shaped import Shaped

__all__ = ['MpmdArray', 'device_get']

PieceBuffers = tuple[tuple[int, ...], tuple[int, ...], Sequence[Buffer]]


class MpmdArray(Shaped):
  """An array that a step made, in pieces on the actors. Reading it fetches it.

  Operators compute with numpy on what was fetched, which can't be written to.

  Attributes:
    shape: shape of the whole array.
    dtype: its dtype.
  """

  def __init__(self, aval: Aval, pieces: Sequence[PieceBuffers], runtime: Runtime):
    """Makes an array of pieces that tile it.

    Args:
      aval: shape and dtype of the whole.
      pieces: per piece (start, shape, the buffers that hold it, one per actor that does).
      runtime: the runtime of the buffers.
    """
    self.shape = tuple(aval.shape)
    self.dtype = aval.numpy_dtype
    self._aval = aval
    self._pieces = tuple((tuple(s), tuple(n), tuple(b)) for s, n, b in pieces)
    self._runtime = runtime
    self._host: np.ndarray | None = None
    self._deleted = False

  @property
  def actors(self) -> tuple[int, ...]:
    """The actors that hold a piece of it, ascending."""
    return tuple(sorted({b.actor for _, _, buffers in self._pieces for b in buffers}))

  @property
  def pieces(self) -> tuple[PieceBuffers, ...]:
    """The boxes that tile it: (start, shape, the buffers that hold it)."""
    self._check_alive()
    return self._pieces

  @property
  def runtime(self) -> Runtime:
    """The runtime whose actors hold it."""
    return self._runtime

  def is_deleted(self) -> bool:
    """Whether the array was given to a step that has used its memory up."""
    return self._deleted

  def delete(self) -> None:
    """Gives the array up; the actors may free it."""
    self._deleted = True
    self._pieces = ()
    self._host = None

  def buffer_on(
      self, actor: int, start: tuple[int, ...], shape: tuple[int, ...]
  ) -> Buffer | None:
    """The buffer on `actor` that holds exactly the box at `start` of `shape`, if there is one."""
    self._check_alive()
    for piece_start, piece_shape, buffers in self._pieces:
      if piece_start == tuple(start) and piece_shape == tuple(shape):
        return next((b for b in buffers if b.actor == actor), None)
    return None

  def copies(self) -> list[np.ndarray]:
    """Every copy of a one-piece array, one per actor that holds it; for tests and debugging."""
    self._check_alive()
    ((_, _, buffers),) = self._pieces
    return self._runtime.fetch(list(buffers))

  def block_until_ready(self) -> MpmdArray:
    """Waits until the array has been made.

    Raises:
      ActorError: the step that makes it failed.
    """
    self._check_alive()
    self._runtime.wait([b for _, _, buffers in self._pieces for b in buffers])
    return self

  def _check_alive(self) -> None:
    if self._deleted:
      raise MpmdError(
          f'This array {self._aval} was donated to a step (donate_argnums), which has used its'
          ' memory up. Read it before the step, or take the result of the step in its place.'
      )

  def __copy__(self) -> MpmdArray:
    return self

  def __reduce_ex__(self, protocol: Any) -> Any:
    raise MpmdError(
        f'{self!r} lies on actors, so it can\'t be pickled, nor copied by copy.deepcopy. Fetch it'
        ' first: numpy.asarray(array), or pax_mpmd.device_get(tree) for a whole tree.'
    )

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    device_get([self])
    host = self._host
    assert host is not None
    return host if dtype is None else host.astype(dtype)

  def __jax_array__(self) -> jax.Array:
    return jax.numpy.asarray(np.asarray(self))

  def __getitem__(self, index: Any) -> np.ndarray:
    return np.asarray(self)[index]

  def __iter__(self):
    return iter(np.asarray(self))

  def item(self, *index: int) -> Any:
    return np.asarray(self).item(*index)

  def tolist(self) -> Any:
    return np.asarray(self).tolist()

  def __float__(self) -> float:
    return float(np.asarray(self))

  def __int__(self) -> int:
    return int(np.asarray(self))

  def __bool__(self) -> bool:
    return bool(np.asarray(self))

  def __index__(self) -> int:
    return self.item().__index__()

  def __format__(self, spec: str) -> str:
    return format(self.item() if not self.shape else np.asarray(self), spec)

  def __repr__(self) -> str:
    state = 'deleted' if self._deleted else f'on actors {list(self.actors)}'
    return f'MpmdArray({self._aval}, {state})'


def _operator(name: str) -> Any:
  def apply(self: MpmdArray, *others: Any) -> Any:
    return getattr(np.asarray(self), name)(*others)

  apply.__name__ = name
  return apply


for _name in 'eq ne lt le gt ge neg pos abs invert'.split():
  setattr(MpmdArray, f'__{_name}__', _operator(f'__{_name}__'))
for _name in 'add sub mul truediv floordiv mod pow matmul and or xor lshift rshift'.split():
  setattr(MpmdArray, f'__{_name}__', _operator(f'__{_name}__'))
  setattr(MpmdArray, f'__r{_name}__', _operator(f'__r{_name}__'))
MpmdArray.__hash__ = None  # as that of every array: equality is by element

xla.register_array_type(MpmdArray)


def device_get(tree: Any) -> Any:
  """A pytree with its MpmdArrays fetched as numpy arrays; one message per actor for all of them.

  Raises:
    ActorError: a step that makes one of them failed.
    MpmdError: one of them was donated.
  """
  leaves, treedef = jax.tree_util.tree_flatten(tree)
  missing: dict[int, list[MpmdArray]] = {}
  for leaf in leaves:
    if isinstance(leaf, MpmdArray):
      leaf._check_alive()
      if leaf._host is None:
        arrays = missing.setdefault(id(leaf._runtime), [])
        if all(leaf is not other for other in arrays):
          arrays.append(leaf)
  for arrays in missing.values():
    buffers = [piece[2][0] for x in arrays for piece in x._pieces]
    parts = iter(arrays[0]._runtime.fetch(buffers))
    for x in arrays:
      host = _assemble(x, [next(parts) for _ in x._pieces]).view()
      host.flags.writeable = False  # readers share it
      x._host = host
  out = [x._host if isinstance(x, MpmdArray) else x for x in leaves]
  return jax.tree_util.tree_unflatten(treedef, out)


def _assemble(array: MpmdArray, parts: Sequence[np.ndarray]) -> np.ndarray:
  if len(parts) == 1 and array._pieces[0][1] == array.shape:
    return parts[0]
  whole = np.empty(array.shape, array.dtype)
  for (start, shape, _), part in zip(array._pieces, parts):
    whole[tuple(slice(a, a + n) for a, n in zip(start, shape))] = part
  return whole
