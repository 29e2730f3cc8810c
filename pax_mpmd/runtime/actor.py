"""One actor: its devices, its arrays, its plans. The same object behind threads and processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import functools
import time
import traceback
from typing import Any

import numpy as np

from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Executable
from pax_mpmd.errors import CheckpointError
from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.runtime import host_memory
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.channels import ChannelClosed
from pax_mpmd.runtime.channels import Transport
from pax_mpmd.runtime.devices import ActorDevices
from pax_mpmd.runtime.executables import ExecutableCache
from pax_mpmd.runtime.failure import brief
from pax_mpmd.runtime.failure import Failure
from pax_mpmd.runtime.failure import FailureKind
from pax_mpmd.runtime.failure import StepFailed
from pax_mpmd.runtime.interpreter import prepare
from pax_mpmd.runtime.interpreter import PreparedPlan
from pax_mpmd.runtime.interpreter import Progress
from pax_mpmd.runtime.messages import flat_bytes
from pax_mpmd.runtime.recorder import Recorder
from pax_mpmd.runtime.sources import Source
from pax_mpmd.runtime.writer import Sink
from pax_mpmd.runtime.writer import Writer
from pax_mpmd.timeline.record import ActorRecord

__all__ = ['Actor', 'Part']

_LARGE_BYTES = 1 << 20

# (buffer id, aval, first byte, bytes): a piece of an array on its way to an actor.
Part = tuple[int, Aval, int, np.ndarray]


class Actor:
  """Handles the driver's messages, one at a time and in order.

  Args:
    rank: the pipeline rank.
    devices: where its programs run.
    cache: compiled programs of those devices.
    transport: channels to the other actors.
    progress: where to keep the place it is at.
  """

  def __init__(
      self,
      rank: int,
      devices: ActorDevices,
      cache: ExecutableCache,
      transport: Transport,
      progress: Progress | None = None,
  ):
    self.rank = rank
    self.progress = progress or Progress()
    self.compiled: tuple[int, int] = (0, 0)  # programs ready, programs asked for
    self._devices = devices
    self._cache = cache
    self._transport = transport
    self._executables: dict[str, Executable] = {}
    self._plans: dict[int, PreparedPlan] = {}
    self._store: dict[int, xla.Array] = {}
    self._arriving: dict[int, np.ndarray] = {}  # arrays of which only some parts have come
    self._writer = Writer()
    # Programs that make arrays run on one device, whatever the mesh of the steps is.
    self._maker = devices if len(devices) == 1 else ActorDevices(devices.devices[:1])
    self._maker_cache = cache if len(devices) == 1 else ExecutableCache(self._maker)
    self._recorder: Recorder | None = None
    self._num_messages = 0
    self._failure: Failure | None = None

  def handle(self, number: int, freed: Sequence[int], method: str, args: Sequence[Any]) -> Any:
    """Handles message `number`: forgets the `freed` buffers, then does what it asks for.

    Returns:
      The method's result, or a Failure; it never raises, so that a report also arrives where an
      exception could not be pickled. After a failure every answer is that failure: the steps that
      were sent before the driver knew would only miss what the failed one should have made, and
      hide the cause.
    """
    assert number == self._num_messages, f'message {number}, expected {self._num_messages}'
    self._num_messages += 1
    if self._failure is not None:
      return self._failure
    try:
      for buffer_id in freed:
        self._store.pop(buffer_id, None)
      return getattr(self, f'_do_{method}')(*args)
    except StepFailed as error:
      self._failure = error.failure
    except CheckpointError as error:
      self._failure = Failure(FailureKind.UNREADABLE, self.rank, str(error))
    except Exception as error:
      lost = isinstance(error, ChannelClosed)
      self._failure = Failure(
          kind=FailureKind.LOST_PEER if lost else FailureKind.EXCEPTION,
          actor=self.rank,
          message=f'{method}: {brief(error)}.',
          traceback=''.join(traceback.format_exception(error)),
          peer=error.peer if lost else None,
      )
    return self._failure

  def describe_progress(self) -> dict[str, Any]:
    """Where this actor is. Called from another thread while a message is being handled."""
    handle = self.progress.handle
    step, index, since, waits_for = self.progress.at
    age = time.monotonic() - since
    stage = text = None
    if handle is not None:
      stage, text = self._plans[handle].describe(index)
    return {
        'running': handle is not None,
        'step': step,
        'index': index,
        'age': age,
        'waits_for': waits_for,
        'stage': stage,
        'instruction': text,
        'longest': self.progress.longest,
        'steps': self.progress.steps,
        'compiled': self.compiled,
        'writing': self._writer.busy,
        'written': self._writer.written,
    }

  def written(self, ticket: int) -> str:
    """Waits for the arrays of a `write` message; returns what went wrong, or nothing.

    Called from another thread than `handle`, which goes on meanwhile.
    """
    return self._writer.finish(ticket)

  def close(self) -> None:
    """Lets the actor's own threads end."""
    self._writer.close()

  def _do_load(
      self, handle: int, plan: ActorPlan, executables: Mapping[str, Executable], keys: Sequence[str]
  ) -> None:
    """Compiles and prepares a plan. `executables`: those of `keys` that were not sent before."""
    self._executables.update(executables)
    wanted = {key: self._executables[key] for key in keys}

    def on_progress(done: int, total: int) -> None:
      self.compiled = (done, total)

    programs = self._cache.compile_all(wanted, on_progress)
    self._plans[handle] = prepare(plan, wanted, programs, self._transport, self._devices)

  def _do_step(
      self,
      handle: int,
      step: int,
      inputs: Sequence[int | np.ndarray],
      first_output: int,
      given_up: Sequence[int],
  ) -> bytes:
    """Runs a step; an input is an array or the id of a buffer here. Outputs get ids in order.

    Buffers that are given up live only as long as the plan needs them.

    Returns:
      The bytes of the small outputs.
    """
    prepared = self._plans[handle]
    arrays, held = [], {}
    for value, slot in zip(inputs, prepared.plan.inputs):
      aval = prepared.plan.slots[slot]
      if isinstance(value, int):
        arrays.append(self._devices.as_sharded(self._store[value], aval))
      else:
        # A copy: what came may be memory of the caller, or of Ray's object store.
        arrays.append(self._devices.to_device(value, aval))
    for position in prepared.donated_inputs:
      if isinstance(inputs[position], int):
        array = self._store.pop(inputs[position], None)
        if self._writer.reads(array):
          held[prepared.plan.inputs[position]] = functools.partial(self._writer.wait_for, array)
    for buffer_id in given_up:
      self._store.pop(buffer_id, None)
    array = None
    recording = self._recorder and self._recorder.step(handle, prepared.plan)
    self.progress.handle = handle
    try:
      outputs = prepared.run(step, arrays, self.progress, held, recording)
      reply = prepared.reply(outputs)
      if recording:
        recording.end()
    finally:
      self.progress.handle = None
    self.progress.steps += 1
    for buffer_id, array in enumerate(outputs, first_output):
      self._store[buffer_id] = array
    return reply

  def _do_record(self, handle: int, count_bytes: bool) -> None:
    """Records the steps of a plan from now on."""
    self._recorder = Recorder(handle, count_bytes, self._transport, self._devices)

  def _do_recorded(self) -> list[ActorRecord]:
    """What has been recorded; recording ends."""
    recorder, self._recorder = self._recorder, None
    assert recorder is not None, 'nothing is being recorded'
    return recorder.records

  def _do_put(self, parts: Sequence[Part]) -> None:
    """Stores arrays that come in parts; the parts of one array come in order."""
    for buffer_id, aval, start, data in parts:
      if start == 0:
        self._arriving[buffer_id] = xla.empty_aligned(aval.shape, aval.numpy_dtype)
      memory = self._arriving[buffer_id]
      memory.reshape(-1).view(np.uint8)[start : start + data.size] = data
      if start + data.size == aval.nbytes:
        self._store[buffer_id] = self._devices.adopt(self._arriving.pop(buffer_id), aval)

  def _do_prepare(self, executables: Mapping[str, Executable], keys: Sequence[str]) -> None:
    """Compiles the programs that `make` messages will run."""
    self._executables.update(executables)
    self._maker_cache.compile_all({key: self._executables[key] for key in keys})

  def _do_make(self, parts: Sequence[tuple[int, Aval, Source]]) -> None:
    """Makes arrays, one after the other."""

    def compiled(executable: Executable) -> Any:
      return self._maker_cache.compile_all({executable.key: executable})[executable.key].execute

    def to_device(array: np.ndarray) -> xla.Array:
      return xla.to_device(array, self._maker.devices[0])

    for buffer_id, aval, source in parts:
      array = source.make(compiled, to_device)
      if isinstance(array, np.ndarray) and source.owned:
        array = self._devices.adopt(array, aval)
      elif isinstance(array, np.ndarray) or self._maker is not self._devices:
        array = self._devices.to_device(np.asarray(array), aval)
      self._store[buffer_id] = array
      xla.block(array)
      if aval.nbytes >= _LARGE_BYTES:
        host_memory.give_back()  # what making it took beside it, before the next is made

  def _do_write(self, ticket: int, parts: Sequence[tuple[int, Sink]]) -> None:
    """Begins to write arrays; see `written`."""
    self._writer.add(ticket, [(self._store[buffer_id], sink) for buffer_id, sink in parts])

  def _do_fetch(self, parts: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
    """Bytes [start, stop) of buffers, as uint8[stop - start] each."""
    arrays: dict[int, np.ndarray] = {}
    for buffer_id, _, _ in parts:
      if buffer_id not in arrays:
        arrays[buffer_id] = flat_bytes(np.asarray(self._store[buffer_id]))
    return [arrays[buffer_id][start:stop] for buffer_id, start, stop in parts]
