"""Ray itself: joining or starting it, the workers' environment, their start and their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import logging
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
from typing import Any
from unittest import mock
import uuid
import warnings

import jax

import pax_mpmd
from pax_mpmd.errors import ActorError
from pax_mpmd.errors import ConfigError
from pax_mpmd.runtime import ray_join
from pax_mpmd.runtime import versions
from pax_mpmd.runtime.processes import descendants
from pax_mpmd.runtime.processes import end_all
from pax_mpmd.runtime.processes import Process
from pax_mpmd.runtime.ray_actor import host_id
from pax_mpmd.runtime.ray_actor import RayActor

__all__ = ['RaySession', 'worker_environment']

_OBJECT_STORE_BYTES = 200 << 20
_KILL_GRACE_S = 0.5
_KILL_TIMEOUT_S = 5.0

# How many sessions use the Ray that we started; it ends with the last one.
_users_lock = threading.Lock()
_num_users = 0


def worker_environment(
    actor_env: Mapping[str, str] | None, threads_per_actor: int | None, devices_per_actor: int = 1
) -> dict[str, str]:
  """Environment variables of a worker, on top of those Ray gives it.

  Args:
    actor_env: the user's; these win.
    threads_per_actor: threads XLA may use for one operation on a CPU; None: one.
    devices_per_actor: devices of an actor's mesh.
  """
  env: dict[str, str] = {}
  root = os.path.dirname(os.path.dirname(os.path.abspath(pax_mpmd.__file__)))
  path = os.environ.get('PYTHONPATH')
  env['PYTHONPATH'] = root + (os.pathsep + path if path else '')
  if jax.default_backend() == 'cpu':
    env['JAX_PLATFORMS'] = 'cpu'
  env['JAX_ENABLE_X64'] = str(int(jax.config.jax_enable_x64))
  # The driver pretends to have the whole pipeline's devices; an actor has its own.
  flags = [
      flag
      for flag in os.environ.get('XLA_FLAGS', '').split()
      if not flag.startswith('--xla_force_host_platform_device_count')
  ]
  # Several actors share a host's cores, and each is one rank of a pipeline that keeps all of them
  # busy: more threads an actor would only get in each other's way.
  threads = threads_per_actor or 1
  eigen = 'true' if threads > 1 else 'false'
  if devices_per_actor > 1:
    flags.append(f'--xla_force_host_platform_device_count={devices_per_actor}')
  flags += [f'--xla_cpu_multi_thread_eigen={eigen}', f'intra_op_parallelism_threads={threads}']
  env['XLA_FLAGS'] = ' '.join(flags)
  env['OMP_NUM_THREADS'] = str(threads)
  # What XLA takes for the number of cores: else it splits loops that the flags above don't know of,
  # and threads that have no part wait for one in a busy loop.
  env['NPROC'] = str(threads)
  env.update({name: str(value) for name, value in (actor_env or {}).items()})
  return env


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
  """Keeps handlers of signals that the program has installed; Ray would put its own over them."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  from ray._private import utils

  old = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
  old = {n: h for n, h in old.items() if callable(h) and h is not signal.default_int_handler}
  keeps = signal.SIGTERM in old
  none = mock.patch.object(utils, 'set_sigterm_handler', lambda handler: None)
  try:
    with none if keeps else contextlib.nullcontext():
      yield
  finally:
    for number, handler in old.items():
      signal.signal(number, handler)  # once more, since Ray also does it outside of Python


def _keep_deaths_quiet() -> None:
  """Keeps Ray from printing that a worker died: the run's own error says so, and where it was."""
  from ray._private import worker

  show = getattr(worker, 'print_to_stdstream', None)
  if show is None or hasattr(show, '__wrapped__'):
    return

  @functools.wraps(show)
  def show_others(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    lines = data.get('lines') or ()
    if data.get('pid') == 'raylet' and any('worker died or was killed' in x for x in lines):
      logging.getLogger('pax_mpmd').debug('%s', lines)
    else:
      show(data, *args, **kwargs)

  worker.print_to_stdstream = show_others


class RaySession:
  """The Ray actors of one RayRuntime.

  Args:
    address: of a running Ray; None: RAY_ADDRESS if set, else a Ray of our own.
    devices_per_actor: devices each needs.
    num_cpus_per_actor: what Ray's scheduler books for each.
    num_gpus_per_actor: the same for GPUs.
    env: the workers' environment.
    start_timeout_s: seconds for all actors to be ready.
    log: told what is being waited for.
  """

  def __init__(
      self,
      address: str | None,
      devices_per_actor: int,
      num_cpus_per_actor: float,
      num_gpus_per_actor: float,
      env: Mapping[str, str],
      start_timeout_s: float,
      log: Callable[[str], None],
  ):
    self._address = address
    self._devices_per_actor = devices_per_actor
    self._num_cpus = num_cpus_per_actor
    self._num_gpus = num_gpus_per_actor
    self._env = dict(env)
    self._start_timeout_s = start_timeout_s
    self._log = log
    self._owns_ray = False
    self.handles: list[Any] = []
    self.processes: list[Process] = []
    self.progress: list[memoryview | None] = []  # each actor's Progress.words

  def start(self, num_actors: int) -> None:
    """Starts all actors at once and returns when each is ready.

    Raises:
      ConfigError: they can't be started as configured.
      ActorError: one died on the way.
    """
    global _num_users
    os.environ.setdefault('RAY_ENABLE_UV_RUN_RUNTIME_ENV', '0')  # it would upload the work folder
    import ray

    with _users_lock:
      if _num_users:
        _num_users += 1
        self._owns_ray = True
      elif not ray.is_initialized():
        self._init_ray(num_actors)
    try:
      self._start_actors(num_actors)
    except BaseException:
      self.close()
      raise

  def _init_ray(self, num_actors: int) -> None:
    global _num_users
    import ray

    address = self._address or os.environ.get('RAY_ADDRESS')
    quiet = {
        'namespace': f'pax-mpmd-{uuid.uuid4().hex}',
        'log_to_driver': False,
        'logging_level': logging.ERROR,
        'configure_logging': False,
    }
    with _own_handlers(), warnings.catch_warnings():
      # JAX warns of every fork; Ray's processes exec at once, so it does no harm.
      warnings.filterwarnings('ignore', r'os\.fork\(\) was called', RuntimeWarning)
      if address and address != 'local':
        self._log(f'Joining Ray at {address}')
        source = 'RayRuntime.address' if self._address else 'The environment variable RAY_ADDRESS'
        ray_join.join(address, source, **quiet)
      else:
        self._log('Starting Ray on this host')
        ray.init(
            address='local',  # never a Ray that somebody else happens to run here
            # Only what will be booked: Ray starts that many idle workers in advance.
            num_cpus=math.ceil(num_actors * self._num_cpus),
            num_gpus=math.ceil(num_actors * self._num_gpus),
            include_dashboard=False,
            # Steps' inputs and fetched results only; activations never come here.
            object_store_memory=_OBJECT_STORE_BYTES,
            # By default Ray's workers yield to every other process of the host; here they are the
            # program, and whoever shares a core with one would stop the whole pipeline.
            _system_config={'worker_niceness': 0},
            **quiet,
        )
    _keep_deaths_quiet()
    _num_users = 1
    self._owns_ray = True

  def _start_actors(self, num_actors: int) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    self._log(f'Starting {num_actors} actors')
    here = ray.get_runtime_context().get_node_id()
    self._check_resources(here, num_actors)
    # Two threads for control: a ping must be answered while a step runs in the default group's one.
    groups = {'control': 2, 'writing': 1}  # waiting for a checkpoint must not stop pings either
    remote_class = ray.remote(concurrency_groups=groups)(RayActor)
    driver = Process.running(os.getpid())
    # Of a Ray that is ours, what remains when this process is killed and takes the rest along.
    raylet_children = 'ray/dashboard/agent.py', 'ray/_private/runtime_env/agent/main.py'
    companions = [
        process
        for process in (descendants(driver.pid) if self._owns_ray else ())
        if any(path in process.command() for path in raylet_children)
    ]
    run_id = uuid.uuid4().hex
    secret = secrets.token_bytes(32)
    refs = []
    for rank in range(num_actors):
      handle = remote_class.options(
          num_cpus=self._num_cpus,
          num_gpus=self._num_gpus,
          max_restarts=0,
          max_task_retries=0,
          runtime_env={'env_vars': self._env},
          # The channels are shared memory, so all actors are on the driver's own host.
          scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
      ).remote(rank, run_id, secret, driver, companions)
      self.handles.append(handle)
      refs.append(handle.hello.remote(versions.versions(), self._devices_per_actor))
    _, missing = ray.wait(
        refs, num_returns=num_actors, timeout=self._start_timeout_s, fetch_local=True
    )
    if missing:
      ranks = [rank for rank, ref in enumerate(refs) if ref in missing]
      raise self._no_room(
          f'Actors {ranks} of {num_actors} did not start within {self._start_timeout_s} s '
          '(RayRuntime.start_timeout_s)'
      )
    for rank, ref in enumerate(refs):
      try:
        reply = ray.get(ref)
      except ray.exceptions.ActorUnschedulableError as error:
        raise self._no_room(f'Ray has no room for actor {rank} of {num_actors}') from error
      except ray.exceptions.RayError as error:
        raise self._start_error(rank, error) from error
      self._check_reply(rank, reply)
      process = Process.running(reply['pid'])
      self.processes.append(process)
      self.progress.append(process.map_shared(reply['progress_fd']))

  def _check_resources(self, node: str, num_actors: int) -> None:
    """Refuses what the host can never give; for what is only in use, starting waits."""
    import ray

    (resources,) = [n['Resources'] for n in ray.nodes() if n['NodeID'] == node] or [{}]
    for name, each in (('CPU', self._num_cpus), ('GPU', self._num_gpus)):
      if num_actors * each > resources.get(name, 0):
        raise self._no_room(
            f'{num_actors} actors need {num_actors * each:g} {name}s of this host, and its Ray has'
            f' {resources.get(name, 0):g}'
        )

  def _no_room(self, what: str) -> ConfigError:
    import ray

    return ConfigError(
        f'{what}. Each actor asks for {self._num_cpus} CPUs and {self._num_gpus} GPUs of this host '
        '(RayRuntime.num_cpus_per_actor, num_gpus_per_actor); Ray has '
        f'{ray.available_resources()} free. Ask for less, or start Ray with more.'
    )

  def _check_reply(self, rank: int, reply: Mapping[str, Any]) -> None:
    differences = versions.differences(versions.versions(), reply['versions'])
    if differences:
      raise ConfigError(
          f'Actor {rank} runs other versions than the driver: {"; ".join(differences)}. Programs '
          'are exchanged between them, so install the same versions on both sides.'
      )
    if len(reply['devices']) < self._devices_per_actor:
      raise ConfigError(
          f'Actor {rank} has {len(reply["devices"])} devices ({", ".join(reply["devices"])}), and'
          f' its mesh needs {self._devices_per_actor}. Give each actor more'
          ' (RayRuntime.num_gpus_per_actor, actor_env), or make the mesh smaller.'
      )
    if reply['host'] != host_id():
      raise ConfigError(
          f'Actor {rank} is on {reply["host"]}, the driver on {host_id()}. RayRuntime runs all '
          'actors on the driver\'s host; start the driver on the host that is to run them.'
      )

  def _start_error(self, rank: int, error: Exception) -> ActorError:
    """Why a worker died before it answered: the same start again, where it can be seen."""
    env = {**os.environ, **self._env}
    try:
      trial = subprocess.run(
          [sys.executable, '-c', 'import jax; jax.local_devices()'],
          env=env,
          capture_output=True,
          text=True,
          timeout=60,
          check=False,
      )
      output = trial.stderr.strip()[-2000:] if trial.returncode else ''
    except (OSError, subprocess.SubprocessError) as failure:
      output = str(failure)
    if not output:
      return ActorError(
          f'actor {rank}: its process did not start.', actor=rank, remote_traceback=str(error)
      )
    return ActorError(
        f'actor {rank}: its process ended while JAX started in it. Its XLA_FLAGS: '
        f'{self._env.get("XLA_FLAGS", "")!r} (XLA_FLAGS of the driver, RayRuntime.actor_env and '
        'threads_per_actor make them up).',
        actor=rank,
        remote_traceback=output,
    )

  def kill_actors(self) -> None:
    """Ends the actors; returns when their processes are gone."""
    import ray

    handles, self.handles = self.handles, []
    # Asked of a Ray that is gone, ray.kill would start another one.
    for handle in handles if ray.is_initialized() else ():
      try:
        ray.kill(handle, no_restart=True)
      except Exception:  # Ray itself may be gone already; the processes are seen to below
        pass
    # A stopped process (SIGSTOP) does not hear Ray.
    end_all(self.processes, _KILL_GRACE_S, _KILL_TIMEOUT_S)

  def close(self) -> None:
    """Ends the actors, and Ray if it is ours and nobody else uses it."""
    global _num_users
    import ray

    self.kill_actors()
    with _users_lock:
      if not self._owns_ray:
        return
      self._owns_ray = False
      _num_users -= 1
      if _num_users == 0:
        ray.shutdown()
