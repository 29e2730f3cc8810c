"""Memory of the host that a process has freed but holds on to."""

from __future__ import annotations

import ctypes
import functools

__all__ = ['give_back']


@functools.lru_cache(maxsize=1)
def _malloc_trim():
  try:
    return ctypes.CDLL(None).malloc_trim
  except (AttributeError, OSError):  # not glibc
    return lambda pad: 0


def give_back() -> None:
  """Returns what has been freed to the host, as far as the C library can.

  glibc keeps freed memory, for each thread by itself, in amounts that grow with the largest arrays
  (mallopt(3), M_TRIM_THRESHOLD): threads that read arrays of a checkpoint in turn would each keep
  one. Takes milliseconds.
  """
  _malloc_trim()(0)
