"""How arrays travel: as bytes; between driver and actors in messages of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ['MESSAGE_BYTES', 'flat_bytes', 'groups']

# No message needs more memory on the way (Ray's object store) than about this.
MESSAGE_BYTES = 16 << 20


def flat_bytes(array: np.ndarray) -> np.ndarray:
  """uint8[n]: the array's own memory if it is contiguous, else a copy's. For bfloat16 too."""
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def groups(sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
  """Cuts arrays of these many bytes into messages: lists of (array, first byte, last byte + 1)."""
  groups: list[list[tuple[int, int, int]]] = []
  room = 0
  for i, size in enumerate(sizes):
    start = 0
    while True:
      if not groups or room <= 0:
        groups.append([])
        room = MESSAGE_BYTES
      stop = min(size, start + room)
      groups[-1].append((i, start, stop))
      room -= stop - start
      start = stop
      if start >= size:
        break
  return groups
