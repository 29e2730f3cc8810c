"""A byte stream between two processes of one host: a ring in shared memory and a socket.

The memory is a memfd, the socket has no name by the time it is used, so both vanish with the last
process that holds them, however it ends. The socket carries only counters: the writer tells how
many bytes it has written so far, the reader how many it has read. Each process therefore sleeps
in the kernel while it waits, and an end of file tells that the other is gone.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct

import numpy as np

__all__ = ['RingClosed', 'RingReader', 'RingWriter', 'create_ring']

_COUNTER = struct.Struct('<Q')
# The writer announces at least this often within a message, so that the reader copies one part
# while the writer copies the next.
_ANNOUNCE_BYTES = 1 << 20


class RingClosed(Exception):
  """The other process closed its end or is gone."""


def create_ring(nbytes: int) -> int:
  """A file descriptor of that much shared memory, which has no name anywhere."""
  fd = os.memfd_create('pax-mpmd', os.MFD_CLOEXEC)
  os.ftruncate(fd, nbytes)
  return fd


class _End:
  """What both ends have."""

  def __init__(self, sock: socket.socket, fd: int):
    """Takes over the socket and the descriptor."""
    self._socket = sock
    size = os.fstat(fd).st_size
    self._map = mmap.mmap(fd, size)
    os.close(fd)
    self._ring = np.frombuffer(self._map, np.uint8)
    self.size = size
    self._rest = b''

  def _tell(self, count: int) -> None:
    try:
      self._socket.sendall(_COUNTER.pack(count))
    except OSError as error:
      raise RingClosed(str(error)) from error

  def _hear(self, last: int, wait: bool) -> int:
    """The newest counter from the other side; `last` if nothing came and `wait` is False."""
    flags = 0 if wait else socket.MSG_DONTWAIT
    while True:
      try:
        data = self._socket.recv(4096, flags)
      except BlockingIOError:
        return last
      except OSError as error:
        raise RingClosed(str(error)) from error
      if not data:
        raise RingClosed('end of file')
      data = self._rest + data
      whole = len(data) // _COUNTER.size * _COUNTER.size
      self._rest = data[whole:]
      if whole:
        return _COUNTER.unpack_from(data, whole - _COUNTER.size)[0]

  def shutdown(self) -> None:
    """Ends both directions; whoever waits here or there gets RingClosed."""
    try:
      self._socket.shutdown(socket.SHUT_RDWR)
    except OSError:
      pass  # the other side was quicker


class RingWriter(_End):
  """The end that writes."""

  def __init__(self, sock: socket.socket, fd: int):
    super().__init__(sock, fd)
    self._written = 0
    self._announced = 0
    self._read_by_peer = 0

  def has_space(self, nbytes: int) -> bool:
    """Whether so many bytes can be written without waiting."""
    if nbytes <= self.size - (self._written - self._read_by_peer):
      return True  # without asking the kernel
    self._read_by_peer = self._hear(self._read_by_peer, wait=False)
    return nbytes <= self.size - (self._written - self._read_by_peer)

  def write(self, data: np.ndarray) -> None:
    """Writes bytes (uint8[n], any n), waiting for space as needed.

    Raises:
      RingClosed: the reader is gone.
    """
    offset, end = 0, data.size
    while offset < end:
      space = self.size - (self._written - self._read_by_peer)
      if space <= 0:
        self.flush()
        self._read_by_peer = self._hear(self._read_by_peer, wait=True)
        continue
      position = self._written % self.size
      count = min(space, end - offset, self.size - position, _ANNOUNCE_BYTES)
      self._ring[position : position + count] = data[offset : offset + count]
      self._written += count
      offset += count
      if self._written - self._announced >= _ANNOUNCE_BYTES:
        self.flush()

  def flush(self) -> None:
    """Tells the reader about everything written."""
    if self._announced != self._written:
      self._tell(self._written)
      self._announced = self._written


class RingReader(_End):
  """The end that reads."""

  def __init__(self, sock: socket.socket, fd: int):
    super().__init__(sock, fd)
    self._read = 0
    self._told = 0
    self._written_by_peer = 0

  def read_into(self, out: np.ndarray) -> None:
    """Fills `out` (uint8[n]), waiting for the writer as needed.

    Raises:
      RingClosed: the writer is gone and has left fewer bytes than that.
    """
    offset, end = 0, out.size
    while offset < end:
      there = self._written_by_peer - self._read
      if there <= 0:
        self._written_by_peer = self._hear(self._written_by_peer, wait=True)
        continue
      position = self._read % self.size
      count = min(there, end - offset, self.size - position, _ANNOUNCE_BYTES)
      out[offset : offset + count] = self._ring[position : position + count]
      self._read += count
      offset += count
      # Seldom enough to cost little, often enough that a waiting writer always hears of space.
      if self._read - self._told >= self.size // 4:
        self._told = self._read
        self._tell(self._read)
