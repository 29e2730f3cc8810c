"""A Ray that is there already: joined, left as it was, or refused within seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import os
from pathlib import Path
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from pax_mpmd.errors import ConfigError
from pax_mpmd.runtime import ray_join
from pax_mpmd.runtime.processes import descendants
from pax_mpmd.runtime.processes import end_all
from pax_mpmd.runtime.processes import Process

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def listener() -> Iterator[Callable[[bytes], str]]:
  """A function that opens a port, answers what comes there with some bytes; gives its address."""
  sockets = []

  def listen(answer: bytes) -> str:
    server = socket.create_server(('127.0.0.1', 0))
    sockets.append(server)

    def serve():
      try:
        connection, _ = server.accept()
      except OSError:
        return  # closed by the test
      sockets.append(connection)
      connection.recv(100)
      connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    return f'127.0.0.1:{server.getsockname()[1]}'

  yield listen
  for s in sockets:
    s.close()


def _refused(address: str, match: str) -> None:
  start = time.monotonic()
  with pytest.raises(ConfigError, match=f'RAY_ADDRESS={address}: .*{match}.*ray start --head'):
    ray_join.join(address, 'RAY_ADDRESS')
  assert time.monotonic() - start < 5


def test_nobody_there(listener):
  """An address where nothing listens, or something that isn't Ray, or that says nothing."""
  with socket.create_server(('127.0.0.1', 0)) as free:
    address = f'127.0.0.1:{free.getsockname()[1]}'
  _refused(address, 'no Ray answers there')
  _refused(listener(b'HTTP/1.0 505 HTTP Version Not Supported\r\n\r\n'), 'is not Ray')
  _refused(listener(b''), 'no Ray answers there .timed out')


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch):
  """Less patience with those that say nothing."""
  monkeypatch.setattr(ray_join, '_TIMEOUT_S', 0.5)


@pytest.mark.parametrize(
    'address, match',
    [
        ('here', 'host:port'),
        ('127.0.0.1:ray', 'host:port'),
        ('127.0.0.1:99999', 'no Ray answers'),
        ('ray://127.0.0.1:10001', 'Ray client'),
    ],
)
def test_not_an_address(address: str, match: str):
  """What isn't the address of a Ray on this host is refused as such."""
  _refused(address, match)


_DRIVER = """
import os
import numpy as np
import ray
from pax_mpmd.errors import ConfigError
from pax_mpmd.runtime.ray_runtime import RayRuntime
from tests.runtime import plans

def run(**options):
  runtime = RayRuntime(**options)
  runtime.start(2)
  handle = runtime.load(plans.waiting_plan())
  runtime.wait(runtime.run(handle, [[np.float32(0)], [np.float32(5)]])[0])
  address = ray.get_runtime_context().gcs_address
  print('ran', *runtime.pids, flush=True)
  runtime.close()
  return address

theirs = os.environ['RAY_ADDRESS']
assert run() == theirs
try:
  run(num_cpus_per_actor=1)
except ConfigError as error:
  print('refused:', error)
ray.init(address=theirs, logging_level=40, log_to_driver=False)
print('actors', *(actor['State'] for actor in ray._private.state.actors().values()), flush=True)
ray.shutdown()
del os.environ['RAY_ADDRESS']
assert run() != theirs
"""


@pytest.fixture
def their_ray() -> Iterator[tuple[str, Process]]:
  """A Ray of somebody else, with one CPU: its address and the process it all belongs to."""
  folder = tempfile.mkdtemp(prefix='ray-', dir='/tmp')  # short, since sockets are in it
  command = [
      str(Path(sys.executable).parent / 'ray'), 'start', '--head', '--block', '--port=0',
      '--num-cpus=1', '--node-ip-address=127.0.0.1', '--include-dashboard=false',
      '--object-store-memory=100000000', f'--temp-dir={folder}', '--disable-usage-stats',
  ]
  env = {k: v for k, v in os.environ.items() if k != 'RAY_ADDRESS' and k != 'PYTHONPATH'}
  started = subprocess.Popen(
      command, cwd='/', env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
  )
  try:
    file = Path(folder) / 'ray_current_cluster'
    deadline = time.monotonic() + 60
    while not file.exists() or not file.read_text().strip():
      assert started.poll() is None and time.monotonic() < deadline
      time.sleep(0.1)
    yield file.read_text().strip(), Process.running(started.pid)
  finally:
    family = descendants(started.pid)
    started.terminate()
    try:
      started.wait(10)
    except subprocess.TimeoutExpired:
      started.kill()
    end_all(family, 5, 5)
    shutil.rmtree(folder, ignore_errors=True)


def test_beside_another_ray(their_ray):
  """It is joined where RAY_ADDRESS says so, and left as it was; else ours runs beside it.

  It is started elsewhere, with another PYTHONPATH; more than it has is refused at once.
  """
  address, root = their_ray
  services = [p for p in descendants(root.pid) if 'ray::' not in p.command()]  # no idle workers
  env = {**os.environ, 'RAY_ADDRESS': address, 'PYTHONPATH': str(REPOSITORY)}
  driver = subprocess.run(
      [sys.executable, '-c', _DRIVER], cwd='/', env=env, capture_output=True, text=True,
      timeout=120, check=False,
  )
  assert driver.returncode == 0, driver.stdout + driver.stderr
  lines = driver.stdout.splitlines()
  ran = [line.split()[1:] for line in lines if line.startswith('ran')]
  assert len(ran) == 2
  assert not any(Process.running(int(pid)).alive() for pids in ran for pid in pids)
  (refused,) = [line for line in lines if line.startswith('refused')]
  assert '2 actors need 2 CPUs of this host, and its Ray has 1' in refused
  assert 'actors DEAD DEAD' in lines
  assert services and all(process.alive() for process in (root, *services))
