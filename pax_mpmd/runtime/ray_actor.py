"""What runs inside a Ray worker process. Imports jax and numpy, no Pax."""

from __future__ import annotations

from collections.abc import Sequence
import mmap
import os
import signal
import socket
import threading
from typing import Any

from pax_mpmd.runtime import versions
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.actor import Actor
from pax_mpmd.runtime.devices import ActorDevices
from pax_mpmd.runtime.executables import ExecutableCache
from pax_mpmd.runtime.interpreter import Progress
from pax_mpmd.runtime.processes import Process
from pax_mpmd.runtime.shm_channel import ShmTransport

__all__ = ['RayActor', 'host_id']

PROGRESS_WORDS = 3
_ORPHAN_CHECK_S = 0.5


def host_id() -> str:
  """Equal for processes that can share memory and abstract sockets."""
  with open('/proc/sys/kernel/random/boot_id') as file:
    boot = file.read().strip()
  return f'{socket.gethostname()}/{boot}/{os.readlink("/proc/self/ns/net")}'


def _end_with(driver: Process, companions: Sequence[Process]) -> None:
  driver.wait(_ORPHAN_CHECK_S)  # at once, before Ray ends this process too
  for process in companions:
    process.kill()
  os.kill(os.getpid(), signal.SIGKILL)


class RayActor:
  """One pipeline rank.

  Args:
    rank: the pipeline rank.
    run_id: names the run's sockets.
    secret: what the run's processes prove to each other.
    driver: the driver's process; this one ends with it.
    companions: processes that this one then ends too.
  """

  def __init__(
      self,
      rank: int,
      run_id: str,
      secret: bytes,
      driver: Process,
      companions: Sequence[Process],
  ):
    # Ray ends the actors of a driver that died, but waits for what they are doing (a program that
    # runs long, a message that will never come), and its own helpers notice only after a minute.
    if driver.alive():  # else it is on another host, or invisible from here
      threading.Thread(
          target=_end_with, args=(driver, companions), name='mpmd-orphan', daemon=True
      ).start()
    self._rank = rank
    self._run_id = run_id
    self._secret = secret
    self._actor: Actor | None = None

  def hello(self, driver_versions: dict[str, str], num_devices: int) -> dict[str, Any]:
    """Says who this is and, if it is what the driver needs, gets ready for messages."""
    mine = versions.versions()
    reply: dict[str, Any] = {'versions': mine, 'pid': os.getpid(), 'host': host_id()}
    if versions.differences(driver_versions, mine):
      return reply
    available = xla.local_devices()
    reply['devices'] = [str(device) for device in available]
    if len(available) < num_devices:
      return reply
    devices = ActorDevices(available[:num_devices])
    # The driver maps this memory too and so knows the last instruction of a process that was
    # killed. It has no name; the descriptor stays open for the driver to find.
    fd = os.memfd_create('pax-mpmd-progress', os.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    words = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast('q')[:PROGRESS_WORDS]
    transport = ShmTransport(self._run_id, self._rank, self._secret, devices)
    self._actor = Actor(self._rank, devices, ExecutableCache(devices), transport, Progress(words))
    reply['progress_fd'] = fd
    return reply

  def call(self, number: int, freed: Sequence[int], method: str, args: Sequence[Any]) -> Any:
    """Handles one message of the driver; see `Actor.handle`."""
    assert self._actor is not None
    return self._actor.handle(number, freed, method, args)

  def written(self, ticket: int) -> str:
    """See `Actor.written`; waits in a thread of its own."""
    assert self._actor is not None
    return self._actor.written(ticket)

  def ping(self) -> dict[str, Any]:
    """Where this actor is; answered in a thread of its own while `call` runs."""
    assert self._actor is not None
    return self._actor.describe_progress()
