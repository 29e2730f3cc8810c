"""Writes down what an actor does in the steps of one plan."""

from __future__ import annotations

from collections.abc import Callable
import time

from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.channels import Transport
from pax_mpmd.runtime.devices import ActorDevices
from pax_mpmd.timeline.record import ActorRecord
from pax_mpmd.timeline.record import Span

__all__ = ['Recorder', 'StepRecorder']


class Recorder:
  """The records of one actor.

  Args:
    handle: the plan; steps of others are not recorded.
    count_bytes: count the actor's live arrays after each operation.
    transport: of the actor.
    devices: of the actor.

  Attributes:
    records: one for each step so far.
  """

  def __init__(
      self, handle: int, count_bytes: bool, transport: Transport, devices: ActorDevices
  ):
    self.records: list[ActorRecord] = []
    self._handle = handle
    self._count_bytes = count_bytes
    self._transport = transport
    self._devices = devices

  def step(self, handle: int, plan: ActorPlan) -> StepRecorder | None:
    """Recorder of a step that begins, its inputs being there; None if it isn't to be recorded."""
    if handle != self._handle:
      return None
    return StepRecorder(self, plan, self._transport, self._devices if self._count_bytes else None)


class StepRecorder:
  """Records one step.

  Attributes:
    spans: to be filled by the interpreter.
    after: to be called after each operation, or None.
  """

  def __init__(
      self,
      recorder: Recorder,
      plan: ActorPlan,
      transport: Transport,
      devices: ActorDevices | None,
  ):
    self.spans: list[Span] = []
    self._recorder = recorder
    self._transport = transport
    self._live: list[int] = []
    self.after: Callable[[], None] | None = None
    if devices is not None:
      mine = sum(plan.slots[slot].nbytes for slot in plan.inputs)
      mine += sum(plan.slots[slot].nbytes for slot, _ in plan.constants)
      # What other steps and plans have left there isn't this step's.
      others = xla.live_bytes(devices.devices) - mine * len(devices)
      self.after = lambda: self._live.append(xla.live_bytes(devices.devices) - others)
    transport.spans = {}
    self._began = time.monotonic()

  def end(self) -> None:
    """The step's results are there."""
    ended = time.monotonic()
    self._transport.settle()
    messages = self._transport.spans or {}
    self._transport.spans = None
    self._recorder.records.append(
        ActorRecord(
            began=self._began,
            ended=ended,
            spans=tuple(self.spans),
            sent={peer: tuple(s) for (what, peer), s in messages.items() if what == 'sent'},
            received={peer: tuple(s) for (what, peer), s in messages.items() if what == 'received'},
            live=tuple(self._live),
        )
    )
