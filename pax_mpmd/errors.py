"""The errors a user of pax_mpmd can meet.

Each message says what is wrong, the value that was got, what is allowed, where it comes from
(the config field or the user's source line) and how to fix it. `assert` is kept for faults of
pax_mpmd itself.
"""

from __future__ import annotations

__all__ = [
    'ActorError',
    'CheckpointError',
    'ConfigError',
    'MpmdError',
    'PartitionError',
    'PlanError',
    'ScheduleError',
    'shown',
]


def shown(value: object, limit: int = 80) -> str:
  """A value as messages show it: its repr on one line, cut after `limit` characters."""
  if isinstance(value, str) and len(value) > limit:
    return f'{value[:limit]!r}...'
  text = ' '.join(repr(value).split())
  return text if len(text) <= limit + 3 else text[:limit] + '...'


class MpmdError(Exception):
  """Base class of every error that pax_mpmd raises on purpose."""


class ConfigError(MpmdError, ValueError):
  """A configuration that can't run; raised before anything is traced or started."""


class ScheduleError(MpmdError, ValueError):
  """A schedule that isn't valid for the number of stages, actors or microbatches asked for."""


class PartitionError(MpmdError, ValueError):
  """A traced step that can't be split at its `pipeline_yield` calls."""


class PlanError(MpmdError, ValueError):
  """A plan that could hang or read a value that isn't there; refused before anything starts."""


class CheckpointError(MpmdError, RuntimeError):
  """A checkpoint that can't be written or read."""


class ActorError(MpmdError, RuntimeError):
  """An actor failed while running a step. The step, and the runtime, are over.

  Attributes:
    actor: the pipeline rank that failed first, or None where the fault isn't one actor's.
    stage: the stage of the task it was running, or None outside the microbatch loop.
    instruction: the text of the instruction it was at, or None.
    remote_traceback: the traceback of the original exception as text, or None.
  """

  def __init__(
      self,
      message: str,
      *,
      actor: int | None = None,
      stage: int | None = None,
      instruction: str | None = None,
      remote_traceback: str | None = None,
  ):
    super().__init__(message)
    self.message = message
    self.actor = actor
    self.stage = stage
    self.instruction = instruction
    self.remote_traceback = remote_traceback

  def __str__(self) -> str:
    text = self.message
    if self.remote_traceback:
      text += '\n\nOriginal traceback:\n' + self.remote_traceback.rstrip()
    return text

  def __reduce__(self):
    fields = (self.message, self.actor, self.stage, self.instruction, self.remote_traceback)
    return (_rebuild_actor_error, fields)


def _rebuild_actor_error(message, actor, stage, instruction, remote_traceback):
  return ActorError(
      message,
      actor=actor,
      stage=stage,
      instruction=instruction,
      remote_traceback=remote_traceback,
  )
