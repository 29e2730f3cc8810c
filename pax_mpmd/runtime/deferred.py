"""Arrays that are made where they are needed: `DeferredArray` and `deferred`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pax_mpmd.compile.program import Executable
from pax_mpmd.compile.results import Result
from pax_mpmd.compile.results import separate_results
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.devices import ActorDevices
from pax_mpmd.runtime.shaped import Shaped
from pax_mpmd.runtime.sources import Computed
from pax_mpmd.runtime.sources import Constant
from pax_mpmd.runtime.sources import Source

__all__ = ['DeferredArray', 'deferred']


class DeferredArray(Shaped, abc.ABC):
  """An array that nobody has made yet. A step's actors make the parts of it that they need.

  Given to a function of `mpmd_jit`, it never exists as a whole anywhere (unless an actor needs all
  of it). Reading it (`numpy.asarray`) makes it in this process, each time.

  Attributes:
    shape: shape of the array.
    dtype: its dtype.
  """

  def __init__(self, shape: Sequence[int], dtype: np.dtype):
    self.shape = tuple(shape)
    self.dtype = np.dtype(dtype)

  @abc.abstractmethod
  def piece(self, start: Sequence[int], shape: Sequence[int]) -> Source:
    """What makes the box that begins at `start` and is of `shape`."""

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    source = self.piece((0,) * self.ndim, self.shape)
    here = ActorDevices(xla.local_devices()[:1])
    made = source.make(here.compile, lambda x: xla.to_device(x, here.devices[0]))
    return np.asarray(made, dtype)

  def __jax_array__(self) -> jax.Array:
    return jax.numpy.asarray(np.asarray(self))

  def __getitem__(self, index: Any) -> np.ndarray:
    return np.asarray(self)[index]

  def __int__(self) -> int:
    return int(np.asarray(self))

  def __float__(self) -> float:
    return float(np.asarray(self))

  def delete(self) -> None:
    """As for a `jax.Array`; there is nothing to free."""

  def item(self, *index: int) -> Any:
    return np.asarray(self).item(*index)

  def __repr__(self) -> str:
    return f'{type(self).__name__}({self.dtype}{list(self.shape)})'


xla.register_array_type(DeferredArray)


class _DeferredResult(DeferredArray):
  """A result of a function that is still to be computed."""

  def __init__(self, result: Result, lowered: dict[Any, Executable]):
    super().__init__(result.aval.shape, result.aval.numpy_dtype)
    self._result = result
    self._lowered = lowered

  def piece(self, start: Sequence[int], shape: Sequence[int]) -> Source:
    result = self._result
    if result.jaxpr is None:
      (value,) = result.operands
      index = tuple(slice(a, a + n) for a, n in zip(start, shape))
      return Constant(np.asarray(value[index]))
    key = result.fingerprint, tuple(shape)
    if key not in self._lowered:
      self._lowered[key] = result.lower(shape)
    return Computed(self._lowered[key], result.operands, tuple(start))


def deferred(fn: Callable[..., Any], *args: Any) -> Any:
  """Calls `fn` later, piece by piece, on the actors that need its results.

  For initial states: `state = deferred(init, key)` computes nothing large; the first call of a
  function of `mpmd_jit` that takes the state has each actor make its own part, one array at a time.

    state = pax_mpmd.deferred(init_state, jax.random.PRNGKey(0))
    state, loss = train_step(state, batch)

  Args:
    fn: a function of pytrees of arrays that JAX can trace.
    *args: its arguments.

  Returns:
    The tree of `fn`'s results, as `DeferredArray`s. Each is computed by itself: what several
    results share is computed several times, unless it is small (random keys).

  Raises:
    PartitionError: `fn` calls back into Python, or has other side effects.
  """
  tree, results = separate_results(fn, *args)
  lowered: dict[Any, Executable] = {}
  return jax.tree_util.tree_unflatten(tree, [_DeferredResult(r, lowered) for r in results])
