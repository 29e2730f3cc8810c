"""Compiling programs: once per actor's devices and key, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import os
import threading

from pax_mpmd.compile.program import Executable
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.devices import ActorDevices

__all__ = ['CompiledProgram', 'ExecutableCache']


class CompileError(RuntimeError):
  """XLA refused a program."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
  """A program ready to run.

  Attributes:
    execute: all arguments (arrays on the actor's devices) -> all results.
    donated: positions of arguments that are gone after a call.
  """

  execute: Callable[[Sequence[xla.Array]], list[xla.Array]]
  donated: tuple[int, ...]


class ExecutableCache:
  """The compiled programs of an actor's devices. Thread-safe; equal keys are compiled once."""

  def __init__(self, devices: ActorDevices, num_threads: int | None = None):
    self._devices = devices
    self._num_threads = num_threads or max(1, min(4, os.cpu_count() or 1))
    self._lock = threading.Lock()
    self._futures: dict[str, concurrent.futures.Future[CompiledProgram]] = {}

  def compile_all(
      self,
      executables: Mapping[str, Executable],
      on_progress: Callable[[int, int], None] | None = None,
  ) -> dict[str, CompiledProgram]:
    """Compiles what isn't compiled yet and returns a program for every key.

    Args:
      executables: the programs by key.
      on_progress: called with (programs ready, programs asked for), from any thread.

    Raises:
      CompileError: XLA refused a program; its cause is XLA's own exception.
    """
    total = len(executables)
    done = 0
    with self._lock:
      missing = [key for key in executables if key not in self._futures]
      for key in missing:
        self._futures[key] = concurrent.futures.Future()
      futures = {key: self._futures[key] for key in executables}
    pool = concurrent.futures.ThreadPoolExecutor(self._num_threads, 'mpmd-compile')
    try:
      for key in missing:
        pool.submit(self._compile, executables[key], futures[key])
      if on_progress is not None:
        on_progress(0, total)
      for future in concurrent.futures.as_completed(futures.values()):
        future.result()
        done += 1
        if on_progress is not None:
          on_progress(done, total)
    finally:
      pool.shutdown(wait=False, cancel_futures=True)
    return {key: future.result() for key, future in futures.items()}

  def _compile(self, executable: Executable, future: concurrent.futures.Future) -> None:
    try:
      execute = self._devices.compile(executable)
      future.set_result(CompiledProgram(execute, executable.donated))
    except Exception as error:  # handed to every waiter, the compile thread goes on
      with self._lock:
        self._futures.pop(executable.key, None)
      wrapped = CompileError(
          f'program {executable.key[:16]} ({len(executable.inputs)} arguments, '
          f'{len(executable.outputs)} results, {len(executable.module)} bytes of StableHLO) '
          f'does not compile: {error}'
      )
      wrapped.__cause__ = error
      future.set_exception(wrapped)
