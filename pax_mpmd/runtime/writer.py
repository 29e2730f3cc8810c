"""Writes an actor's arrays somewhere while it goes on computing."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses
import queue
import threading
from typing import Any, Protocol

import numpy as np

from pax_mpmd.runtime import xla

__all__ = ['Sink', 'Writer']

# Bytes that may be on their way at a time; a larger array goes alone.
_IN_FLIGHT_BYTES = 8 << 20


class Sink(Protocol):
  """Takes one array. Pickles, and needs nothing that workers don't have."""

  def write(self, array: np.ndarray) -> Any:
    """Begins to write it.

    Returns:
      Two futures: `copy` is done when `array` isn't read any more, `commit` when all is written.
    """


@dataclasses.dataclass
class _Job:
  """`array` is dropped, and `copied` set, when it has been read; so is it after an error."""

  array: xla.Array | None
  sink: Sink
  ticket: int
  copied: threading.Event


class Writer:
  """A thread that writes arrays in the order in which they come.

  An array is kept, as it is and where it is, until it has been read; a program that is to take its
  memory over waits for that (`wait_for`). So nothing is copied in advance, and at most the one
  array that is being written exists twice.
  """

  def __init__(self):
    self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    self._changed = threading.Condition()
    self._unfinished: dict[int, int] = {}  # ticket -> number of arrays
    self._errors: dict[int, str] = {}
    self._held: dict[int, list[_Job]] = {}  # id of array -> jobs that still read it
    self._thread: threading.Thread | None = None
    self.written = 0  # arrays, since the start

  @property
  def busy(self) -> bool:
    return bool(self._unfinished)

  def add(self, ticket: int, arrays: Sequence[tuple[xla.Array, Sink]]) -> None:
    """Queues arrays; `finish(ticket)` waits for them."""
    jobs = [_Job(array, sink, ticket, threading.Event()) for array, sink in arrays]
    with self._changed:
      self._unfinished[ticket] = len(jobs)
      for job in jobs:
        self._held.setdefault(id(job.array), []).append(job)
      if not jobs:
        del self._unfinished[ticket]
      self._errors.setdefault(ticket, '')
      self._changed.notify_all()
    if self._thread is None and jobs:
      self._thread = threading.Thread(target=self._work, name='mpmd-writer', daemon=True)
      self._thread.start()
    for job in jobs:
      self._jobs.put(job)

  def finish(self, ticket: int) -> str:
    """Waits until `ticket` has been added and its arrays are written; returns what went wrong."""
    with self._changed:
      self._changed.wait_for(
          lambda: ticket in self._errors and ticket not in self._unfinished
      )
      return self._errors.pop(ticket)

  def reads(self, array: xla.Array) -> bool:
    """Whether the array must not be overwritten yet."""
    return id(array) in self._held

  def wait_for(self, array: xla.Array) -> None:
    """Waits until the array may be overwritten."""
    for job in list(self._held.get(id(array), ())):
      job.copied.wait()

  def close(self) -> None:
    """Ends the thread after what is queued."""
    self._jobs.put(None)

  def _work(self) -> None:
    flying: collections.deque[tuple[_Job, int, Callable[[], Any]]] = collections.deque()
    room = _IN_FLIGHT_BYTES
    while True:
      # Something new to begin, or else the oldest to finish.
      job = None
      if room > 0:
        try:
          job = self._jobs.get(block=not flying)
        except queue.Empty:
          pass
        else:
          if job is None:
            for job, _, commit in flying:
              self._finish(job, commit)
            return
      if job is not None:
        nbytes = job.array.nbytes
        commit = self._begin(job)
        if commit is not None:
          flying.append((job, nbytes, commit))
          room -= nbytes
        continue
      job, nbytes, commit = flying.popleft()
      room += nbytes
      self._finish(job, commit)

  def _finish(self, job: _Job, commit: Callable[[], Any]) -> None:
    try:
      commit()
    except Exception as error:
      self._done(job, error)
    else:
      self._done(job, None)

  def _begin(self, job: _Job) -> Callable[[], Any] | None:
    try:
      futures = job.sink.write(np.asarray(job.array))
      futures.copy.result()
    except Exception as error:
      self._release(job)
      self._done(job, error)
      return None
    self._release(job)
    return futures.commit.result

  def _release(self, job: _Job) -> None:
    with self._changed:
      jobs = self._held[id(job.array)]
      jobs.remove(job)
      if not jobs:
        del self._held[id(job.array)]
    job.array = None
    job.copied.set()

  def _done(self, job: _Job, error: Exception | None) -> None:
    with self._changed:
      self.written += 1
      if error is not None and not self._errors[job.ticket]:
        self._errors[job.ticket] = str(error) or type(error).__name__
      left = self._unfinished[job.ticket] - 1
      self._unfinished[job.ticket] = left
      if not left:
        del self._unfinished[job.ticket]
        self._changed.notify_all()
