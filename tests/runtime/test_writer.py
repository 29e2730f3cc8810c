"""The thread that writes an actor's arrays."""

from __future__ import annotations

import concurrent.futures
import threading
import types

import numpy as np
import pytest

from pax_mpmd.runtime import writer as writer_lib
from pax_mpmd.runtime.writer import Writer


class _Slow:
  """A sink whose two futures are done when the test says so."""

  def __init__(self):
    self.begun = threading.Event()
    self.copy = concurrent.futures.Future()
    self.commit = concurrent.futures.Future()
    self.seen = None

  def write(self, array):
    self.seen = array
    self.begun.set()
    return types.SimpleNamespace(copy=self.copy, commit=self.commit)


class _Broken:
  """A sink that can't be written to."""

  def write(self, array):
    raise OSError('No space left on device')


@pytest.fixture
def writer():
  writer = Writer()
  yield writer
  writer.close()


def test_an_array_is_held_until_it_has_been_read(writer):
  """Whoever wants to overwrite it waits for the copy, and not for the commit."""
  array, sink = np.arange(4.0), _Slow()
  writer.add(0, [(array, sink)])
  assert sink.begun.wait(5) and writer.reads(array) and writer.busy
  released = threading.Event()
  waiting = threading.Thread(target=lambda: (writer.wait_for(array), released.set()))
  waiting.start()
  assert not released.wait(0.1)
  sink.copy.set_result(None)
  assert released.wait(5) and not writer.reads(array)
  assert writer.busy and writer.written == 0
  sink.commit.set_result(None)
  assert writer.finish(0) == ''
  assert not writer.busy and writer.written == 1
  waiting.join()


def test_one_large_array_at_a_time(writer, monkeypatch):
  """The next array is begun only when there is room for it."""
  monkeypatch.setattr(writer_lib, '_IN_FLIGHT_BYTES', 64)
  sinks = [_Slow() for _ in range(3)]
  for sink in sinks:
    sink.copy.set_result(None)
  writer.add(0, [(np.zeros(8), sink) for sink in sinks])  # 64 bytes each
  assert sinks[0].begun.wait(5)
  assert not sinks[1].begun.wait(0.1)
  sinks[0].commit.set_result(None)
  assert sinks[1].begun.wait(5) and not sinks[2].begun.is_set()
  for sink in sinks[1:]:
    sink.commit.set_result(None)
  assert writer.finish(0) == ''


def test_what_goes_wrong_is_told_to_whoever_waits(writer):
  """One array that can't be written fails its ticket, and no other; nothing stays held."""
  array, sink = np.zeros(2), _Slow()
  sink.copy.set_result(None)
  sink.commit.set_result(None)
  writer.add(0, [(array, _Broken()), (array, sink)])
  writer.add(1, [(array, sink)])
  assert writer.finish(0) == 'No space left on device'
  assert writer.finish(1) == ''
  assert not writer.reads(array)


def test_waiting_before_there_is_anything_to_write(writer):
  """`finish` may come before `add`, as messages on another way do; nothing to write is written."""
  done = []
  waiting = threading.Thread(target=lambda: done.append(writer.finish(3)))
  waiting.start()
  writer.add(3, [])
  waiting.join(5)
  assert done == ['']
