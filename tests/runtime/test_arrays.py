"""MpmdArray: an array in pieces on actors."""

from __future__ import annotations

import numpy as np
import pytest

from pax_mpmd.compile.program import Aval
from pax_mpmd.errors import MpmdError
from pax_mpmd.runtime.arrays import device_get
from pax_mpmd.runtime.arrays import MpmdArray
from pax_mpmd.runtime.local import LocalRuntime
from tests.runtime import plans


@pytest.fixture
def runtime():
  """Three actors as threads, with a list of the messages sent to them as `messages`."""
  with LocalRuntime() as runtime:
    runtime.start(3)
    runtime.messages = []
    send = runtime._send

    def record(actor, message, done):
      runtime.messages.append((actor, message[2]))
      send(actor, message, done)

    runtime._send = record
    yield runtime
    del runtime._send


def _stacked(runtime, value: np.ndarray) -> MpmdArray:
  """One row on each of three actors, the last row on two of them."""
  pieces = []
  for actor in range(3):
    row = value[actor : actor + 1]
    holders = [actor] if actor < 2 else [2, 0]
    buffers = [runtime.put(holder, [row])[0] for holder in holders]
    pieces.append(((actor, 0), row.shape, buffers))
  return MpmdArray(Aval(value.shape, value.dtype.name), pieces, runtime)


def test_assembles_its_pieces(runtime):
  """Reading gives the whole array, in place and in one message per actor for a whole tree."""
  values = [np.arange(12, dtype=np.float32).reshape(3, 4) + i for i in range(2)]
  arrays = [_stacked(runtime, value) for value in values]
  runtime.messages.clear()
  tree = {'a': arrays[0], 'b': (arrays[1], 'text', arrays[0])}
  got = device_get(tree)
  assert sorted(runtime.messages) == [(0, 'fetch'), (1, 'fetch'), (2, 'fetch')]
  np.testing.assert_array_equal(got['a'], values[0])
  np.testing.assert_array_equal(got['b'][0], values[1])
  assert got['b'][1] == 'text'
  np.testing.assert_array_equal(arrays[0][1:, 2], values[0][1:, 2])
  np.testing.assert_array_equal(np.asarray(arrays[1], np.float64), values[1])


def test_what_needs_no_fetch(runtime):
  """Shape, dtype, text and waiting move no data."""
  array = _stacked(runtime, np.zeros((3, 4), np.int8))
  runtime.messages.clear()
  assert (array.shape, array.dtype, array.ndim) == ((3, 4), np.int8, 2)
  assert (array.size, array.nbytes, len(array)) == (12, 12, 3)
  assert repr(array) == 'MpmdArray(int8[3,4], on actors [0, 1, 2])'
  assert array.block_until_ready() is array
  assert array.actors == (0, 1, 2)
  assert runtime.messages == []


def test_scalars(runtime):
  """A scalar behaves as a number."""
  (buffer,) = runtime.put(1, [np.float32(2.5)])
  array = MpmdArray(Aval((), 'float32'), [((), (), [buffer])], runtime)
  assert float(array) == 2.5
  assert int(array) == 2
  assert bool(array)
  assert f'{array:.2f}' == '2.50'
  assert array.item() == 2.5


def test_replicas_are_found_by_actor(runtime):
  """A step finds the buffer that its actor holds, and only an exact one."""
  array = _stacked(runtime, np.zeros((3, 4), np.float32))
  assert array.buffer_on(0, (2, 0), (1, 4)).actor == 0
  assert array.buffer_on(2, (2, 0), (1, 4)).actor == 2
  assert array.buffer_on(1, (2, 0), (1, 4)) is None
  assert array.buffer_on(0, (0, 0), (3, 4)) is None


def test_small_results_need_no_message(runtime):
  """Results as small as a loss come with the step's own reply, large ones are fetched."""
  large = Aval((5, 5), 'float32')
  program = plans.executable(lambda x: (x[:2, :2] * 2, x * 3, x.sum() > 0), [large])

  def write(a, b, c):
    a.input('x', large).run(program, 'x', 'y z w', '0F0', 0)
    return ['y z w', '', '']

  x = np.arange(25, dtype=np.float32).reshape(5, 5)
  handle = runtime.load(plans.build(3, write))
  (y, z, w), _, _ = runtime.run(handle, [[x], [], []])
  runtime.messages.clear()
  got = runtime.fetch([w, y])
  assert runtime.messages == []
  assert got[0].dtype == bool and bool(got[0])
  np.testing.assert_array_equal(got[1], x[:2, :2] * 2)
  np.testing.assert_array_equal(runtime.fetch([y, z])[1], x * 3)
  assert runtime.messages == [(0, 'fetch')]


def test_deleted(runtime):
  """A donated array can't be read, and says what to do."""
  array = _stacked(runtime, np.zeros((3, 4), np.float32))
  assert not array.is_deleted()
  array.delete()
  assert array.is_deleted()
  assert 'deleted' in repr(array)
  for read in (lambda: np.asarray(array), lambda: device_get([array]), array.block_until_ready):
    with pytest.raises(MpmdError, match='donate_argnums'):
      read()
