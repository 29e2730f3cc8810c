"""Checkpoints of a state whose arrays live on actors, by Paxml's own checkpointer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
from paxml import checkpoints

__all__ = ['GatheringCheckpointer', 'to_mesh']


def to_mesh(state: Any, specs: Any, mesh: jax.sharding.Mesh) -> Any:
  """Host arrays as `jax.Array`s sharded over a mesh: what Pax writes for its SPMD pipelining."""

  def put(x, spec):
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])

  return jax.tree_util.tree_map(put, state, specs)


class GatheringCheckpointer(checkpoints.TrainingCheckpointer):
  """A Pax training checkpointer that gathers the state on the driver only when a save is due.

  Restoring and initialising are the inner checkpointer's; so are the layout on disk, which steps
  are kept, and what is saved of the input pipeline.
  """

  def __init__(
      self,
      inner: Any,
      gather: Callable[[Any], Any],
      mesh: jax.sharding.Mesh,
      on_save: Callable[[int], None] = lambda step: None,
  ):
    """Constructor.

    Args:
      inner: the checkpointer Pax made.
      gather: fetches a tree of arrays to the host.
      mesh: the mesh of the driver's devices.
      on_save: called with the step before it is saved.
    """
    self._inner = inner
    self._gather = gather
    self._mesh = mesh
    self._on_save = on_save

  def __getattr__(self, name: str) -> Any:
    return getattr(self._inner, name)

  @property
  def step_to_restore(self) -> int | None:
    return self._inner.step_to_restore

  @property
  def checkpoint_type(self) -> checkpoints.CheckpointType:
    return self._inner.checkpoint_type

  def wait_until_finished(self) -> None:
    self._inner.wait_until_finished()

  def reached_preemption(self, step: int) -> bool:
    return self._inner.reached_preemption(step)

  def get_model_states(self, *args, **kwargs) -> Any:
    return self._inner.get_model_states(*args, **kwargs)

  def close(self) -> None:
    """Waits for saves in progress; newer versions of Pax close their checkpointers."""
    if hasattr(self._inner, 'close'):
      self._inner.close()
    else:
      self._inner.wait_until_finished()

  def save_if_needed(
      self,
      step_i: int,
      partitioned_train_state: Any,
      train_state_unpadded_shape_dtype_struct: Any = None,
      train_state_pspecs: Any = None,
      train_input_pipeline: Any = None,
  ) -> None:
    if not self._enabled() or not self._inner.checkpoint_manager.should_save(step_i):
      return
    self._on_save(step_i)
    self._inner.save_if_needed(
        step_i,
        self._on_driver(partitioned_train_state, train_state_pspecs),
        train_state_unpadded_shape_dtype_struct,
        train_state_pspecs,
        train_input_pipeline,
    )

  def save_final(
      self,
      step_i: int,
      *,
      partitioned_train_state: Any,
      train_state_unpadded_shape_dtype_struct: Any = None,
      train_state_pspecs: Any = None,
      train_input_pipeline: Any = None,
  ) -> None:
    latest = self._inner.checkpoint_manager.latest_step()
    if not self._enabled() or (latest is not None and latest >= step_i):
      return
    self._on_save(step_i)
    self._inner.save_final(
        step_i,
        partitioned_train_state=self._on_driver(partitioned_train_state, train_state_pspecs),
        train_state_unpadded_shape_dtype_struct=train_state_unpadded_shape_dtype_struct,
        train_state_pspecs=train_state_pspecs,
        train_input_pipeline=train_input_pipeline,
    )

  def _enabled(self) -> bool:
    return getattr(self._inner, '_enable_checkpoint_saving', True)

  def _on_driver(self, state: Any, specs: Any) -> Any:
    if all(isinstance(x, jnp.ndarray) for x in jax.tree_util.tree_leaves(state)):
      return state  # before the first step it has not left the driver
    return to_mesh(self._gather(state), specs, self._mesh)
