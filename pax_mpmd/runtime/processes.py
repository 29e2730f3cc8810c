"""Processes of this host, by pid and start time, so that a pid used again is never meant."""

from __future__ import annotations

import dataclasses
import mmap
import os
import signal
import time
from typing import Sequence

__all__ = ['Process', 'end_all']


def _stat(pid: int) -> list[str] | None:
  """State, parent pid, ... from /proc; None if there is no such process."""
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()
  except OSError:
    return None


@dataclasses.dataclass(frozen=True)
class Process:
  """One process of this host."""

  pid: int
  start_time: str

  @classmethod
  def running(cls, pid: int) -> Process:
    """The process that has this pid now."""
    stat = _stat(pid)
    return cls(pid, stat[19] if stat else '')

  def alive(self) -> bool:
    """Whether it still runs or is stopped; one that only waits to be reaped is gone."""
    stat = _stat(self.pid)
    return stat is not None and stat[0] not in 'ZX' and stat[19] == self.start_time

  def kill(self) -> None:
    if self.alive():
      try:
        os.kill(self.pid, signal.SIGKILL)
      except OSError:
        pass  # just gone, or not ours to kill

  def map_shared(self, fd: int) -> memoryview | None:
    """int64 words of a memfd that the process has open as `fd`; None if that isn't allowed."""
    try:
      with open(f'/proc/{self.pid}/fd/{fd}', 'rb') as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)).cast('q')
    except OSError:
      return None


def end_all(processes: Sequence[Process], grace_s: float, timeout_s: float) -> list[Process]:
  """Gives processes `grace_s` to end by themselves, then kills them; returns who is left."""
  for limit in (grace_s, timeout_s):
    deadline = time.monotonic() + limit
    while any(process.alive() for process in processes) and time.monotonic() < deadline:
      time.sleep(0.01)
    for process in processes:
      process.kill()
  return [process for process in processes if process.alive()]
