"""RayRuntime: actors as processes, and what happens when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest

from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Executable
from pax_mpmd.errors import ActorError
from pax_mpmd.errors import ConfigError
from pax_mpmd.errors import MpmdError
from pax_mpmd.runtime import versions
from pax_mpmd.runtime.local import LocalRuntime
from pax_mpmd.runtime.processes import descendants
from pax_mpmd.runtime.processes import Process
from pax_mpmd.runtime.ray_runtime import RayRuntime
from pax_mpmd.runtime.ray_session import worker_environment
from tests.runtime import plans

_LIMIT_S = 10.0


def _array(seed: int, aval: Aval = plans.F32) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=aval.shape).astype(aval.dtype)


@pytest.fixture(scope='module')
def three_actors():
  """A runtime that stays, and with it the one Ray of all these tests."""
  runtime = RayRuntime()
  runtime.start(3)
  yield runtime
  processes = [Process.running(pid) for pid in runtime.pids]
  runtime.close()
  assert not any(process.alive() for process in processes)


@pytest.fixture
def two_actors(three_actors):
  """A runtime to break, with `waiting_plan` loaded and one step done: (runtime, handle)."""
  runtime = RayRuntime()
  runtime.start(2)
  handle = runtime.load(plans.waiting_plan())
  runtime.wait(_step(runtime, handle, 5)[0])
  yield runtime, handle
  runtime.close()


def _step(runtime, handle, n):
  return runtime.run(handle, [[np.float32(0)], [np.float32(n)]])


def _fails_in_time(runtime, handle, outputs, processes, since) -> ActorError:
  """The one error of a failed run; checks what holds for every failure."""
  with pytest.raises(ActorError) as caught:
    runtime.wait(outputs[0])
  assert time.monotonic() - since < _LIMIT_S
  for call in (
      lambda: runtime.fetch(outputs[0]),
      lambda: _step(runtime, handle, 1),
      lambda: runtime.load(plans.waiting_plan()),
      lambda: runtime.put(0, [np.float32(1)]),
  ):
    with pytest.raises(ActorError) as again:
      call()
    assert again.value is caught.value
  assert not any(process.alive() for process in processes)
  return caught.value


def test_equal_to_threads(three_actors):
  """Processes give bit for bit what threads give, and what numpy says."""
  x = [_array(i) for i in range(3)]
  plan = plans.opposite_orders_plan()
  results = []
  with LocalRuntime() as local:
    local.start(3)
    for runtime in (three_actors, local):
      handle = runtime.load(plan)
      steps = [runtime.run(handle, [[a + i] for a in x]) for i in range(12)]
      results.append([[runtime.fetch(buffers)[0] for buffers in step] for step in steps])
  np.testing.assert_array_equal(*results)
  for i, step in enumerate(results[0]):
    expected = [out[0] for out in plans.opposite_orders_expected(*[a + np.float32(i) for a in x])]
    np.testing.assert_allclose(step, expected, rtol=1e-5, atol=1e-5)


def test_put_and_fetch(three_actors):
  """What is put is what is fetched, bit for bit, also bfloat16 and more than a message holds."""
  values = [
      np.float32(3.5),
      np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
      np.arange(9 << 20, dtype=np.uint32).reshape(9, -1),
      np.zeros((0, 2), np.int8),
  ]
  buffers = [three_actors.put(actor, values) for actor in range(3)]
  got = three_actors.fetch([buffer for per_actor in buffers for buffer in per_actor])
  for i, value in enumerate(got):
    expected = values[i % len(values)]
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(value, expected)


def test_state_stays_on_the_actor(three_actors):
  """A donated weight goes from step to step as a buffer; the result is numpy's."""
  runtime = RayRuntime()
  runtime.start(2)
  handle = runtime.load(plans.training_plan())
  w, x = _array(0), _array(1)
  (weight,) = runtime.put(1, [w])
  for _ in range(10):
    _, (new, loss) = runtime.run(handle, [[x], [weight]])
    with pytest.raises(MpmdError, match='donated'):
      runtime.fetch([weight])
    weight = new
  h = x * 2 + 3
  expected = w
  for _ in range(9):
    expected = expected + np.float32(0.1) * h
  got_loss, got = runtime.fetch([loss, weight])
  np.testing.assert_allclose(got_loss, (expected * h).sum(), rtol=1e-5)
  np.testing.assert_allclose(got, expected + np.float32(0.1) * h, rtol=1e-5)
  runtime.close()


def test_killed_in_mid_step(two_actors, three_actors, capsys):
  """kill -9 ends the run with one error that names the actor and the instruction it was at.

  Ray, which runs on for others, adds nothing to it.
  """
  del three_actors
  runtime, handle = two_actors
  processes = [Process.running(pid) for pid in runtime.pids]
  outputs = _step(runtime, handle, np.inf)
  time.sleep(0.3)
  since = time.monotonic()
  os.kill(processes[1].pid, signal.SIGKILL)
  error = _fails_in_time(runtime, handle, outputs, processes, since)
  assert (error.actor, error.stage) == (1, 1)
  assert '1F0' in error.instruction
  assert 'died' in str(error)
  time.sleep(1)
  printed = capsys.readouterr()
  assert not printed.out and not printed.err, printed


def test_killed_between_steps(two_actors):
  """An actor that died while nothing ran is reported by the next step."""
  runtime, handle = two_actors
  processes = [Process.running(pid) for pid in runtime.pids]
  os.kill(processes[0].pid, signal.SIGKILL)
  time.sleep(0.2)
  since = time.monotonic()
  try:
    outputs = _step(runtime, handle, 5)
  except ActorError as error:
    assert error.actor == 0
    return
  assert _fails_in_time(runtime, handle, outputs, processes, since).actor == 0


def test_stopped(two_actors):
  """SIGSTOP ends the run with one error, and the stopped process is ended too."""
  runtime, handle = two_actors
  processes = [Process.running(pid) for pid in runtime.pids]
  outputs = _step(runtime, handle, np.inf)
  while '1F0' not in runtime._last_known(1).get('instruction', ''):
    time.sleep(0.001)
  since = time.monotonic()
  os.kill(processes[1].pid, signal.SIGSTOP)
  error = _fails_in_time(runtime, handle, outputs, processes, since)
  # Where it is now, though it was stopped before it could tell in an answer.
  assert (error.actor, error.stage) == (1, 1)
  assert '1F0' in error.instruction
  assert 'not answered' in str(error)


def test_instruction_that_never_ends(two_actors):
  """An actor that answers but doesn't get on is stuck; the one that works is named."""
  runtime, handle = two_actors
  processes = [Process.running(pid) for pid in runtime.pids]
  since = time.monotonic()
  outputs = _step(runtime, handle, np.inf)
  error = _fails_in_time(runtime, handle, outputs, processes, since)
  assert (error.actor, error.stage) == (1, 1)
  assert '1F0' in error.instruction
  assert 'stall_timeout_s' in str(error)


def test_exception_in_a_task(two_actors):
  """An instruction that raises ends the run with its traceback, not with a neighbour's."""
  runtime, _ = two_actors
  processes = [Process.running(pid) for pid in runtime.pids]
  scalar = Aval((), 'float32')
  wrong = plans.executable(lambda x: x + 1, [plans.F32])
  wrong = Executable('wrong', (scalar,), (scalar,), (), wrong.module)

  def write(a, b):
    a.input('x', scalar).recv(1, '1F0', y=scalar)
    b.input('x', scalar).run(wrong, 'x', 'y', '1F0', 1).send(0, 'y', '1F0')
    return ['y', '']

  handle = runtime.load(plans.build(2, write))
  since = time.monotonic()
  outputs = _step(runtime, handle, 1)
  error = _fails_in_time(runtime, handle, outputs, processes, since)
  assert (error.actor, error.stage) == (1, 1)
  assert '1F0' in error.instruction
  assert 'INVALID_ARGUMENT' in error.remote_traceback


@pytest.mark.parametrize('threads, sees', [(None, '1'), (3, '3')])
def test_cores_that_a_worker_sees(monkeypatch: pytest.MonkeyPatch, threads: int | None, sees: str):
  """XLA takes NPROC for the number of cores; what the user says of an actor's variables wins."""
  monkeypatch.setenv('NPROC', '64')
  monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=8 --xla_cpu_use_acl=1')
  env = worker_environment(None, threads)
  assert (env['NPROC'], env['OMP_NUM_THREADS']) == (sees, sees)
  assert '--xla_cpu_use_acl=1' in env['XLA_FLAGS'] and 'device_count' not in env['XLA_FLAGS']
  assert worker_environment({'NPROC': 5}, threads)['NPROC'] == '5'


def test_bad_flag(three_actors):
  """A flag that ends the workers at their start is quoted with what the worker said of it."""
  runtime = RayRuntime(actor_env={'XLA_FLAGS': '--xla_no_such_flag=1'})
  with pytest.raises(ActorError, match='--xla_no_such_flag=1') as error:
    runtime.start(2)
  assert 'Unknown flag' in error.value.remote_traceback
  runtime.close()


def test_other_versions(three_actors, monkeypatch):
  """Workers with another JAX are refused before anything is compiled, both versions named."""
  mine = versions.versions()
  monkeypatch.setattr(versions, 'versions', lambda: {**mine, 'jax': '9.9.9'})
  runtime = RayRuntime()
  with pytest.raises(ConfigError, match=rf'jax 9\.9\.9 here, {mine["jax"]} there'):
    runtime.start(1)
  runtime.close()


def test_no_resources(three_actors):
  """More CPUs than Ray has is a ConfigError that names the fields."""
  runtime = RayRuntime(num_cpus_per_actor=1000, start_timeout_s=1.0)
  with pytest.raises(ConfigError, match='num_cpus_per_actor'):
    runtime.start(1)
  runtime.close()


def test_wrong_configuration():
  """Mistakes in the arguments are ConfigErrors that name the field."""
  for name in ('start_timeout_s', 'ping_timeout_s', 'threads_per_actor'):
    with pytest.raises(ConfigError, match=f'RayRuntime.{name} is 0'):
      RayRuntime(**{name: 0})
  with pytest.raises(ConfigError, match='num_cpus_per_actor'):
    RayRuntime(num_cpus_per_actor=-1)


def test_workers_import_little():
  """A worker needs jax and numpy, and neither Pax nor TensorFlow."""
  code = (
      'import sys, pax_mpmd.runtime.ray_actor;'
      'print(*[m for m in ("paxml", "praxis", "tensorflow", "fiddle", "ray", "flax")'
      ' if m in sys.modules])'
  )
  output = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=os.getcwd()
  )
  assert output.stdout.strip() == ''


# A shell that starts the tests in the background ignores Ctrl-C for them; children inherit that.
_DRIVER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import numpy as np
from pax_mpmd.runtime.ray_runtime import RayRuntime
from pax_mpmd.runtime.ray_session import worker_environment
from tests.runtime import plans
runtime = RayRuntime()
runtime.start(2)
handle = runtime.load(plans.waiting_plan())
outputs = runtime.run(handle, [[np.float32(0)], [np.float32(np.inf)]])
print(*runtime.pids, flush=True)
runtime.wait(outputs[0])
"""


def _start_driver() -> tuple[subprocess.Popen, list[Process]]:
  """A driver with a step under way that never ends; it and all its processes."""
  driver = subprocess.Popen(
      [sys.executable, '-c', _DRIVER],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      cwd=os.getcwd(),
      start_new_session=True,  # so that Ctrl-C can be sent to its whole group, as a terminal does
  )
  pids = [int(word) for word in driver.stdout.readline().split()]
  assert len(pids) == 2
  processes = [*map(Process.running, pids), *descendants(driver.pid)]
  assert len(processes) > 5
  return driver, processes


def _nothing_left(processes) -> bool:
  deadline = time.monotonic() + _LIMIT_S
  while any(process.alive() for process in processes) and time.monotonic() < deadline:
    time.sleep(0.1)
  left = [process for process in processes if process.alive()]
  for process in left:
    process.kill()
  return not left


def test_driver_killed():
  """kill -9 of the driver in mid-step ends the workers, its Ray and their shared memory."""
  before = set(os.listdir('/dev/shm'))
  driver, processes = _start_driver()
  driver.kill()
  driver.communicate()
  assert _nothing_left(processes)
  assert set(os.listdir('/dev/shm')) <= before


def test_driver_interrupted():
  """Ctrl-C in mid-step ends the driver, which never calls `close`, and leaves nothing running."""
  driver, processes = _start_driver()
  os.killpg(driver.pid, signal.SIGINT)
  _, stderr = driver.communicate(timeout=30)
  assert driver.returncode != 0
  assert stderr.rstrip().endswith('KeyboardInterrupt'), stderr
  assert _nothing_left(processes)
