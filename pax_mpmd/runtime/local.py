"""LocalRuntime: the actors are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import queue
import threading
import time
from typing import Any
import weakref

from pax_mpmd.errors import ConfigError
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.actor import Actor
from pax_mpmd.runtime.devices import ActorDevices
from pax_mpmd.runtime.driver import Driver
from pax_mpmd.runtime.executables import ExecutableCache
from pax_mpmd.runtime.failure import Failure
from pax_mpmd.runtime.local_channel import LocalHub
from pax_mpmd.runtime.local_channel import LocalTransport

__all__ = ['LocalRuntime']

_JOIN_TIMEOUT_S = 2.0


class LocalRuntime(Driver):
  """Runs the actors as threads on the devices of this process.

  Args:
    devices: one for each actor, or as many as its mesh has, taken again from the front where
      there are fewer; by default `jax.local_devices()`.
    channel_capacity: messages a channel holds before a Send waits; None: any number. 0 makes each
      Send wait for its Recv, which shows whether a plan also runs on the poorest channels.
    max_steps_in_flight: how many steps may be under way before `run` waits for the oldest.
  """

  def __init__(
      self,
      devices: Sequence[Any] | None = None,
      channel_capacity: int | None = None,
      max_steps_in_flight: int = 8,
  ):
    super().__init__(max_steps_in_flight)
    if channel_capacity is not None and channel_capacity < 0:
      raise ConfigError(
          f'LocalRuntime.channel_capacity is {channel_capacity}; it must be None (any number of '
          'messages) or at least 0.'
      )
    if devices is not None and not devices:
      raise ConfigError('LocalRuntime.devices is empty; leave it None or name a device.')
    self._devices = devices
    self._channel_capacity = channel_capacity
    self._actors: list[Actor] = []
    self._queues: list[queue.SimpleQueue] = []
    self._hub: LocalHub | None = None
    self._finalizer: weakref.finalize | None = None

  def _start(self, num_actors: int, devices_per_actor: int) -> None:
    available = list(self._devices or xla.local_devices())
    if len(available) < devices_per_actor:
      raise ConfigError(
          f'Each actor\'s mesh has {devices_per_actor} devices, and LocalRuntime has'
          f' {len(available)} ({available}). Give it more (LocalRuntime.devices; on CPUs'
          f' XLA_FLAGS=--xla_force_host_platform_device_count={devices_per_actor * num_actors}'
          ' before JAX starts), or make the mesh smaller.'
      )
    # Actors on the same devices share their compiled programs.
    groups = [
        ActorDevices(available[i : i + devices_per_actor])
        for i in range(0, len(available) - devices_per_actor + 1, devices_per_actor)
    ]
    caches = [ExecutableCache(group) for group in groups]
    self._hub = LocalHub(
        [groups[rank % len(groups)] for rank in range(num_actors)], self._channel_capacity
    )
    threads: list[threading.Thread] = []
    for rank in range(num_actors):
      group = rank % len(groups)
      actor = Actor(rank, groups[group], caches[group], LocalTransport(self._hub, rank))
      messages: queue.SimpleQueue = queue.SimpleQueue()
      self._actors.append(actor)
      self._queues.append(messages)
      thread = threading.Thread(
          target=_work, args=(actor, messages, self._hub), name=f'mpmd-actor-{rank}', daemon=True
      )
      thread.start()
      threads.append(thread)
    self._finalizer = weakref.finalize(self, _stop, self._hub, self._queues, threads)

  def _send(self, actor: int, message: tuple, done: Callable[[Any], None]) -> None:
    # The caller may change an array once `run` has returned, and the step may run later.
    number, freed, method, args = message
    if method == 'step':
      handle, step, values, *rest = args
      values = [value if isinstance(value, int) else value.copy() for value in values]
      args = (handle, step, values, *rest)
    elif method == 'put':
      args = ([(i, aval, start, data.copy()) for i, aval, start, data in args[0]],)
    self._queues[actor].put(((number, freed, method, args), done))

  def _send_written(self, actor: int, ticket: int, done: Callable[[Any], None]) -> None:
    threading.Thread(
        target=lambda: done(self._actors[actor].written(ticket)), name='mpmd-written', daemon=True
    ).start()

  def record(self, handle: int, count_bytes: bool = False) -> None:
    # The arrays of this process are those of all its actors, and its own.
    super().record(handle, count_bytes=False)

  def _compile_progress(self, actor: int) -> tuple[int, int]:
    return self._actors[actor].compiled

  def _kill(self) -> None:
    if self._finalizer is not None:
      self._finalizer()


def _work(actor: Actor, messages: queue.SimpleQueue, hub: LocalHub) -> None:
  """An actor's thread. After a failure it takes no more messages."""
  while True:
    item = messages.get()
    if item is None:
      actor.close()
      return
    message, done = item
    del item
    result = actor.handle(*message)
    done(result)
    if isinstance(result, Failure):
      hub.close()  # after the report, so that those this wakes report later
      return
    del message, result, done


def _stop(
    hub: LocalHub, queues: Sequence[queue.SimpleQueue], threads: Sequence[threading.Thread]
) -> None:
  hub.close()
  for messages in queues:
    messages.put(None)
  # A thread that is still in XLA when Python ends would abort the process.
  deadline = time.monotonic() + _JOIN_TIMEOUT_S
  for thread in threads:
    if thread is not threading.current_thread():
      thread.join(max(0.0, deadline - time.monotonic()))
