"""LocalRuntime: actors as threads."""

from __future__ import annotations

import gc
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Executable
from pax_mpmd.errors import ActorError
from pax_mpmd.errors import ConfigError
from pax_mpmd.errors import MpmdError
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.local import LocalRuntime
from tests.messages import assert_readable
from tests.runtime import plans


def _array(seed: int, aval: Aval = plans.F32) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=aval.shape).astype(aval.dtype)


@pytest.mark.parametrize('capacity', [None, 0, 1, 2])
@pytest.mark.parametrize('num_devices', [1, None])
def test_opposite_orders(capacity, num_devices):
  """Three actors that use messages in other orders than they come give numpy's result."""
  x = [_array(i) for i in range(3)]
  devices = xla.local_devices()[:num_devices]
  with LocalRuntime(devices=devices, channel_capacity=capacity) as runtime:
    runtime.start(3)
    handle = runtime.load(plans.opposite_orders_plan())
    for _ in range(3):
      outputs = runtime.run(handle, [[x[0]], [x[1]], [x[2]]])
      for got, expected in zip(outputs, plans.opposite_orders_expected(*x)):
        np.testing.assert_allclose(runtime.fetch(got), expected, rtol=1e-5, atol=1e-6)


def test_both_send_first():
  """Two actors that both send before they receive complete, for a channel keeps what is sent."""
  x = [_array(0), _array(1)]
  with LocalRuntime() as runtime:
    runtime.start(2)
    handle = runtime.load(plans.crossing_plan())
    outputs = runtime.run(handle, [[x[0]], [x[1]]])
    for me, got in enumerate(outputs):
      np.testing.assert_array_equal(runtime.fetch(got)[0], x[me] + x[1 - me] * 2)


def test_rendezvous_blocks():
  """With capacity 0 two actors that both send first wait for ever: the channel keeps nothing."""
  runtime = LocalRuntime(channel_capacity=0)
  runtime.start(2)
  handle = runtime.load(plans.crossing_plan())
  outputs = runtime.run(handle, [[_array(0)], [_array(1)]])
  time.sleep(0.5)
  assert not any(buffers[0].ready.done() for buffers in outputs)
  runtime.close()
  with pytest.raises(MpmdError, match='closed'):
    runtime.wait(outputs[0])


def test_state_stays_on_the_actor():
  """A weight that each step donates goes from step to step as a buffer, in several runs ahead."""
  w, x = _array(0), _array(1)
  with LocalRuntime() as runtime:
    runtime.start(2)
    handle = runtime.load(plans.training_plan())
    (weight,) = runtime.put(1, [w])
    losses = []
    for _ in range(20):
      _, (new, loss) = runtime.run(handle, [[x], [weight]])
      assert weight.consumed
      with pytest.raises(MpmdError, match='donated'):
        runtime.fetch([weight])
      weight = new
      losses.append(loss)
    expected, h = w, x * 2 + 3
    for loss in runtime.fetch(losses):
      np.testing.assert_allclose(loss, (expected * h).sum(), rtol=2e-5, atol=2e-5)
      expected = expected + np.float32(0.1) * h
    np.testing.assert_allclose(runtime.fetch([weight])[0], expected, rtol=1e-5)


def test_inputs_are_copied():
  """The caller may overwrite an array as soon as `run` or `put` has returned."""
  x = [_array(0), _array(1)]
  expected = x[0] + x[1] * 2
  with LocalRuntime() as runtime:
    runtime.start(2)
    handle = runtime.load(plans.crossing_plan())
    mine = [x[0].copy(), x[1].copy()]
    put = runtime.put(0, [mine[0]])
    outputs = runtime.run(handle, [[put[0]], [mine[1]]])
    mine[0][:] = mine[1][:] = np.nan
    np.testing.assert_array_equal(runtime.fetch(outputs[0])[0], expected)


def test_buffers_are_freed():
  """An array is forgotten with the message after its last reference died."""
  with LocalRuntime() as runtime:
    runtime.start(1)
    buffers = runtime.put(0, [_array(i) for i in range(5)])
    runtime.wait(buffers)
    store = runtime._actors[0]._store
    assert len(store) == 5
    del buffers[1:]
    gc.collect()
    runtime.fetch(buffers)
    assert list(store) == [buffers[0].id]


@pytest.mark.parametrize(
    'value',
    [
        np.float32(3.5),
        np.zeros((0, 3), np.float32),
        np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        np.array([True, False]),
        np.arange(4, dtype=np.int8).reshape(2, 2).T,
        np.arange(9 << 20, dtype=np.uint32).reshape(9, -1),
    ],
    ids=['scalar', 'empty', 'bfloat16', 'bool', 'transposed', 'larger than a message'],
)
def test_put_and_fetch(value):
  """What is put is what is fetched, bit for bit."""
  with LocalRuntime() as runtime:
    runtime.start(1)
    got = runtime.fetch(runtime.put(0, [value, np.float32(1), value]))
  for i in (0, 2):
    assert got[i].dtype == value.dtype and got[i].shape == value.shape
    np.testing.assert_array_equal(got[i], value)


def test_exception_in_a_task():
  """An instruction that raises ends the run with one error for all, which names it."""
  add = plans.executable(lambda x: x + 1, [plans.F32])
  other = plans.executable(lambda x: x + 1, [Aval((7,), 'float32')])
  wrong = Executable(add.key, other.inputs, add.outputs, (), other.module)

  def write(a, b):
    a.input('x', plans.F32).recv(1, '1F0', y=plans.F32)
    b.input('x', plans.F32).run(wrong, 'x', 'y', '1F0', 1).send(0, 'y', '1F0')
    return ['y', '']

  before = threading.active_count()
  runtime = LocalRuntime()
  runtime.start(2)
  handle = runtime.load(plans.build(2, write))
  outputs = runtime.run(handle, [[_array(0)], [_array(1)]])
  with pytest.raises(ActorError) as first:
    runtime.wait(outputs[0])
  assert (first.value.actor, first.value.stage) == (1, 1)
  assert '1F0' in first.value.instruction
  assert 'Traceback' in first.value.remote_traceback
  assert 'INVALID_ARGUMENT' in str(first.value)
  assert_readable(first.value.message)
  with pytest.raises(ActorError) as second:
    runtime.run(handle, [[_array(0)], [_array(1)]])
  assert second.value is first.value
  deadline = time.monotonic() + 5
  while threading.active_count() > before and time.monotonic() < deadline:
    time.sleep(0.01)
  assert threading.active_count() == before


def test_a_program_that_does_not_compile():
  """XLA's refusal of a program is an error that names the program and the actor."""
  bad = Executable('bad key', (plans.F32,), (plans.F32,), (), b'no module')

  def write(a):
    a.input('x', plans.F32).run(bad, 'x', 'y', '0F0', 0)
    return ['y']

  runtime = LocalRuntime()
  runtime.start(1)
  with pytest.raises(ActorError, match=r'program bad key .* does not compile') as error:
    runtime.load(plans.build(1, write))
  assert error.value.actor == 0
  assert_readable(error.value.message)


def test_identical_programs_compile_once(monkeypatch):
  """A program is compiled once per device, also when two plans or two actors use it."""
  compiled = []
  compile_module = xla.compile_module
  monkeypatch.setattr(
      xla, 'compile_module', lambda m, d: compiled.append(m) or compile_module(m, d)
  )
  plan = plans.crossing_plan()
  progress = []
  with LocalRuntime(devices=xla.local_devices()[:1]) as runtime:
    runtime.start(2)
    runtime.load(plan, lambda done, total: progress.append((done, total)))
    runtime.load(plan)
  assert len(compiled) == len(plan.executables) == 2
  assert progress[-1] == (4, 4)


def test_wrong_configuration():
  """Mistakes in the arguments are ConfigErrors that name the field."""
  with pytest.raises(ConfigError, match='channel_capacity'):
    LocalRuntime(channel_capacity=-1)
  with pytest.raises(ConfigError, match='max_steps_in_flight'):
    LocalRuntime(max_steps_in_flight=0)
  with LocalRuntime() as runtime:
    runtime.start(1)
    runtime.start(1)
    with pytest.raises(ConfigError, match='num_actors'):
      runtime.start(2)
