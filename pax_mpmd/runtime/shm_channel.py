"""Channels between actors that are processes of one host.

Each actor listens on an abstract UNIX socket (it has no file). Who sends to it connects, both
prove that they know the run's secret, and the sender passes the memory of a ring. A message in the
ring is a small header and the arrays' bytes one after the other: one copy from the sender's device
buffer into the ring, one from there into memory of the receiver's own, which its device then uses.
An array that is split over several devices travels whole, at the price of a copy more on each side.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
import hmac
import os
import queue
import socket
import struct
import threading
import time
import zlib

import numpy as np

from pax_mpmd.compile.program import Aval
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.channels import ChannelClosed
from pax_mpmd.runtime.channels import Spans
from pax_mpmd.runtime.devices import ActorDevices
from pax_mpmd.runtime.messages import flat_bytes
from pax_mpmd.runtime.shm_ring import create_ring
from pax_mpmd.runtime.shm_ring import RingClosed
from pax_mpmd.runtime.shm_ring import RingReader
from pax_mpmd.runtime.shm_ring import RingWriter

__all__ = ['ShmTransport']

_HEADER = struct.Struct('<QIIQ')  # magic, sequence number, CRC of the label, bytes that follow
_MAGIC = 0x70617873686D3031
_PEERS = struct.Struct('<II')
_NONCE_BYTES = 32
_MAC_BYTES = 32
_MIN_RING = 1 << 20
_MAX_RING = 128 << 20
# A message up to this size is written by the interpreter's own thread where that can't wait:
# waking another thread would cost more than the copy.
_INLINE_BYTES = 512 << 10
_HANDSHAKE_TIMEOUT_S = 60.0
_SETTLE_S = 0.0005


def _mac(secret: bytes, role: bytes, *parts: bytes) -> bytes:
  return hmac.new(secret, role + b''.join(parts), 'sha256').digest()


def _recv_exact(sock: socket.socket, nbytes: int) -> bytes:
  data = b''
  while len(data) < nbytes:
    more = sock.recv(nbytes - len(data))
    if not more:
      raise ConnectionError('closed during the handshake')
    data += more
  return data


class ShmOutgoing:
  """The sending end. `send` is called by one thread only."""

  def __init__(self, transport: ShmTransport, ring: RingWriter, src: int, dst: int, inline: bool):
    self._transport = transport
    self._ring = ring
    self._dst = dst
    self._name = f'{src} -> {dst}'
    self._inline = inline
    self._sequence = 0
    self._num_queued = 0  # written by the caller's thread
    self._num_done = 0  # written by the sender thread
    self._error: Exception | None = None
    self._queue: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=self._work, name=f'mpmd-send-{dst}', daemon=True).start()

  def send(
      self, arrays: Sequence[xla.Array], label: str, taken_over: Collection[int] = ()
  ) -> None:
    self.check()
    # The sender thread is idle while nothing is queued, so the ring is the caller's then.
    if self._inline and self._num_queued == self._num_done:
      nbytes = sum(array.nbytes for array in arrays)
      if nbytes <= _INLINE_BYTES and self._has_space(nbytes + _HEADER.size):
        self._write(arrays, label)
        self.check()
        return
    message = [
        np.array(array) if i in taken_over else array for i, array in enumerate(arrays)
    ]
    self._num_queued += 1
    self._queue.put((message, label))

  def check(self) -> None:
    if self._error is not None:
      if isinstance(self._error, RingClosed):
        raise ChannelClosed(
            self._dst, f'actor {self._dst} closed the channel {self._name} ({self._error})'
        )
      raise self._error

  def settle(self) -> None:
    """Waits until everything that was sent has been written, or can't be."""
    while self._num_done < self._num_queued and self._error is None:
      time.sleep(_SETTLE_S)

  def close(self) -> None:
    self._ring.shutdown()
    self._queue.put(None)

  def _has_space(self, nbytes: int) -> bool:
    try:
      return self._ring.has_space(nbytes)
    except RingClosed as error:
      self._error = error
      self.check()
      raise

  def _work(self) -> None:
    while True:
      item = self._queue.get()
      if item is None:
        return
      arrays, label = item
      del item
      self._write(arrays, label)
      del arrays  # else they would live until the next message
      self._num_done += 1

  def _write(self, arrays: Sequence[xla.Array | np.ndarray], label: str) -> None:
    if self._error is not None:
      return
    start = time.monotonic()
    try:
      parts = [flat_bytes(np.asarray(array)) for array in arrays]
      nbytes = sum(part.size for part in parts)
      header = _HEADER.pack(_MAGIC, self._sequence & 0xFFFFFFFF, zlib.crc32(label.encode()), nbytes)
      self._sequence += 1
      self._ring.write(np.frombuffer(header, np.uint8))
      for part in parts:
        self._ring.write(part)
      self._ring.flush()
      _note(self._transport.spans, 'sent', self._dst, start)
    except Exception as error:  # handed to the caller's thread by check()
      self._error = error


class ShmIncoming:
  """The receiving end. All methods are called by one thread only."""

  strict = False

  def __init__(
      self, transport: ShmTransport, ring: RingReader, src: int, dst: int, devices: ActorDevices
  ):
    self._transport = transport
    self._ring = ring
    self._src = src
    self._name = f'{src} -> {dst}'
    self._devices = devices
    self._posted: dict[int, tuple[Sequence[Aval], str]] = {}
    self._arrived: dict[int, list[xla.Array]] = {}
    self._num_posted = 0
    self._num_read = 0

  def post(self, avals: Sequence[Aval], label: str) -> _RecvTicket:
    number = self._num_posted
    self._num_posted += 1
    self._posted[number] = (avals, label)
    return _RecvTicket(self, number)

  def take(self, number: int) -> list[xla.Array]:
    """The arrays of message `number`; reads those before it first."""
    while number not in self._arrived:
      self._arrived[self._num_read] = self._read(*self._posted.pop(self._num_read))
      self._num_read += 1
    return self._arrived.pop(number)

  def close(self) -> None:
    self._ring.shutdown()

  def _read(self, avals: Sequence[Aval], label: str) -> list[xla.Array]:
    try:
      header = np.empty(_HEADER.size, np.uint8)
      self._ring.read_into(header)
      start = time.monotonic()
      found = _HEADER.unpack(header.tobytes())
      nbytes = sum(aval.nbytes for aval in avals)
      expected = (_MAGIC, self._num_read & 0xFFFFFFFF, zlib.crc32(label.encode()), nbytes)
      assert found == expected, (
          f'channel {self._name}: message {found[1]} of {found[3]} bytes, expected message '
          f'{expected[1]} ({label}) of {nbytes} bytes'
      )
      arrays = []
      for aval in avals:
        memory = xla.empty_aligned(aval.shape, aval.numpy_dtype)
        self._ring.read_into(flat_bytes(memory))
        arrays.append(self._devices.adopt(memory, aval))
      _note(self._transport.spans, 'received', self._src, start)
      return arrays
    except RingClosed as error:
      raise ChannelClosed(
          self._src, f'actor {self._src} closed the channel {self._name} ({error})'
      ) from error


def _note(spans: Spans | None, what: str, peer: int, start: float) -> None:
  if spans is not None:
    spans.setdefault((what, peer), []).append((start, time.monotonic()))


class _RecvTicket:
  """A message asked for."""

  __slots__ = ('_channel', '_number')

  def __init__(self, channel: ShmIncoming, number: int):
    self._channel = channel
    self._number = number

  def wait(self) -> list[xla.Array]:
    return self._channel.take(self._number)


class ShmTransport:
  """One actor's channels to and from the others.

  Args:
    run_id: names the run's sockets; the same for all its actors, no two runs alike.
    actor: this actor's rank.
    secret: what only the run's own processes know.
    devices: where received arrays go.
  """

  def __init__(self, run_id: str, actor: int, secret: bytes, devices: ActorDevices):
    self.spans: Spans | None = None
    self._run_id = run_id
    self._actor = actor
    self._secret = secret
    self._devices = devices
    self._condition = threading.Condition()
    self._outgoing: dict[int, ShmOutgoing] = {}
    self._incoming: dict[int, ShmIncoming] = {}
    self._closed = False
    self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    self._listener.bind(self._address(actor))
    self._listener.listen(64)
    threading.Thread(target=self._accept, name='mpmd-accept', daemon=True).start()

  def _address(self, actor: int) -> str:
    return f'\0pax-mpmd/{self._run_id}/{actor}'

  def outgoing(self, dst: int, largest_message: int) -> ShmOutgoing:
    if dst not in self._outgoing:
      # Twice the largest: one message can be written while the one before is read. Larger ones,
      # from plans loaded later, still go through, in parts.
      ring_bytes = min(max(2 * largest_message + 4096, _MIN_RING), _MAX_RING)
      ring_bytes = -(-ring_bytes // _page_bytes()) * _page_bytes()
      try:
        ring = self._connect(dst, ring_bytes)
      except OSError as error:
        raise ChannelClosed(dst, f'actor {dst} can not be reached: {error}') from error
      inline = self._devices.is_cpu
      self._outgoing[dst] = ShmOutgoing(self, ring, self._actor, dst, inline)
    return self._outgoing[dst]

  def incoming(self, src: int) -> ShmIncoming:
    deadline = time.monotonic() + _HANDSHAKE_TIMEOUT_S
    with self._condition:
      while src not in self._incoming:
        if self._closed or not self._condition.wait(max(0.0, deadline - time.monotonic())):
          raise ChannelClosed(src, f'actor {src} did not open its channel to {self._actor}')
      return self._incoming[src]

  def settle(self) -> None:
    for channel in self._outgoing.values():
      channel.settle()

  def close(self) -> None:
    with self._condition:
      self._closed = True
      channels = [*self._outgoing.values(), *self._incoming.values()]
      self._condition.notify_all()
    try:
      self._listener.shutdown(socket.SHUT_RDWR)
    except OSError:
      pass
    self._listener.close()
    for channel in channels:
      channel.close()

  def _connect(self, dst: int, ring_bytes: int) -> RingWriter:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_HANDSHAKE_TIMEOUT_S)
    sock.connect(self._address(dst))
    peers = _PEERS.pack(self._actor, dst)
    theirs = _recv_exact(sock, _NONCE_BYTES)
    mine = os.urandom(_NONCE_BYTES)
    sock.sendall(peers + mine + _mac(self._secret, b'connect', peers, theirs, mine))
    proof = _recv_exact(sock, _MAC_BYTES)
    if not hmac.compare_digest(proof, _mac(self._secret, b'accept', peers, theirs, mine)):
      raise ConnectionError('it does not know the secret of this run')
    fd = create_ring(ring_bytes)
    socket.send_fds(sock, [b'r'], [fd])
    sock.settimeout(None)
    return RingWriter(sock, fd)

  def _accept(self) -> None:
    while True:
      try:
        sock, _ = self._listener.accept()
      except OSError:
        return  # closed
      # In a thread of its own: a stranger who connects and says nothing must not hold up others.
      threading.Thread(target=self._welcome, args=(sock,), daemon=True).start()

  def _welcome(self, sock: socket.socket) -> None:
    try:
      sock.settimeout(_HANDSHAKE_TIMEOUT_S)
      mine = os.urandom(_NONCE_BYTES)
      sock.sendall(mine)
      peers = _recv_exact(sock, _PEERS.size)
      src, dst = _PEERS.unpack(peers)
      theirs = _recv_exact(sock, _NONCE_BYTES)
      proof = _recv_exact(sock, _MAC_BYTES)
      known = hmac.compare_digest(proof, _mac(self._secret, b'connect', peers, mine, theirs))
      if not known or dst != self._actor:
        raise ConnectionError('a stranger')
      sock.sendall(_mac(self._secret, b'accept', peers, mine, theirs))
      _, fds, _, _ = socket.recv_fds(sock, 1, 1)
      if len(fds) != 1:
        raise ConnectionError('no ring came')
      sock.settimeout(None)
    except (OSError, struct.error):
      sock.close()
      return
    channel = ShmIncoming(self, RingReader(sock, fds[0]), src, dst, self._devices)
    with self._condition:
      self._incoming[src] = channel
      closed = self._closed
      self._condition.notify_all()
    if closed:
      channel.close()


def _page_bytes() -> int:
  """Bytes of a page."""
  return os.sysconf('SC_PAGE_SIZE')
