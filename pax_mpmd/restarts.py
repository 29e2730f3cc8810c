"""Starting the same command again, in the same process, after an actor has failed.

The process ends as it always does: its actors and Ray are stopped, threads are joined, files
flushed, all exit handlers run. The last of these then replaces the program by a new start of the
same command (exec): the pid, the output and the place in the process tree stay, and nothing of the
old program's state does.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
import os
import signal
import sys
import threading
import time

from pax_mpmd import signals
from pax_mpmd.runtime import processes

__all__ = ['Restarts', 'restarts']

# '<restarts used> <time of the first start>', for the new program.
VARIABLE = 'PAX_MPMD_RESTARTED'
# What an exit may take before the new start comes anyway.
LIMIT_S = 120.0


class Restarts:
  """The restarts of one command.

  Attributes:
    used: how many there have been.
    started: `time.monotonic()` of the first start.
  """

  def __init__(self):
    self.used = 0
    self.started = time.monotonic()
    self._environment: dict[str, str] = {}
    self._inherited: set[int] = set()
    self._describe: Callable[[], str] | None = None

  def begin(self) -> None:
    """To be called before anything is imported that has exit handlers, threads or files."""
    used, started = os.environ.pop(VARIABLE, f'0 {self.started}').split()
    self.used, self.started = int(used), float(started)
    self._environment = dict(os.environ)
    self._inherited = _inheritable()
    atexit.register(self._exec)  # the first to be registered runs last

  def at_exit(self, limit: int, describe: Callable[[], str]) -> bool:
    """Has the exit that follows end in a new start, unless there have been `limit`.

    Args:
      limit: the most restarts.
      describe: called at the very end; says where the new start goes on.

    Returns:
      Whether there will be one.
    """
    if self.used >= limit:
      return False
    self.used += 1
    self._describe = lambda: f'restart {self.used} of {limit}: {describe()}'
    overdue = threading.Timer(LIMIT_S, self._exec)
    overdue.daemon = True
    overdue.start()
    return True

  def _exec(self) -> None:
    if self._describe is None:
      return
    handlers = signals.handlers
    text = self._describe()
    processes.end_all(processes.descendants(os.getpid()), 0, 5)
    # What came before this has been handled when it returns. From here on a signal that another
    # thread gets ends the process; after the exec there is only this thread, where it waits until
    # the new program has its handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.NUMBERS)
    if threading.current_thread() is threading.main_thread():
      for number in signals.NUMBERS:
        signal.signal(number, signal.SIG_DFL)
    if handlers.received is not None:
      handlers.say(f'{signal.Signals(handlers.received).name}: not started again')
      os._exit(128 + handlers.received)
    handlers.say(text)
    for stream in (sys.stdout, sys.stderr):
      stream.flush()
    for fd in _inheritable() - self._inherited:
      os.set_inheritable(fd, False)
    environment = {**self._environment, VARIABLE: f'{self.used} {self.started}'}
    try:
      os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    except OSError as error:
      handlers.say(f'could not be started again: {sys.executable}: {error}')
      os._exit(1)


def _inheritable() -> set[int]:
  """The open files that a program run by exec would get."""
  found = set()
  for name in os.listdir('/proc/self/fd'):
    try:
      if os.get_inheritable(int(name)):
        found.add(int(name))
    except OSError:
      pass  # the one that has listed them, or closed meanwhile
  return found


restarts = Restarts()
