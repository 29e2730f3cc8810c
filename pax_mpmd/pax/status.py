"""What a run says on the terminal: short lines with the time since the start."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TextIO

__all__ = ['Status', 'status']


class Status:
  """Prints lines such as `[ 12s] step 40/120  loss 2.31  1.8 steps/s  44 s left`.

  On a terminal a passing line (how many programs are compiled) is overwritten by the next one;
  elsewhere at most one of those in five seconds is printed.

  Attributes:
    started: `time.monotonic()` of the moment that times are counted from.
  """

  def __init__(self, stream: TextIO | None = None):
    self._stream = stream
    self.started = time.monotonic()
    self._passing = False
    self._last_passing = 0.0

  def say(self, text: str) -> None:
    """Prints a line."""
    self._write(text, passing=False)

  def passing(self, text: str, last: bool = False) -> None:
    """Prints a line that the next one may overwrite."""
    if self._out().isatty():
      self._write(text, passing=True)
    elif last or time.monotonic() - self._last_passing > 5.0:
      self._last_passing = time.monotonic()
      self._write(text, passing=False)

  def capture_logger(self, name: str) -> None:
    """Prints what the logger `name` says at level INFO and above, each message once."""
    logger = logging.getLogger(name)
    if not any(isinstance(h, _Handler) for h in logger.handlers):
      logger.addHandler(_Handler(self))
      logger.setLevel(logging.INFO)
      logger.propagate = False

  def _out(self) -> TextIO:
    return self._stream or sys.stdout

  def _write(self, text: str, passing: bool) -> None:
    out = self._out()
    line = f'[{time.monotonic() - self.started:4.0f}s] {text}'
    clear = '\r\x1b[K' if self._passing else ''
    text = clear + line + ('' if passing else '\n')
    try:
      out.write(text)
      out.flush()
    except RuntimeError:  # called by a signal's handler, in the middle of another line
      os.write(out.fileno(), text.encode())
    self._passing = passing


class _Handler(logging.Handler):

  def __init__(self, owner: Status):
    super().__init__()
    self._owner = owner
    self._said: set[str] = set()

  def emit(self, record: logging.LogRecord) -> None:
    text = record.getMessage()
    if text not in self._said:  # what holds for every step is said once
      self._said.add(text)
      self._owner.say(text)


status = Status()
