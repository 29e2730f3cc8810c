"""Watches running steps from the driver: who doesn't answer, and whether anything moves."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import time
from typing import Any

from pax_mpmd.runtime.failure import Failure
from pax_mpmd.runtime.failure import FailureKind

__all__ = ['Limits', 'Watch']


@dataclasses.dataclass(frozen=True)
class Limits:
  """Seconds after which an actor counts as stuck.

  Attributes:
    ping_interval_s: how often an actor is asked where it is.
    ping_timeout_s: how long it may leave that unanswered while a step runs.
    load_ping_timeout_s: the same while a plan is being compiled.
    stall_timeout_s: how long a step may go on without any actor getting to another instruction,
      at least ...
    stall_factor: ... and this many times the longest instruction seen so far.
    first_step_timeout_s: the same for the first step of a plan.
    write_timeout_s: the same while a checkpoint is written, for which a step may have to wait.
  """

  ping_interval_s: float = 0.5
  ping_timeout_s: float = 6.0
  load_ping_timeout_s: float = 60.0
  stall_timeout_s: float = 8.0
  stall_factor: float = 20.0
  first_step_timeout_s: float = 300.0
  write_timeout_s: float = 300.0


class Watch:
  """Decides from pings and the clock; sends nothing itself.

  Args:
    num_actors: number of actors.
    limits: when to give up.
  """

  def __init__(self, num_actors: int, limits: Limits):
    self._limits = limits
    self._asked: list[float | None] = [None] * num_actors
    self.replies: list[dict[str, Any] | None] = [None] * num_actors
    self._last_look = time.monotonic()
    self._seen: tuple = ()
    self._changed = self._last_look

  def asks(self, actor: int) -> bool:
    """Whether it is time to ping an actor; if so, it counts as asked."""
    if self._asked[actor] is not None:
      return False
    self._asked[actor] = time.monotonic()
    return True

  def answered(self, actor: int, reply: dict[str, Any]) -> None:
    self.replies[actor] = reply
    self._asked[actor] = None

  def reset(self) -> None:
    """Nothing is running: what was seen before says nothing about what comes."""
    self._seen = ()
    self._changed = self._last_look = time.monotonic()

  def look(
      self, loading: bool, stepping: bool, first_step: bool, writing: bool = False
  ) -> Failure | None:
    """Who is stuck, if anybody is.

    Args:
      loading: programs are being compiled, or a state is made.
      stepping: a step is under way.
      first_step: and it is the first of its plan.
      writing: a checkpoint is being written.
    """
    now = time.monotonic()
    pause = now - self._last_look
    self._last_look = now
    if pause > 2 + 2 * self._limits.ping_interval_s:
      # This process was stopped or starved itself, so it can't tell how long others took.
      self._changed += pause
      self._asked = [asked and asked + pause for asked in self._asked]
    limit = self._limits.load_ping_timeout_s if loading else self._limits.ping_timeout_s
    for actor, asked in enumerate(self._asked):
      if asked is not None and now - asked > limit:
        return Failure(
            FailureKind.STUCK,
            actor,
            f'its process has not answered for {now - asked:.1f} s; it is stopped, or its host '
            'is overloaded (RayRuntime.ping_timeout_s).',
            **place(self.replies[actor]),
        )
    seen = tuple(_mark(reply) for reply in self.replies)
    if not (stepping or writing) or seen != self._seen:
      self._seen = seen
      self._changed = now
      return None
    replies = [reply for reply in self.replies if reply is not None]
    longest = max((reply['longest'] for reply in replies), default=0.0)
    limits = self._limits
    allowed = max(limits.stall_timeout_s, limits.stall_factor * longest)
    field = 'stall_timeout_s'
    if first_step:
      allowed, field = max(allowed, limits.first_step_timeout_s), 'first_step_timeout_s'
    if writing and allowed < limits.write_timeout_s:
      allowed, field = limits.write_timeout_s, 'write_timeout_s'
    if now - self._changed <= allowed:
      return None
    return _stalled(self.replies, now - self._changed, field)


def place(reply: dict[str, Any] | None) -> dict[str, Any]:
  """The Failure fields that say where an actor was."""
  if reply is None or not reply['running']:
    return {}
  return {name: reply[name] for name in ('step', 'stage', 'instruction')}


def _mark(reply: dict[str, Any] | None) -> tuple:
  if reply is None:
    return ()
  names = 'step', 'index', 'steps', 'running', 'written'
  return tuple(reply[name] for name in names)


def _stalled(replies: Sequence[dict[str, Any] | None], seconds: float, field: str) -> Failure:
  """Blames who works on an instruction of its own, before those who wait for others."""
  running = [(a, reply) for a, reply in enumerate(replies) if reply and reply['running']]
  writing = [a for a, reply in enumerate(replies) if reply and reply['writing']]
  if writing and not running:
    message = f'it has been writing one array of a checkpoint for {seconds:.1f} s'
    return Failure(FailureKind.STUCK, writing[0], f'{message} (RayRuntime.{field}).')
  if not running:
    actor = min(range(len(replies)), key=lambda a: (replies[a] or {}).get('steps', 0))
    message = f'it has not begun the step it was sent {seconds:.1f} s ago'
    return Failure(FailureKind.STUCK, actor, f'{message} (RayRuntime.{field}).')
  actor, reply = max(running, key=lambda item: (not item[1]['waits_for'], item[1]['age']))
  waits = f', waiting for {reply["waits_for"]}' if reply['waits_for'] else ''
  return Failure(
      FailureKind.STUCK,
      actor,
      f'it has been at this instruction for {reply["age"]:.1f} s{waits}, and no actor has moved '
      f'for {seconds:.1f} s (RayRuntime.{field}; raise it if a step may take so long).',
      **place(reply),
  )
