"""The messages that the driver waits for, and the one error that ends them all."""

from __future__ import annotations

from collections.abc import Callable
import concurrent.futures
import threading
from typing import Any

from pax_mpmd.errors import MpmdError
from pax_mpmd.runtime.failure import Failure
from pax_mpmd.runtime.failure import FailureKind
from pax_mpmd.runtime.failure import primary

__all__ = ['Calls']

Future = concurrent.futures.Future

# How long to wait, after a report, for one nearer to the cause.
_GRACE_S = {
    FailureKind.UNREADABLE: 0.0,
    FailureKind.EXCEPTION: 0.0,
    FailureKind.DEATH: 0.3,
    FailureKind.STUCK: 0.0,
    FailureKind.LOST_PEER: 3.0,
}


class Calls:
  """Answers that are still to come. After the first failure none comes, and all raise its error.

  Thread-safe; its lock is never held while anything is waited for.

  Args:
    kill: ends all actors; called before the error is told.
    last_known: actor -> the Failure fields that say where it was when last heard of, or None.
  """

  def __init__(self, kill: Callable[[], None], last_known: Callable[[int], dict[str, Any] | None]):
    self._kill = kill
    self._last_known = last_known
    self._lock = threading.Lock()
    self._waiting: dict[Future, str] = {}
    self._failures: list[Failure] = []
    self._decision: threading.Timer | None = None
    self._error: MpmdError | None = None
    self._closed = False

  def check_usable(self) -> None:
    """Raises what ended the run, if anything has."""
    if self._error is not None:
      raise self._error
    if self._closed:
      raise MpmdError('This runtime is closed; make a new one.')

  def begin(self, method: str) -> Future:
    """A future for the answer to a message that calls this method of an actor."""
    future: Future = Future()
    with self._lock:
      if self._error is not None:
        raise self._error
      self._waiting[future] = method
    return future

  def end(self, future: Future, result: Any) -> None:
    """Takes the answer: a result, an exception for this call alone, or a Failure for all."""
    if isinstance(result, Failure):
      self.report(result)
      return
    with self._lock:
      waiting = self._waiting.pop(future, None) is not None
    if waiting and isinstance(result, Exception):
      future.set_exception(result)
    elif waiting:
      future.set_result(result)

  def methods(self) -> set[str]:
    """What is being waited for."""
    with self._lock:
      return set(self._waiting.values())

  def close(self) -> bool:
    """No more calls; whether this is the first time."""
    with self._lock:
      closed, self._closed = self._closed, True
    return not closed

  def fail(self, error: Exception) -> None:
    """All that is being waited for raises this."""
    with self._lock:
      waiting = list(self._waiting)
      self._waiting.clear()
    for future in waiting:
      future.set_exception(error)

  def report(self, failure: Failure) -> None:
    """Takes a report; after a moment the one nearest to the cause becomes the error."""
    with self._lock:
      if self._closed or self._error is not None:
        return
      self._failures.append(failure)
      grace = _GRACE_S[failure.kind]
      if self._decision is not None:
        if primary(self._failures) is not failure:
          return
        self._decision.cancel()
      self._decision = threading.Timer(grace, self._decide)
      self._decision.daemon = True
      self._decision.start()

  def _decide(self) -> None:
    with self._lock:
      if self._closed or self._error is not None:
        return
      error = self._complete(primary(self._failures)).to_error()
      self._error = error
    self._kill()
    self.fail(error)

  def _complete(self, failure: Failure) -> Failure:
    """Fills in where the failed actor was, from its last sign of life or from its peers."""
    if failure.kind is FailureKind.LOST_PEER:
      waiting = failure
      failure = Failure(
          FailureKind.DEATH,
          failure.peer,
          'the actor closed its channels, and nothing more is known.',
          step=waiting.step,
      )
    if failure.kind not in (FailureKind.DEATH, FailureKind.STUCK):
      return failure
    # A stuck actor's last answer may be older than what it got stuck at.
    fields = {**failure.__dict__, **(self._last_known(failure.actor) or {})}
    for report in self._failures:
      if report.peer == failure.actor and report.instruction is not None:
        if fields['step'] is None:
          fields['step'] = report.step
        fields['message'] += f' Actor {report.actor} was at `{report.instruction}` then.'
        break
    return Failure(**fields)
