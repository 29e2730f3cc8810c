"""What `mpmd_jit` needs from a runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
import concurrent.futures
from typing import Protocol

import numpy as np

from pax_mpmd.compile.program import Aval
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.runtime.buffers import Buffer
from pax_mpmd.runtime.sources import Source
from pax_mpmd.runtime.writer import Sink
from pax_mpmd.timeline.record import ActorRecord

__all__ = ['Runtime']


class Runtime(Protocol):
  """Runs plans on actors. After a failure every call raises the same ActorError."""

  @property
  def num_actors(self) -> int:
    """Number of actors started; 0 before `start`."""

  def start(self, num_actors: int, devices_per_actor: int = 1) -> None:
    """Starts the actors. Does nothing if that many are running already.

    Args:
      num_actors: how many.
      devices_per_actor: how many devices each runs its programs on.

    Raises:
      ConfigError: another number is running already, or they can't be started as configured.
    """

  def load(self, plan: Plan, on_progress: Callable[[int, int], None] | None = None) -> int:
    """Ships a plan, compiles its programs and opens its channels.

    Args:
      plan: one ActorPlan per actor.
      on_progress: called with (programs compiled, programs to compile), over all actors.

    Returns:
      A handle for `run`. Several plans may be loaded; programs they share compile once.
    """

  def run(
      self,
      handle: int,
      inputs: Sequence[Sequence[np.ndarray | Buffer]],
      given_up: Collection[Buffer] = (),
  ) -> list[list[Buffer]]:
    """Starts one step and returns at once.

    Args:
      handle: of the plan.
      inputs: per actor, one value for each of `ActorPlan.inputs`: a host array, or a Buffer that
        lies on that very actor. Buffers the plan donates are consumed.
      given_up: those of these buffers that nobody needs after this step.

    Returns:
      Per actor, one Buffer for each of `ActorPlan.outputs`.
    """

  def put(self, actor: int, arrays: Sequence[np.ndarray]) -> list[Buffer]:
    """Copies host arrays to an actor."""

  def make(self, wanted: Sequence[Sequence[tuple[Aval, Source]]]) -> list[list[Buffer]]:
    """Has each actor make arrays; returns at once.

    Args:
      wanted: per actor what to make, and what makes it.
    """

  def write(
      self, wanted: Sequence[tuple[Buffer, Sink]]
  ) -> list[concurrent.futures.Future[None]]:
    """Has the actors write buffers while they go on; returns at once.

    The buffers may be donated to a step afterwards.

    Returns:
      A future for each actor that writes. It raises CheckpointError if something can't be written.
    """

  def fetch(self, buffers: Sequence[Buffer]) -> list[np.ndarray]:
    """Copies buffers to the host; waits for them. One message per actor unless they are large."""

  def wait(self, buffers: Sequence[Buffer]) -> None:
    """Waits until the buffers have been made."""

  def record(self, handle: int, count_bytes: bool = False) -> None:
    """Has each actor write down what it does in the steps of a plan that are sent from now on.

    Args:
      handle: of the plan.
      count_bytes: also count its arrays after each operation, which takes time; where they can be
        told from those of others.
    """

  def recorded(self) -> list[concurrent.futures.Future[list[ActorRecord]]]:
    """Ends the recording; per actor its records of the steps that were sent since `record`."""

  def close(self) -> None:
    """Stops the actors. Does nothing the second time."""
