"""What `mpmd_jit` needs from a runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pax_mpmd.plan.instructions import Plan
from pax_mpmd.runtime.buffers import Buffer

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
      self, handle: int, inputs: Sequence[Sequence[np.ndarray | Buffer]]
  ) -> list[list[Buffer]]:
    """Starts one step and returns at once.

    Args:
      handle: of the plan.
      inputs: per actor, one value for each of `ActorPlan.inputs`: a host array, or a Buffer that
        lies on that very actor. Buffers the plan donates are consumed.

    Returns:
      Per actor, one Buffer for each of `ActorPlan.outputs`.
    """

  def put(self, actor: int, arrays: Sequence[np.ndarray]) -> list[Buffer]:
    """Copies host arrays to an actor."""

  def fetch(self, buffers: Sequence[Buffer]) -> list[np.ndarray]:
    """Copies buffers to the host; waits for them. One message per actor unless they are large."""

  def wait(self, buffers: Sequence[Buffer]) -> None:
    """Waits until the buffers have been made."""

  def close(self) -> None:
    """Stops the actors. Does nothing the second time."""
