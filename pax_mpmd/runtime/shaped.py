"""What follows from an array's shape and dtype; shared by all that stand for an array."""

from __future__ import annotations

import numpy as np

__all__ = ['Shaped']


class Shaped:
  """Base of classes with `shape` and `dtype`, wherever their data is."""

  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    return int(np.prod(self.shape, dtype=np.int64))

  @property
  def nbytes(self) -> int:
    return self.size * self.dtype.itemsize

  def __len__(self) -> int:
    if not self.shape:
      raise TypeError('len() of a scalar array')
    return self.shape[0]
