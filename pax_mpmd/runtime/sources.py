"""What makes an array on an actor. Workers import this, so it needs jax and numpy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Protocol

import numpy as np

from pax_mpmd.compile.program import Executable
from pax_mpmd.runtime import xla

__all__ = ['Computed', 'Constant', 'Source']

Compiler = Callable[[Executable], Callable[[Sequence[xla.Array]], list[xla.Array]]]


class Source(Protocol):
  """Makes one box of an array, on an actor. Pickles, and needs nothing that workers don't have."""

  @property
  def executable(self) -> Executable | None:
    """The program it runs, if any, so that those of many sources compile side by side."""

  @property
  def owned(self) -> bool:
    """Whether a box on the host is fresh memory of `xla.empty_aligned`, for the taking."""

  def make(self, compiled: Compiler, to_device: Callable[[np.ndarray], xla.Array]) -> Any:
    """Makes the box.

    Args:
      compiled: gives the compiled program of an executable.
      to_device: puts an argument of a program on its device.

    Returns:
      The box, on the host or on one device.
    """


@dataclasses.dataclass(frozen=True)
class Constant:
  """A `Source` that is the box itself."""

  value: np.ndarray
  executable: None = None
  owned: bool = False

  def make(self, compiled: Compiler, to_device: Callable[[np.ndarray], xla.Array]) -> Any:
    del compiled, to_device
    return self.value


@dataclasses.dataclass(frozen=True)
class Computed:
  """A `Source` that runs a program of operands and the box's first index."""

  executable: Executable
  operands: tuple[np.ndarray, ...]
  start: tuple[int, ...]
  owned: bool = False

  def __reduce__(self) -> Any:
    # The program itself goes ahead, once for all boxes that it makes.
    return Computed, (dataclasses.replace(self.executable, module=b''), self.operands, self.start)

  def make(self, compiled: Compiler, to_device: Callable[[np.ndarray], xla.Array]) -> Any:
    args = [*self.operands, np.asarray(self.start, np.int32)]
    (box,) = compiled(self.executable)([to_device(x) for x in args])
    return box
