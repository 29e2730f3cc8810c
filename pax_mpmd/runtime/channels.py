"""What the interpreter needs from a channel, whatever carries it.

A channel goes from one actor to one other and keeps order. Both ends know from the plan what
comes next, so a message carries its label and sizes only to find our own faults.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from pax_mpmd.compile.program import Aval
from pax_mpmd.runtime import xla

__all__ = ['ChannelClosed', 'Incoming', 'Outgoing', 'Spans', 'Ticket', 'Transport']


Spans = dict[tuple[str, int], list[tuple[float, float]]]


class ChannelClosed(Exception):
  """The other end is gone. `peer` is its actor."""

  def __init__(self, peer: int, message: str):
    super().__init__(message)
    self.peer = peer

  def __reduce__(self):
    return (ChannelClosed, (self.peer, str(self)))


class Ticket(Protocol):
  """A message asked for."""

  def wait(self) -> list[xla.Array]:
    """The arrays, once they have come.

    Raises:
      ChannelClosed: the other end is gone.
    """


class Outgoing(Protocol):
  """The sending end."""

  def send(
      self, arrays: Sequence[xla.Array], label: str, taken_over: Collection[int] = ()
  ) -> None:
    """Sends device arrays as one message.

    It never waits for the receiver to read them, unless the channel is `strict` there: the plan
    lets a sender go on, and what the receiver does first may need what the sender does next.

    Args:
      arrays: the arrays.
      label: who made them.
      taken_over: positions of arrays whose memory may be written over after the call. They are
        copied if they can't be written out at once.
    """

  def check(self) -> None:
    """Raises what went wrong in the background, if anything did."""


class Incoming(Protocol):
  """The receiving end. `strict`: a Recv waits at its place instead of at its first reader."""

  strict: bool

  def post(self, avals: Sequence[Aval], label: str) -> Ticket:
    """Asks for the next message; tickets may be waited for in any order, each once."""


class Transport(Protocol):
  """An actor's access to the others.

  Attributes:
    spans: while it is a dict, channels add to its lists when each of their messages was written
      ('sent', receiver) or read ('received', sender): (start, end) by time.monotonic.
  """

  spans: Spans | None

  def outgoing(self, dst: int, largest_message: int) -> Outgoing:
    """The channel to `dst`, opened at the first call. `largest_message` is in bytes."""

  def incoming(self, src: int) -> Incoming:
    """The channel from `src`; waits until it is open."""

  def settle(self) -> None:
    """Waits until every message that was sent has been written."""

  def close(self) -> None:
    """Closes every channel, which ends whoever waits at the other ends."""
