"""SIGTERM and Ctrl-C: a command line ends early, within seconds, and leaves nothing behind.

What a signal does depends on what is under way: while nothing has begun the process just ends; a
train loop ends after its step in progress, with a checkpoint; anything else is unwound by an
exception. Where that takes too long (code outside of Python that doesn't return) a thread ends the
process and all that it has started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import threading
from typing import Any

from pax_mpmd.runtime import processes

__all__ = ['Ended', 'NUMBERS', 'Signals', 'handlers']

NUMBERS = (signal.SIGTERM, signal.SIGINT)
# From a signal that ends a process at once to its end.
LIMIT_S = 15.0


class Ended(SystemExit):
  """Raised in the main thread by a signal; the exit status is a shell's, 128 + number."""

  def __init__(self, number: int):
    super().__init__(128 + number)


class Signals:
  """The handlers of one process.

  Attributes:
    importing: nothing has begun, so a signal ends the process on the spot.
    received: the number of the last signal; None before the first.
    raised: of the one that has ended the process by an exception; None if none has.
    say: prints a line.
  """

  def __init__(self, limit_s: float = LIMIT_S):
    self.importing = False
    self.received: int | None = None
    self.raised: int | None = None
    self.say: Callable[[str], None] = lambda text: print(text, flush=True)
    self._limit_s = limit_s
    self._finish: Callable[[str], bool] | None = None
    self._ending = False
    self._pid: int | None = None  # of the process they are installed in
    self._masks = threading.local()  # of threads that fork
    self._knows_forks = False

  def install(self) -> Callable[[], None]:
    """Takes over both signals; returns what gives them back. Does nothing in other threads."""
    if threading.current_thread() is not threading.main_thread() or self._pid == os.getpid():
      return lambda: None
    self._pid = os.getpid()
    self.received, self.raised, self._ending = None, None, False
    old = {number: signal.signal(number, self._on_signal) for number in NUMBERS}
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # The kernel tells it, so it knows also while the main thread is outside of Python.
    threading.Thread(target=self._watch, args=(reader,), name='mpmd-signals', daemon=True).start()
    # Children that are forked, as by some input pipelines, end as if this had not been done. Until
    # that is arranged they must get no signal, which would count as one to this process.
    if not self._knows_forks:
      self._knows_forks = True
      os.register_at_fork(
          before=self._block, after_in_parent=self._unblock, after_in_child=self._forget
      )
    # Those that came while another program made way for this one wait behind the mask.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)

    def restore() -> None:
      signal.set_wakeup_fd(old_writer)
      os.close(writer)  # ends the thread
      for number, handler in old.items():
        signal.signal(number, handler)
      self._pid = None

    return restore

  @contextlib.contextmanager
  def training(self, finish: Callable[[str], bool]) -> Iterator[None]:
    """While a train loop runs.

    Args:
      finish: called with a signal's name; returns whether the loop ends by itself, soon. Otherwise
        the signal ends it at once.
    """
    restore = self.install()
    self._finish = finish
    try:
      yield
    finally:
      self._finish = None
      restore()

  def begin_end(self) -> None:
    """From here on the process is ending anyway, and what it does for that isn't interrupted."""
    self._ending = True

  def _on_signal(self, number: int, frame: Any) -> None:
    del frame
    name = signal.Signals(number).name
    again = self.received is not None
    self.received = number
    if self._ending:
      return
    if self.importing:
      self.say(f'{name}: ended; nothing had begun')
      os._exit(128 + number)
    if self._finish is not None and self._finish(name):
      return
    self._ending = True
    self.raised = number
    self.say(f'{name}: ending at once, ' + ('without a checkpoint' if again else 'nothing to save'))
    raise Ended(number)

  def _watch(self, reader: int) -> None:
    count = 0
    with open(reader, 'rb', buffering=0) as file:
      while number := file.read(1):
        if number[0] not in NUMBERS:
          continue
        count += 1
        if count == 1 and self._finish is not None and not self._ending:
          continue  # a train loop takes the time that it needs for its step and the checkpoint
        deadline = threading.Timer(self._limit_s, self._end_all, args=(number[0],))
        deadline.daemon = True
        deadline.start()

  def _end_all(self, number: int) -> None:
    if self._pid != os.getpid():
      return  # given back meanwhile
    name = signal.Signals(number).name
    self.say(f'{name}: not ended after {self._limit_s:.0f} s; ending all processes')
    processes.end_all(processes.descendants(os.getpid()), 0, 2)
    os._exit(128 + number)

  def _block(self) -> None:
    self._masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)

  def _unblock(self) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.old)

  def _forget(self) -> None:
    if self._pid is not None and self._pid != os.getpid():
      self._pid = None
      signal.set_wakeup_fd(-1)
      signal.signal(signal.SIGTERM, signal.SIG_DFL)
      signal.signal(signal.SIGINT, signal.default_int_handler)
    self._unblock()


handlers = Signals()
