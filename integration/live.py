"""A command line under way: what it has printed, all its processes, signals to it, its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import os
from pathlib import Path
import re
import signal
import subprocess
import threading
import time
import uuid

__all__ = ['Live', 'repeat_until', 'state_of']

_MARKER = 'PAX_MPMD_TEST_RUN'


def repeat_until(condition, timeout: float, interval: float = 0.05) -> bool:
  """Calls `condition` until it returns something true; False if it doesn't within `timeout` s."""
  deadline = time.monotonic() + timeout
  while True:
    if condition():
      return True
    if time.monotonic() > deadline:
      return False
    time.sleep(interval)


def state_of(pid: int) -> str:
  """The state of a process as one letter: T is stopped, Z gone."""
  try:
    return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
  except OSError:
    return 'Z'


def _send(pid: int, number: int) -> bool:
  try:
    os.kill(pid, number)
    return True
  except ProcessLookupError:
    return False


class Live:
  """A running command line.

  A variable in its environment marks every process that it starts, also those that have left its
  session or lost their parent. As a context manager it leaves none of them behind.

  Args:
    command: program and arguments.
    env: its whole environment.
    cwd: its working folder.
  """

  def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path):
    self.command = list(command)
    self.started = time.monotonic()
    self._entry = f'{_MARKER}={uuid.uuid4().hex}'
    name, value = self._entry.split('=')
    self._lines: list[tuple[float, str]] = []
    self._process = subprocess.Popen(
        self.command,
        cwd=cwd,
        env={**env, name: value},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors='replace',
        start_new_session=True,
    )
    self.pid = self._process.pid
    self._ended: float | None = None
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._waiter = threading.Thread(target=self._watch, daemon=True)
    self._reader.start()
    self._waiter.start()

  def __enter__(self) -> Live:
    return self

  def __exit__(self, *exc_info) -> None:
    self.kill()

  def _read(self) -> None:
    for line in self._process.stdout:
      self._lines.append((time.monotonic(), line))

  def _watch(self) -> None:
    self._process.wait()
    self._ended = time.monotonic()

  @property
  def output(self) -> str:
    """What it has printed so far, both streams together."""
    return ''.join(line for _, line in list(self._lines))

  @property
  def seconds(self) -> float:
    """How long it has run."""
    return (self._ended or time.monotonic()) - self.started

  @property
  def seconds_after_last_words(self) -> float:
    """From its last line of output to its end, or until now."""
    last = self._lines[-1][0] if self._lines else self.started
    return (self._ended or time.monotonic()) - last

  def wait_for(self, pattern: str, timeout: float = 240) -> re.Match[str]:
    """Waits for a line in which `pattern` is found.

    Raises:
      AssertionError: the process ended, or time was up, before such a line came.
    """
    found: list[re.Match[str]] = []

    def look() -> bool:
      over = self._ended is not None
      if over:
        self._reader.join(5)
      for _, line in list(self._lines):
        if match := re.search(pattern, line):
          found.append(match)
          return True
      return over

    in_time = repeat_until(look, timeout)
    if not found:
      what = f'ended without a line like {pattern!r}' if in_time else (
          f'no line like {pattern!r} within {timeout} s')
      raise AssertionError(self.failure(what))
    return found[0]

  def send(self, number: int) -> None:
    """Sends a signal to the process itself, not to those it has started."""
    self._process.send_signal(number)

  def wait(self, timeout: float) -> int:
    """Waits for its end; returns the exit status (negative: the signal that ended it).

    Raises:
      AssertionError: it took longer.
    """
    self._waiter.join(timeout)
    if self._ended is None:
      raise AssertionError(self.failure(f'took over {timeout} s'))
    # Somebody who outlives it may still hold its output open.
    self._reader.join(2)
    return self._process.returncode

  def family(self) -> list[int]:
    """The pids of all its processes that are alive, itself included."""
    entry = self._entry.encode()
    found = []
    for folder in Path('/proc').iterdir():
      if folder.name.isdigit():
        try:
          if entry in (folder / 'environ').read_bytes().split(b'\0'):
            found.append(int(folder.name))
        except OSError:
          pass  # gone meanwhile, or somebody else's
    return found

  def workers(self) -> dict[int, int]:
    """The processes of its pipeline actors, {rank: pid}, by the sockets they listen on."""
    ranks = {}
    for line in Path('/proc/net/unix').read_text().splitlines()[1:]:
      fields = line.split()
      if len(fields) == 8 and fields[7].startswith('@pax-mpmd/') and fields[3] == '00010000':
        ranks[f'socket:[{fields[6]}]'] = int(fields[7].rpartition('/')[2])
    found = {}
    for pid in self.family():
      try:
        links = [os.readlink(path) for path in Path(f'/proc/{pid}/fd').iterdir()]
      except OSError:
        continue
      found.update({ranks[link]: pid for link in links if link in ranks})
    return found

  @contextlib.contextmanager
  def frozen(self) -> Iterator[None]:
    """Stops all its processes for a moment, so that what they are doing can be looked at."""
    stopped = [pid for pid in self.family() if _send(pid, signal.SIGSTOP)]
    try:
      repeat_until(lambda: all(state_of(pid) in 'TZ' for pid in stopped), 5, 0.001)
      yield
    finally:
      for pid in stopped:
        _send(pid, signal.SIGCONT)

  def gone(self, timeout: float) -> bool:
    """Waits until none of its processes is left; False if some are after `timeout` s."""
    return repeat_until(lambda: not self.family(), timeout)

  def kill(self) -> None:
    """Ends whatever is left of it."""

    def kill_all() -> bool:
      pids = self.family()
      for pid in pids:
        _send(pid, signal.SIGKILL)
      return not pids

    repeat_until(kill_all, 10)
    self._waiter.join(10)
    self._reader.join(2)

  def failure(self, what: str) -> str:
    """A message: what went wrong, the command and the end of its output."""
    tail = '\n'.join(self.output.splitlines()[-60:])
    return f'{what}: {" ".join(self.command)}\n{tail}'

  def describe_family(self) -> str:
    """The command lines of those left, for a message."""
    lines = []
    for pid in self.family():
      try:
        words = Path(f'/proc/{pid}/cmdline').read_bytes().replace(b'\0', b' ').decode()
      except OSError:
        continue
      lines.append(f'{pid}: {words[:150]}')
    return '\n'.join(lines)
