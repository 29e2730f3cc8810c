"""Processes of this host, by pid and start time, so that a pid used again is never meant."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import mmap
import os
import select
import signal
import time

__all__ = ['Process', 'descendants', 'end_all']


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

  def wait(self, interval_s: float) -> None:
    """Returns as soon as it is gone, or within `interval_s` where the kernel can't tell at once."""
    try:
      fd = os.pidfd_open(self.pid)
    except (AttributeError, OSError):
      fd = None
    if fd is not None:
      try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while self.alive():  # the descriptor may be of another process with its pid
          if poll.poll(1000 * interval_s):
            return
      finally:
        os.close(fd)
    while self.alive():
      time.sleep(interval_s)

  def command(self) -> str:
    """Its command line; empty if it is gone."""
    try:
      with open(f'/proc/{self.pid}/cmdline') as file:
        return file.read().replace('\0', ' ')
    except OSError:
      return ''

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


def descendants(pid: int) -> list[Process]:
  """The processes below one, as far as the kernel tells."""
  children: list[int] = []
  try:
    for thread in os.listdir(f'/proc/{pid}/task'):
      with open(f'/proc/{pid}/task/{thread}/children') as file:
        children += [int(word) for word in file.read().split()]
  except OSError:
    pass  # a thread or the process ended meanwhile, or the kernel keeps no such list
  below = [process for child in children for process in descendants(child)]
  return [Process.running(child) for child in children] + below


def end_all(processes: Sequence[Process], grace_s: float, timeout_s: float) -> list[Process]:
  """Gives processes `grace_s` to end by themselves, then kills them; returns who is left."""
  for limit in (grace_s, timeout_s):
    deadline = time.monotonic() + limit
    while any(process.alive() for process in processes) and time.monotonic() < deadline:
      time.sleep(0.01)
    for process in processes:
      process.kill()
  return [process for process in processes if process.alive()]
