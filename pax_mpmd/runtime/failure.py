"""What went wrong on one actor, and which of several reports is the cause."""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import enum

from pax_mpmd.errors import ActorError
from pax_mpmd.errors import CheckpointError
from pax_mpmd.errors import MpmdError

__all__ = ['Failure', 'FailureKind', 'StepFailed', 'brief', 'primary']

_MAX_LINES = 4  # of an exception's text in a message; its traceback has all of it
_MAX_CHARACTERS = 600


class FailureKind(enum.IntEnum):
  """How an actor failed; the smaller, the nearer to the cause."""

  UNREADABLE = -1  # an array of a checkpoint
  EXCEPTION = 0  # an instruction raised
  DEATH = 1  # the process is gone
  STUCK = 2  # it doesn't answer, or nothing moves
  LOST_PEER = 3  # it only saw another actor's end of a channel close


@dataclasses.dataclass(frozen=True)
class Failure:
  """One actor's report. `peer` is who closed the channel, for LOST_PEER."""

  kind: FailureKind
  actor: int
  message: str
  step: int | None = None
  stage: int | None = None
  instruction: str | None = None
  traceback: str | None = None
  peer: int | None = None

  def to_error(self) -> MpmdError:
    """The error a user sees."""
    if self.kind is FailureKind.UNREADABLE:
      return CheckpointError(self.message)
    where = f'actor {self.actor}'
    if self.stage is not None:
      where += f', stage {self.stage}'
    if self.step is not None:
      where += f', step {self.step}'
    if self.instruction is not None:
      where += f', instruction `{self.instruction}`'
    return ActorError(
        f'{where}: {self.message} The run is over and all its actors are stopped; start again '
        'from the last checkpoint.',
        actor=self.actor,
        stage=self.stage,
        instruction=self.instruction,
        remote_traceback=self.traceback,
    )


class StepFailed(Exception):
  """Carries a Failure up from the interpreter."""

  def __init__(self, failure: Failure):
    super().__init__(failure.message)
    self.failure = failure


def brief(error: Exception) -> str:
  """An exception's type and the beginning of its text; XLA's can be as long as the program."""
  lines = [line for line in str(error).splitlines() if line.strip()]
  text = '\n'.join(lines[:_MAX_LINES])
  left_out = len(lines) > _MAX_LINES or len(text) > _MAX_CHARACTERS
  return f'{type(error).__name__}: {text[:_MAX_CHARACTERS]}' + (' ...' if left_out else '')


def primary(failures: Iterable[Failure]) -> Failure:
  """The report nearest to the cause: the kind first, then who reported first."""
  return min(failures, key=lambda failure: failure.kind)
