"""Channels between actors that are threads of one process."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence
import threading

from pax_mpmd.compile.program import Aval
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.channels import ChannelClosed
from pax_mpmd.runtime.devices import ActorDevices

__all__ = ['LocalChannel', 'LocalHub', 'LocalTransport']


class LocalChannel:
  """A queue of messages from one actor's thread to another's. Both ends in one object.

  Args:
    src: sending actor.
    dst: receiving actor.
    devices: where the receiver wants its arrays.
    capacity: None: a Send never waits and a Recv waits at its first reader, as between
      processes. k: a Send waits while k messages lie in the queue, and a Recv waits at its place.
      0: a Send waits until the Recv has taken its message.
  """

  def __init__(self, src: int, dst: int, devices: ActorDevices, capacity: int | None):
    self.src = src
    self.dst = dst
    self.strict = capacity is not None
    self._devices = devices
    self._capacity = capacity
    self._condition = threading.Condition()
    self._queue: collections.deque[tuple[str, list[xla.Array]]] = collections.deque()
    self._num_sent = 0
    self._num_taken = 0
    self._num_posted = 0
    self._taken: dict[int, tuple[str, list[xla.Array]]] = {}  # taken for a later ticket
    self._closed = False

  def send(
      self, arrays: Sequence[xla.Array], label: str, taken_over: Collection[int] = ()
  ) -> None:
    del taken_over
    # Copied here, on the sender's thread: its own copy may be donated by the next instruction.
    message = (label, [self._devices.copy(array) for array in arrays])
    with self._condition:
      number = self._num_sent
      self._num_sent += 1
      if self._capacity:
        self._wait(lambda: len(self._queue) < self._capacity, self.dst)
      self._check_open(self.dst)
      self._queue.append(message)
      self._condition.notify_all()
      if self._capacity == 0:
        self._wait(lambda: self._num_taken > number, self.dst)

  def check(self) -> None:
    """Nothing runs in the background here."""

  def post(self, avals: Sequence[Aval], label: str) -> _LocalTicket:
    number = self._num_posted
    self._num_posted += 1
    return _LocalTicket(self, number, label, len(avals))

  def take(self, number: int) -> tuple[str, list[xla.Array]]:
    """Message `number` of this channel, waiting for it."""
    with self._condition:
      while number not in self._taken:
        self._wait(lambda: bool(self._queue), self.src)
        self._taken[self._num_taken] = self._queue.popleft()
        self._num_taken += 1
        self._condition.notify_all()
      return self._taken.pop(number)

  def close(self) -> None:
    with self._condition:
      self._closed = True
      self._condition.notify_all()

  def _wait(self, ready, peer: int) -> None:
    self._condition.wait_for(lambda: ready() or self._closed)
    if not ready():
      self._check_open(peer)

  def _check_open(self, peer: int) -> None:
    if self._closed:
      raise ChannelClosed(peer, f'actor {peer} closed the channel {self.src} -> {self.dst}')


class _LocalTicket:
  """A message asked for."""

  def __init__(self, channel: LocalChannel, number: int, label: str, num_arrays: int):
    self._channel = channel
    self._number = number
    self._label = label
    self._num_arrays = num_arrays

  def wait(self) -> list[xla.Array]:
    label, arrays = self._channel.take(self._number)
    assert label == self._label and len(arrays) == self._num_arrays, (label, self._label)
    return arrays


class LocalHub:
  """All channels of one LocalRuntime."""

  def __init__(self, devices: Sequence[ActorDevices], capacity: int | None):
    self._devices = devices
    self._capacity = capacity
    self._lock = threading.Lock()
    self._channels: dict[tuple[int, int], LocalChannel] = {}
    self._closed = False

  def channel(self, src: int, dst: int) -> LocalChannel:
    with self._lock:
      if (src, dst) not in self._channels:
        channel = LocalChannel(src, dst, self._devices[dst], self._capacity)
        if self._closed:
          channel.close()
        self._channels[src, dst] = channel
      return self._channels[src, dst]

  def close(self) -> None:
    with self._lock:
      self._closed = True
      channels = list(self._channels.values())
    for channel in channels:
      channel.close()


class LocalTransport:
  """One actor's view of the hub."""

  def __init__(self, hub: LocalHub, actor: int):
    self.spans = None  # stays empty: within a process there is nothing to write or to read
    self._hub = hub
    self._actor = actor

  def outgoing(self, dst: int, largest_message: int) -> LocalChannel:
    del largest_message  # messages stay where they are
    return self._hub.channel(self._actor, dst)

  def incoming(self, src: int) -> LocalChannel:
    return self._hub.channel(src, self._actor)

  def settle(self) -> None:
    """Messages are there as soon as they are sent."""

  def close(self) -> None:
    self._hub.close()
