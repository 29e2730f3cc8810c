"""Records some steps of a function of `mpmd_jit` and writes what they looked like to files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
import concurrent.futures
import logging
import threading
import time

from pax_mpmd.plan.instructions import Plan
from pax_mpmd.runtime.base import Runtime
from pax_mpmd.runtime.buffers import Buffer
from pax_mpmd.timeline.record import ActorRecord
from pax_mpmd.timeline.record import StepRecord
from pax_mpmd.timeline.write import write

__all__ = ['StepTracer']

_log = logging.getLogger('pax_mpmd')

# Steps that are not recorded at all: the first, which is slow.
_WARM_UP = 1


class StepTracer:
  """Runs the steps of one plan and records some: one that counts bytes, then those to be shown.

  Args:
    plan: the plan.
    runtime: where it runs.
    num_steps: how many steps to show.
    folder: where to write.
    name: of the files.
  """

  def __init__(self, plan: Plan, runtime: Runtime, num_steps: int, folder: str, name: str):
    self._plan = plan
    self._runtime = runtime
    self._num_steps = num_steps
    self._folder = folder
    self._name = name
    self._count = 0
    self._sent: list[float] = []
    self._counted: list[concurrent.futures.Future[list[ActorRecord]]] = []

  def run(self, handle: int, inputs: Sequence, given_up: Collection[Buffer] = ()) -> list:
    """`Runtime.run`, with what has to be sent before and after."""
    number = self._count - _WARM_UP
    self._count += 1
    if number == 0:
      self._runtime.record(handle, count_bytes=True)
    elif number == 1:
      self._runtime.record(handle)
    if 1 <= number <= self._num_steps:
      self._sent.append(time.monotonic())
    outputs = self._runtime.run(handle, inputs, given_up)
    if number == 0:
      self._counted = self._runtime.recorded()
    elif number == self._num_steps:
      # Waited for here, as the caller may stop the actors next.
      counted = [future.result() for future in self._counted]
      recorded = [future.result() for future in self._runtime.recorded()]
      # Not a daemon: a program that ends after its last step still writes its trace.
      threading.Thread(
          target=self._write, args=(self._sent, counted, recorded), name='mpmd-trace'
      ).start()
    return outputs

  def _write(
      self,
      sent: Sequence[float],
      counted: Sequence[Sequence[ActorRecord]],
      actors: Sequence[Sequence[ActorRecord]],
  ) -> None:
    try:
      steps = [
          StepRecord(number, at, records)
          for number, (at, records) in enumerate(zip(sent, zip(*actors), strict=True))
      ]
      (memory,) = zip(*counted)
      path = write(self._plan, steps, memory, self._folder, self._name)
    except Exception as error:  # training goes on without
      _log.warning('The trace of %s could not be written: %s', self._name, error)
      return
    _log.info('trace of %d steps: %s (and .svg, .txt)', len(sent), path)
