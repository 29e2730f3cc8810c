"""Orbax reads and writes a state piece by piece: each actor its own, the driver none.

Orbax knows how to name, create, commit and keep checkpoints. What it asks of an array type (a
`TypeHandler`) is done here for arrays on actors: the driver writes an array's metadata, and the
actors write their boxes beside it. Restored arrays are descriptions at first; the step that takes
them has each actor read what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import json
import math
from typing import Any

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from pax_mpmd.compile.program import Aval
from pax_mpmd.errors import CheckpointError
from pax_mpmd.runtime import stored
from pax_mpmd.runtime.arrays import MpmdArray
from pax_mpmd.runtime.deferred import DeferredArray

__all__ = ['StoredArray', 'install', 'lazily']


class StoredArray(DeferredArray):
  """An array of a checkpoint that has not been read yet.

  Attributes:
    folder: of the checkpoint's arrays.
  """

  def __init__(
      self,
      name: str,
      spec: dict[str, Any],
      shape: Sequence[int],
      dtype: np.dtype,
      folder: epath.Path,
  ):
    super().__init__(shape, dtype)
    self.folder = folder
    self._name = name
    self._spec = json.dumps(spec)

  def piece(self, start: Sequence[int], shape: Sequence[int]) -> stored.StoredBox:
    return stored.StoredBox(
        self._name, self._spec, tuple(start), tuple(shape), Aval((), self.dtype.name).dtype
    )


class _PiecewiseHandler(type_handlers.ArrayHandler):
  """Orbax' handler of `jax.Array`s, and of arrays on actors.

  Attributes:
    lazy: whether arrays are restored as `StoredArray`s.
  """

  lazy = False

  async def serialize(
      self,
      values: Sequence[Any],
      infos: Sequence[type_handlers.ParamInfo],
      args: Sequence[ocp.SaveArgs] | None = None,
  ) -> list[Any]:
    args = args or [ocp.SaveArgs()] * len(values)
    there = [i for i, value in enumerate(values) if isinstance(value, MpmdArray)]
    here = [i for i in range(len(values)) if i not in set(there)]
    futures: list[Any] = []
    if here:
      arrays = [jax.numpy.asarray(values[i]) for i in here]
      futures += await super().serialize(arrays, [infos[i] for i in here], [args[i] for i in here])
    if there:
      futures += await self._write_on_actors([(values[i], infos[i], args[i]) for i in there])
    return futures

  async def _write_on_actors(self, wanted: Sequence[tuple[MpmdArray, Any, Any]]) -> list[Any]:
    boxes = []
    created = []
    for array, info, arg in wanted:
      several = info.is_ocdbt_checkpoint
      if not several:
        created.append(stored.open_store(self._spec(array, info, arg), create=True))
      for start, shape, buffers in array.pieces:
        # Databases of several writers are merged when all are done; files are shared.
        spec = self._spec(array, info, arg, f'mpmd{buffers[0].actor}' if several else None)
        dtype = Aval((), array.dtype.name).dtype
        box = stored.StoredBox(info.name, json.dumps(spec), start, shape, dtype, create=several)
        boxes.append((buffers[0], box))
    for future in created:
      await future
    return wanted[0][0].runtime.write(boxes)

  def _spec(
      self, array: MpmdArray, info: Any, arg: Any, process: str | None = None
  ) -> dict[str, Any]:
    """TensorStore's JSON spec for writing an array."""
    spec = self._get_json_tspec(
        info, use_ocdbt=info.is_ocdbt_checkpoint, process_index=process
    )
    # A chunk belongs to one piece, so that no two actors write to the same file.
    chunks = _common_box(array.shape, [(start, shape) for start, shape, _ in array.pieces])
    spec['metadata'] = {
        'shape': list(array.shape),
        'chunks': [max(1, n) for n in chunks],
        'compressor': {'id': 'zstd'},
    }
    if process is not None:
      spec = type_handlers._add_write_tspec_ocdbt_options(spec)  # pylint: disable=protected-access
    name = array.dtype.name
    spec['dtype'] = np.dtype(arg.dtype).name if arg.dtype is not None else name
    return {'driver': 'cast', 'dtype': name, 'base': spec}

  async def deserialize(
      self,
      infos: Sequence[type_handlers.ParamInfo],
      args: Sequence[ocp.RestoreArgs] | None = None,
  ) -> list[Any]:
    args = args or [ocp.RestoreArgs()] * len(infos)
    if not self.lazy:
      return await super().deserialize(infos, args)
    opened = []
    for info in infos:
      spec = self._get_json_tspec(info, use_ocdbt=bool(info.is_ocdbt_checkpoint))
      opened.append((info, spec, stored.open_store(spec)))
    arrays = []
    for (info, spec, future), arg in zip(opened, args):
      try:
        store = await future
      except Exception as error:  # TensorStore raises ValueError for nearly everything
        raise CheckpointError(f'{info.name} can\'t be read: {error}') from error
      dtype = np.dtype(arg.dtype or store.dtype.numpy_dtype)
      spec = {'driver': 'cast', 'dtype': dtype.name, 'base': spec}
      shape = getattr(arg, 'global_shape', None)
      shape = store.shape if shape is None else shape
      arrays.append(StoredArray(info.name, spec, shape, dtype, info.parent_dir))
    return arrays


def _common_box(
    shape: Sequence[int], pieces: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[int]:
  """The shape of the largest boxes that every piece (start, shape) is made of."""
  return [
      math.gcd(size, *(start[k] for start, _ in pieces), *(box[k] for _, box in pieces))
      for k, size in enumerate(shape)
  ]


def install() -> _PiecewiseHandler:
  """Makes Orbax write arrays on actors; does nothing the second time.

  For `jax.Array`s nothing changes.
  """
  present = type_handlers.get_type_handler(jax.Array)
  if isinstance(present, _PiecewiseHandler):
    return present
  handler = _PiecewiseHandler(metadata_key=present._metadata_key)  # pylint: disable=protected-access
  type_handlers.register_type_handler(
      jax.Array,
      handler,
      func=lambda ty: issubclass(ty, (jax.Array, MpmdArray, DeferredArray)),
      override=True,
  )
  return handler


@contextlib.contextmanager
def lazily() -> Iterator[None]:
  """Inside, what Orbax restores as `jax.Array`s are `StoredArray`s."""
  handler = install()
  before, handler.lazy = handler.lazy, True
  try:
    yield
  finally:
    handler.lazy = before
