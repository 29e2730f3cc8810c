"""RayRuntime: the actors are Ray actors, one process each."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
import dataclasses
import logging
import threading
from typing import Any
import weakref

from pax_mpmd.errors import ConfigError
from pax_mpmd.runtime.driver import Driver
from pax_mpmd.runtime.failure import Failure
from pax_mpmd.runtime.failure import FailureKind
from pax_mpmd.runtime.interpreter import instruction_text
from pax_mpmd.runtime.interpreter import stage_of
from pax_mpmd.runtime.ray_monitor import Limits
from pax_mpmd.runtime.ray_monitor import place
from pax_mpmd.runtime.ray_monitor import Watch
from pax_mpmd.runtime.ray_session import RaySession
from pax_mpmd.runtime.ray_session import worker_environment

__all__ = ['RayRuntime']


class RayRuntime(Driver):
  """Runs each actor in a process of its own, on this host.

  Between actors arrays go through shared memory; Ray starts and ends the processes and carries
  one message per actor per step. A dead, raising or stuck actor ends the run within seconds.

  Args:
    address: of a running Ray; None: the environment variable RAY_ADDRESS, else a Ray of our own
      is started and ended with the runtime. A Ray this process is already connected to is used.
    num_cpus_per_actor: what Ray's scheduler books for each actor.
    num_gpus_per_actor: the same for GPUs.
    actor_env: environment variables of the workers; they win over those made here.
    threads_per_actor: threads XLA uses for one operation on a CPU; None: one.
    max_steps_in_flight: how many steps may be under way before `run` waits for the oldest.
    start_timeout_s: seconds for all actors to start.
    ping_interval_s: see `Limits`, as the next ones.
    ping_timeout_s: an actor that doesn't answer for so long is stuck.
    load_ping_timeout_s: the same while programs are being compiled.
    stall_timeout_s: a step that doesn't move for so long is stuck, or ...
    stall_factor: ... for so many times the longest instruction so far, whichever is more.
    first_step_timeout_s: the same for a plan's first step.
    write_timeout_s: the same while a checkpoint is being written.
    log: told what is being waited for; by default the logger `pax_mpmd`, at level INFO.
  """

  def __init__(
      self,
      address: str | None = None,
      num_cpus_per_actor: float = 0,
      num_gpus_per_actor: float = 0,
      actor_env: Mapping[str, str] | None = None,
      threads_per_actor: int | None = None,
      max_steps_in_flight: int = 8,
      start_timeout_s: float = 120.0,
      ping_interval_s: float = 0.5,
      ping_timeout_s: float = 6.0,
      load_ping_timeout_s: float = 60.0,
      stall_timeout_s: float = 8.0,
      stall_factor: float = 20.0,
      first_step_timeout_s: float = 300.0,
      write_timeout_s: float = 300.0,
      log: Callable[[str], None] | None = None,
  ):
    super().__init__(max_steps_in_flight)
    self._limits = Limits(
        ping_interval_s=ping_interval_s,
        ping_timeout_s=ping_timeout_s,
        load_ping_timeout_s=load_ping_timeout_s,
        stall_timeout_s=stall_timeout_s,
        stall_factor=stall_factor,
        first_step_timeout_s=first_step_timeout_s,
        write_timeout_s=write_timeout_s,
    )
    positive = {**dataclasses.asdict(self._limits), 'start_timeout_s': start_timeout_s}
    if threads_per_actor is not None:
      positive['threads_per_actor'] = threads_per_actor
    for name, value in positive.items():
      if not value > 0:
        raise ConfigError(f'RayRuntime.{name} is {value}; it must be greater than 0.')
    for name, value in (
        ('num_cpus_per_actor', num_cpus_per_actor),
        ('num_gpus_per_actor', num_gpus_per_actor),
    ):
      if value < 0:
        raise ConfigError(f'RayRuntime.{name} is {value}; it must be at least 0.')
    self._address = address
    self._num_cpus = num_cpus_per_actor
    self._num_gpus = num_gpus_per_actor
    self._actor_env = actor_env
    self._threads = threads_per_actor
    self._start_timeout_s = start_timeout_s
    self._log = log or logging.getLogger('pax_mpmd').info
    self._session: RaySession | None = None
    self._watch: Watch | None = None
    self._stopped = threading.Event()
    self._finalizer: weakref.finalize | None = None

  @property
  def pids(self) -> list[int]:
    """Process ids of the actors, in the order of their ranks."""
    return [process.pid for process in self._session.processes] if self._session else []

  def close(self) -> None:
    super().close()
    if self._finalizer is not None:
      atexit.unregister(self._finalizer)
      self._finalizer()

  def _start(self, num_actors: int, devices_per_actor: int) -> None:
    session = RaySession(
        self._address,
        devices_per_actor,
        self._num_cpus,
        self._num_gpus,
        worker_environment(self._actor_env, self._threads, devices_per_actor),
        self._start_timeout_s,
        self._log,
    )
    session.start(num_actors)
    self._session = session
    self._watch = Watch(num_actors, self._limits)
    self._finalizer = weakref.finalize(self, _end, session, self._stopped)
    # At exit it must run before Ray's own handler, so it is registered after that one; finalizers
    # as such run when the first of the process was made, which is before.
    self._finalizer.atexit = False
    atexit.register(self._finalizer)
    threading.Thread(
        target=_monitor,
        args=(weakref.ref(self), self._stopped, self._limits.ping_interval_s),
        name='mpmd-monitor',
        daemon=True,
    ).start()

  def _send(self, actor: int, message: tuple, done: Callable[[Any], None]) -> None:
    ref = self._session.handles[actor].call.remote(*message)
    ref.future().add_done_callback(lambda future: done(_result(actor, future)))

  def _send_written(self, actor: int, ticket: int, done: Callable[[Any], None]) -> None:
    handle = self._session.handles[actor]
    ref = handle.written.options(concurrency_group='writing').remote(ticket)
    ref.future().add_done_callback(lambda future: done(_result(actor, future)))

  def _compile_progress(self, actor: int) -> tuple[int, int]:
    reply = self._watch.replies[actor]
    return reply['compiled'] if reply else (0, 0)

  def _kill(self) -> None:
    self._stopped.set()
    if self._session is not None:
      self._session.kill_actors()

  def _last_known(self, actor: int) -> dict[str, Any]:
    words = self._session.progress[actor]
    if words is None:
      return place(self._watch.replies[actor])
    handle, step, index = words[0] - 1, words[1], words[2]
    if handle < 0:
      return {}
    instructions = self._plans[handle].plan.actors[actor].instructions
    if not 0 <= index < len(instructions):
      return {'step': step}
    instruction = instructions[index]
    stage, text = stage_of(instruction), instruction_text(instruction)
    return {'step': step, 'stage': stage, 'instruction': text}

  def _look(self) -> None:
    """One round of the monitor."""
    methods = self._calls.methods()
    watch = self._watch
    if not methods:
      watch.reset()
      return
    for actor, handle in enumerate(self._session.handles):
      if watch.asks(actor):
        future = handle.ping.options(concurrency_group='control').remote().future()
        future.add_done_callback(_ping_answer(watch, actor))
    loading = not methods.isdisjoint(('load', 'prepare', 'make'))
    failure = watch.look(
        loading, 'step' in methods, self._is_first_step(), 'written' in methods
    )
    if failure is not None:
      self._calls.report(failure)


def _ping_answer(watch: Watch, actor: int) -> Callable[[Any], None]:
  def answered(future: Any) -> None:
    if future.exception() is None:  # else the message it waits for reports the death
      watch.answered(actor, future.result())

  return answered


def _result(actor: int, future: Any) -> Any:
  """What a message gave; Ray's own errors as a Failure."""
  error = future.exception()
  if error is None:
    return future.result()
  from ray import exceptions

  if isinstance(error, exceptions.RayActorError):
    # Ray lists whatever can be the cause of any death; it goes to the log only.
    logging.getLogger('pax_mpmd').debug('actor %d: %s', actor, error)
    return Failure(FailureKind.DEATH, actor, 'its process died.')
  return Failure(
      FailureKind.EXCEPTION, actor, f'{type(error).__name__}.', traceback=str(error)
  )


def _monitor(runtime_ref: Any, stopped: threading.Event, interval_s: float) -> None:
  """Looks at the runtime until it is stopped or nobody has it any more."""
  while not stopped.wait(interval_s):
    runtime = runtime_ref()
    if runtime is None:
      return
    try:
      runtime._look()
    except Exception:  # without this thread a stuck actor would go unseen
      logging.getLogger('pax_mpmd').exception('The monitor failed; it goes on.')
    del runtime


def _end(session: RaySession, stopped: threading.Event) -> None:
  stopped.set()
  session.close()
