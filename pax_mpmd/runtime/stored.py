"""Boxes of arrays in a checkpoint, read and written by the actor that holds them.

Workers import this; it needs tensorstore, which comes with Orbax.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import json
from typing import Any

import numpy as np

from pax_mpmd.compile.program import dtype_named
from pax_mpmd.errors import CheckpointError
from pax_mpmd.runtime import xla

__all__ = ['StoredBox', 'open_store']


@functools.lru_cache(maxsize=1)
def _context() -> Any:
  import tensorstore as ts

  # As JAX's and Orbax' own; the specs of OCDBT name this cache.
  return ts.Context({
      'file_io_concurrency': {'limit': 128},
      'cache_pool#ocdbt': {'total_bytes_limit': 100_000_000},
  })


def open_store(spec: dict[str, Any], **options: Any) -> Any:
  """A future of the TensorStore that a JSON spec describes."""
  import tensorstore as ts

  return ts.open(ts.Spec(spec), context=_context(), open=True, **options)


@dataclasses.dataclass(frozen=True)
class StoredBox:
  """A box of an array on disk: a `Source` that reads it, and a `Sink` that writes it.

  Attributes:
    name: of the array, for messages.
    spec: TensorStore's JSON spec of the whole array, with all of its metadata if it is written.
    start: the first index of the box.
    shape: its shape.
    dtype: name of its dtype.
    create: writing makes the array's metadata too.
  """

  name: str
  spec: str
  start: tuple[int, ...]
  shape: tuple[int, ...]
  dtype: str
  create: bool = False
  executable: None = None
  owned: bool = True

  def make(self, compiled: Callable[..., Any], to_device: Callable[..., Any]) -> np.ndarray:
    """Reads the box; what lies beyond the stored array is zeros, as in Orbax.

    Raises:
      CheckpointError: it can't be read.
    """
    import tensorstore as ts

    del compiled, to_device
    box = xla.empty_aligned(self.shape, dtype_named(self.dtype))
    try:
      store = open_store(json.loads(self.spec)).result()
      stops = [
          min(start + size, have)
          for start, size, have in zip(self.start, self.shape, store.shape)
      ]
      there = tuple(slice(a, max(a, b)) for a, b in zip(self.start, stops))
      mine = tuple(slice(0, s.stop - s.start) for s in there)
      if any(s.stop - s.start < size for s, size in zip(there, self.shape)):
        box.fill(0)
      if all(s.stop > s.start for s in there):
        # Straight into the box, which shares its memory with this view of it.
        ts.array(box, context=_context())[mine].write(store[there]).result()
    except Exception as error:  # TensorStore raises ValueError for nearly everything
      raise CheckpointError(f'{self.name} can\'t be read: {error}') from error
    return box

  def write(self, array: np.ndarray) -> Any:
    """Begins to write the box; see `Sink`."""
    options = {'create': True} if self.create else {'assume_metadata': True}
    store = open_store(json.loads(self.spec), **options).result()
    there = tuple(slice(a, a + n) for a, n in zip(self.start, self.shape))
    return store[there].write(array) if there else store.write(array)
