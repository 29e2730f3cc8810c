"""Arrays that live on an actor, as the driver sees them."""

from __future__ import annotations

import collections
import concurrent.futures

from pax_mpmd.compile.program import Aval

__all__ = ['Buffer']


class Buffer:
  """One array on one actor. When the last reference dies, the actor may forget the array.

  Attributes:
    actor: the pipeline rank that holds it.
    id: its name there.
    aval: shape and dtype.
    consumed: a step has used its memory up (donation); it can't be read any more.
    ready: done when the array has been made; fails with the ActorError of a failed run.
    inline: where the array's bytes stand in what `ready` gives; None: only the actor has them.
  """

  __slots__ = ('actor', 'id', 'aval', 'consumed', 'ready', 'inline', '_freed', '__weakref__')

  def __init__(
      self,
      actor: int,
      buffer_id: int,
      aval: Aval,
      ready: concurrent.futures.Future,
      freed: collections.deque[int],
      inline: slice | None = None,
  ):
    self.actor = actor
    self.id = buffer_id
    self.aval = aval
    self.consumed = False
    self.ready = ready
    self.inline = inline
    self._freed = freed

  def __del__(self):
    # May run inside the garbage collector, in any thread: a deque's append is all it does. The
    # ids go to the actor with the next message.
    self._freed.append(self.id)

  def __repr__(self) -> str:
    state = ', consumed' if self.consumed else ''
    return f'Buffer({self.aval} {self.id} on actor {self.actor}{state})'
