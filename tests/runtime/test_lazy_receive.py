"""Sends never wait for a reader, also where the sender's memory is taken over afterwards."""

from __future__ import annotations

import threading
import uuid

import numpy as np
import pytest

from pax_mpmd.compile.program import Aval
from pax_mpmd.plan import verify
from pax_mpmd.runtime import shm_channel
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.devices import ActorDevices
from pax_mpmd.runtime.executables import ExecutableCache
from pax_mpmd.runtime.interpreter import prepare
from pax_mpmd.runtime.interpreter import Progress
from pax_mpmd.runtime.shm_channel import ShmTransport
from tests.runtime import plans

BIG = Aval((1 << 16,), 'float32')  # 256 kB, more than the rings of this test hold
ONE = Aval((), 'float32')


def late_reader_plan():
  """Actor 0 sends a large array, which actor 1 reads last, and then takes over its memory.

  What actor 1 waits for before comes from actor 2, which waits for what actor 0 makes of it.
  """
  take_over = plans.executable(lambda x: (x * 0 + 1, x[0] * 2), [BIG], donated=(0,))
  add = plans.executable(lambda x: x + 1, [ONE])
  join = plans.executable(lambda x, y: x + y[:1].sum(), [ONE, BIG])

  def write(a, b, c):
    a.input('x', BIG).send(1, 'x', 'x').run(take_over, 'x', 'z y', 'take').send(2, 'y', 'take')
    c.recv(0, 'take', y=ONE).run(add, 'y', 'w', 'add').send(1, 'w', 'add')
    b.recv(0, 'x', x=BIG).recv(2, 'add', w=ONE).run(add, 'w', 'v', 'more')
    b.run(join, 'v x', 'u', 'join').free('x v w')
    a.free('y')
    c.free('y w')
    return ['z', 'u', '']

  return plans.build(3, write)


@pytest.mark.timeout(30)
def test_memory_is_taken_over_before_the_message_is_read(monkeypatch):
  """The plan is valid, and runs: the message has its own copy of what it can't write out yet."""
  plan = late_reader_plan()
  verify(plan)
  monkeypatch.setattr(shm_channel, '_MAX_RING', 1 << 16)
  devices = ActorDevices(xla.local_devices()[:1])
  run_id = uuid.uuid4().hex
  transports = [ShmTransport(run_id, actor, b'secret', devices) for actor in range(3)]
  programs = ExecutableCache(devices).compile_all(plan.executables)
  outputs = {}

  def run(actor):
    prepared = prepare(plan.actors[actor], plan.executables, programs, transports[actor], devices)
    given = [xla.to_device(np.arange(5, 5 + (1 << 16), dtype=np.float32), devices.devices[0])]
    outputs[actor] = prepared.run(0, given if actor == 0 else [], Progress())

  threads = [threading.Thread(target=run, args=(actor,), daemon=True) for actor in range(3)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(10)
  stuck = [thread for thread in threads if thread.is_alive()]
  for transport in transports:
    transport.close()
  assert not stuck
  np.testing.assert_array_equal(np.asarray(outputs[0][0]), np.ones(1 << 16))
  assert float(outputs[1][0]) == (5 * 2 + 1 + 1) + 5
