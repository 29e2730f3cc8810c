"""Shared-memory channels, both ends in one process."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
import uuid

import ml_dtypes
import numpy as np
import pytest

from pax_mpmd.compile.program import Aval
from pax_mpmd.runtime import shm_channel
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.channels import ChannelClosed
from pax_mpmd.runtime.devices import ActorDevices
from pax_mpmd.runtime.shm_channel import ShmTransport
from pax_mpmd.runtime.shm_ring import create_ring
from pax_mpmd.runtime.shm_ring import RingClosed
from pax_mpmd.runtime.shm_ring import RingReader
from pax_mpmd.runtime.shm_ring import RingWriter


@pytest.fixture
def device():
  """Where the arrays of these tests live."""
  return xla.local_devices()[0]


@pytest.fixture
def transports(device):
  """Two actors of one run."""
  run_id = uuid.uuid4().hex
  pair = [ShmTransport(run_id, actor, b'secret', ActorDevices([device])) for actor in (0, 1)]
  yield pair
  for transport in pair:
    transport.close()


def _aval(array: np.ndarray) -> Aval:
  return Aval(array.shape, array.dtype.name)


def test_every_dtype_and_shape(transports, device):
  """Messages arrive bit for bit, in order, whatever is in them."""
  values = [
      np.float32(2.5),
      np.arange(12, dtype=np.int32).reshape(3, 4).T,
      np.linspace(-3, 3, 7).astype(ml_dtypes.bfloat16),
      np.linspace(-3, 3, 7).astype(ml_dtypes.float8_e4m3fn),
      np.array([True, False, True]),
      np.zeros((0, 5), np.float32),
      np.random.default_rng(0).normal(size=(300, 1001)).astype(np.float32),
  ]
  out = transports[0].outgoing(1, 1000)
  back = transports[1].incoming(0)
  messages = [values, [], values[::-1], values[:1]]
  for i, message in enumerate(messages):
    out.send([xla.to_device(value, device) for value in message], f'{i}F0')
  for i, message in enumerate(messages):
    arrays = back.post([_aval(np.asarray(value)) for value in message], f'{i}F0').wait()
    for got, value in zip(arrays, message):
      assert got.dtype == value.dtype and got.shape == value.shape
      np.testing.assert_array_equal(np.asarray(got), value)


def test_more_than_the_ring_holds(transports, device):
  """Messages larger than the ring go through in parts, and a Send never waits for them."""
  out = transports[0].outgoing(1, 1000)
  back = transports[1].incoming(0)
  values = [np.random.default_rng(i).integers(0, 255, 5 << 20, np.uint8) for i in range(3)]
  assert values[0].size > 4 * out._ring.size
  for i, value in enumerate(values):
    out.send([xla.to_device(value, device)], f'{i}F0')
  for i, value in enumerate(values):
    (got,) = back.post([_aval(value)], f'{i}F0').wait()
    np.testing.assert_array_equal(np.asarray(got), value)


def test_tickets_in_any_order(transports, device):
  """A ticket may be waited for before those that were asked for earlier."""
  out = transports[0].outgoing(1, 1000)
  back = transports[1].incoming(0)
  for i in range(4):
    out.send([xla.to_device(np.int32(i), device)], f'{i}F0')
  tickets = [back.post([Aval((), 'int32')], f'{i}F0') for i in range(4)]
  assert [int(tickets[i].wait()[0]) for i in (2, 0, 3, 1)] == [2, 0, 3, 1]


def test_sent_arrays_are_the_senders_own_again(transports, device):
  """What is taken over after a Send may be written over at once; the message stays as it was."""
  out = transports[0].outgoing(1, 1000)
  back = transports[1].incoming(0)
  value = np.arange(1 << 20, dtype=np.float32)  # larger than what is written at once
  array = xla.to_device(value, device)
  out.send([array], '0F0', {0})
  array.delete()
  received = back.post([_aval(value)], '0F0').wait()
  np.testing.assert_array_equal(np.asarray(received[0]), value)


def test_received_arrays_are_the_receivers_own(transports, device):
  """A later message does not change what was received before: the ring is not shared with it."""
  out = transports[0].outgoing(1, 1000)
  back = transports[1].incoming(0)
  aval = Aval((1 << 16,), 'float32')
  received = []
  for i in range(16):  # several times round the ring
    out.send([xla.to_device(np.full(aval.shape, i, aval.dtype), device)], f'{i}F0')
    received += back.post([aval], f'{i}F0').wait()
  for i, array in enumerate(received):
    np.testing.assert_array_equal(np.asarray(array), np.full(aval.shape, i, aval.dtype))


@pytest.mark.parametrize('waiting', ['receiver', 'sender'])
def test_a_peer_that_leaves(transports, device, waiting):
  """Whoever waits for a peer that closes its channels gets ChannelClosed that names it."""
  out = transports[0].outgoing(1, 1000)
  back = transports[1].incoming(0)
  leaves = transports[0] if waiting == 'receiver' else transports[1]
  timer = threading.Timer(0.2, leaves.close)
  timer.start()
  start = time.monotonic()
  with pytest.raises(ChannelClosed) as error:
    if waiting == 'receiver':
      back.post([Aval((), 'int32')], '0F0').wait()
    else:
      out.send([xla.to_device(np.zeros(64 << 20, np.uint8), device)], '0F0')
      while time.monotonic() < start + 5:
        out.check()  # as each later Send does
        time.sleep(0.01)
  assert time.monotonic() - start < 5
  assert error.value.peer == (0 if waiting == 'receiver' else 1)
  timer.join()


def test_strangers_are_refused(transports, device):
  """Who doesn't know the secret gets no channel, and doesn't keep others from theirs."""
  stranger = ShmTransport(transports[0]._run_id + 'x', 0, b'guessed', ActorDevices([device]))
  stranger._run_id = transports[0]._run_id
  silent = socket.socket(socket.AF_UNIX)
  silent.connect(transports[1]._address(1))  # connects and says nothing
  with pytest.raises(ChannelClosed, match='can not be reached'):
    stranger.outgoing(1, 1000)
  assert not transports[1]._incoming
  transports[0].outgoing(1, 1000).send([xla.to_device(np.int32(7), device)], '0F0')
  (got,) = transports[1].incoming(0).post([Aval((), 'int32')], '0F0').wait()
  assert int(got) == 7
  silent.close()
  stranger.close()


def test_nobody_comes(transports, monkeypatch):
  """A channel that the other end never opens is an error, not a hang."""
  monkeypatch.setattr(shm_channel, '_HANDSHAKE_TIMEOUT_S', 0.2)
  with pytest.raises(ChannelClosed, match='actor 0 did not open'):
    transports[1].incoming(0)
  with pytest.raises(ChannelClosed, match='actor 5 can not be reached'):
    transports[1].outgoing(5, 1000)


def test_nothing_is_left_in_the_file_system(transports):
  """Rings and sockets have no name that could stay behind."""
  before = set(os.listdir('/dev/shm'))
  transports[0].outgoing(1, 1 << 20)
  transports[1].incoming(0)
  assert set(os.listdir('/dev/shm')) == before
  with open('/proc/net/unix') as file:
    (name,) = {line.split()[-1] for line in file if transports[0]._address(0)[1:] in line}
  assert name.startswith('@')  # how the kernel shows that a name is abstract


def test_ring_as_a_stream():
  """Random writes and reads of a small ring give the same bytes, in a few seconds at most."""
  ends = socket.socketpair()
  fd = create_ring(4096)
  reader_fd = os.dup(fd)
  writer, reader = RingWriter(ends[0], fd), RingReader(ends[1], reader_fd)
  rng = np.random.default_rng(0)
  parts = [rng.integers(0, 255, size, np.uint8) for size in rng.integers(0, 9000, 300)]

  def write():
    for part in parts:
      writer.write(part)
      writer.flush()

  thread = threading.Thread(target=write)
  thread.start()
  expected = b''.join(part.tobytes() for part in parts)
  received = b''
  while len(received) < len(expected):
    out = np.empty(min(int(rng.integers(1, 12000)), len(expected) - len(received)), np.uint8)
    reader.read_into(out)
    received += out.tobytes()
  thread.join()
  assert hashlib.sha256(received).digest() == hashlib.sha256(expected).digest()
  writer.shutdown()
  with pytest.raises(RingClosed):
    reader.read_into(np.empty(1, np.uint8))
