"""Results of a step that are fetched from the actors together, when the first of them is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import numbers
import threading
from typing import Any

import jax
import numpy as np

__all__ = ['LazyArray', 'lazy']


class _Group:
  """Arrays that are fetched in one go, once."""

  def __init__(self, arrays: Sequence[Any], fetch: Callable[[Any], Any]):
    self.arrays = list(arrays)
    self._fetch = fetch
    self._values: list[np.ndarray] | None = None
    self._lock = threading.Lock()  # Pax reads summaries in a thread of its own

  def value(self, i: int) -> np.ndarray:
    with self._lock:
      if self._values is None:
        self._values = [np.asarray(x) for x in self._fetch(self.arrays)]
      return self._values[i]


class LazyArray(np.lib.mixins.NDArrayOperatorsMixin):
  """One array of a group; reading it, computing with it or taking its number fetches all of them.

  It counts as a `numbers.Number` because that is how Pax tells a weighted scalar.
  """

  def __init__(self, group: _Group, i: int):
    self._group = group
    self._i = i

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(self._group.arrays[self._i].shape)

  @property
  def dtype(self) -> Any:
    return self._group.arrays[self._i].dtype

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def size(self) -> int:
    return int(np.prod(self.shape, dtype=np.int64))

  def block_until_ready(self) -> LazyArray:
    """Waits until the step has made the array; does not fetch it."""
    array = self._group.arrays[self._i]
    if hasattr(array, 'block_until_ready'):
      array.block_until_ready()
    return self

  def item(self) -> Any:
    return self.__array__().item()

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    del copy
    value = self._group.value(self._i)
    return value if dtype is None else value.astype(dtype)

  def __float__(self) -> float:
    return float(self.__array__())

  def __int__(self) -> int:
    return int(self.__array__())

  def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
    inputs = [np.asarray(x) if isinstance(x, LazyArray) else x for x in inputs]
    return getattr(ufunc, method)(*inputs, **kwargs)

  def __jax_array__(self) -> jax.Array:
    return jax.numpy.asarray(self.__array__())

  __hash__ = object.__hash__

  def __repr__(self) -> str:
    return f'LazyArray({self.dtype}{list(self.shape)})'


numbers.Number.register(LazyArray)


def lazy(tree: Any, fetch: Callable[[Any], Any]) -> Any:
  """A tree with its leaves as `LazyArray`s of one group.

  Args:
    tree: a pytree of arrays.
    fetch: gives the host arrays of a list of arrays.
  """
  leaves, treedef = jax.tree_util.tree_flatten(tree)
  group = _Group(leaves, fetch)
  return jax.tree_util.tree_unflatten(treedef, [LazyArray(group, i) for i in range(len(leaves))])
