"""One actor: its devices, its arrays, its plans. The same object behind threads and processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import time
import traceback
from typing import Any

import numpy as np

from pax_mpmd.compile.program import Aval
from pax_mpmd.compile.program import Executable
from pax_mpmd.plan.instructions import ActorPlan
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

__all__ = ['Actor', 'Part']

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
    }

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
      self, handle: int, step: int, inputs: Sequence[int | np.ndarray], first_output: int
  ) -> bytes:
    """Runs a step; an input is an array or the id of a buffer here. Outputs get ids in order.

    Returns:
      The bytes of the small outputs.
    """
    prepared = self._plans[handle]
    arrays = []
    for value, slot in zip(inputs, prepared.plan.inputs):
      aval = prepared.plan.slots[slot]
      if isinstance(value, int):
        arrays.append(self._devices.as_sharded(self._store[value], aval))
      else:
        # A copy: what came may be memory of the caller, or of Ray's object store.
        arrays.append(self._devices.to_device(value, aval))
    for position in prepared.donated_inputs:
      if isinstance(inputs[position], int):
        self._store.pop(inputs[position], None)
    self.progress.handle = handle
    try:
      outputs = prepared.run(step, arrays, self.progress)
      reply = prepared.reply(outputs)
    finally:
      self.progress.handle = None
    self.progress.steps += 1
    for buffer_id, array in enumerate(outputs, first_output):
      self._store[buffer_id] = array
    return reply

  def _do_put(self, parts: Sequence[Part]) -> None:
    """Stores arrays that come in parts; the parts of one array come in order."""
    for buffer_id, aval, start, data in parts:
      if start == 0:
        self._arriving[buffer_id] = xla.empty_aligned(aval.shape, aval.numpy_dtype)
      memory = self._arriving[buffer_id]
      memory.reshape(-1).view(np.uint8)[start : start + data.size] = data
      if start + data.size == aval.nbytes:
        self._store[buffer_id] = self._devices.adopt(self._arriving.pop(buffer_id), aval)

  def _do_fetch(self, parts: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
    """Bytes [start, stop) of buffers, as uint8[stop - start] each."""
    arrays: dict[int, np.ndarray] = {}
    for buffer_id, _, _ in parts:
      if buffer_id not in arrays:
        array = np.ascontiguousarray(self._store[buffer_id])
        arrays[buffer_id] = array.reshape(-1).view(np.uint8)
    return [arrays[buffer_id][start:stop] for buffer_id, start, stop in parts]
