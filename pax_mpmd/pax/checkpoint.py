"""Checkpoints of a state whose arrays live on actors, by Paxml's own checkpointer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

from paxml import checkpoints

from pax_mpmd import errors
from pax_mpmd.pax import fits
from pax_mpmd.pax import stored
from pax_mpmd.pax import stored_tree

__all__ = ['PiecewiseCheckpointer']


class PiecewiseCheckpointer(checkpoints.TrainingCheckpointer):
  """A Pax training checkpointer of a state in pieces: the actors write and read their own.

  All else is the inner checkpointer's: the layout on disk, which steps are kept, what is saved of
  the input pipeline, whether saving goes on in the background.
  """

  def __init__(
      self,
      inner: Any,
      place: Callable[[Any], Any],
      on_save: Callable[[int], None] = lambda step: None,
  ):
    """Constructor.

    Args:
      inner: the checkpointer Pax made.
      place: moves a state to the actors.
      on_save: called with the step before it is saved.
    """
    self._inner = inner
    self._place = place
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
    """Waits for a save in progress.

    Raises:
      CheckpointError: it could not be written.
    """
    with self._writing():
      self._inner.wait_until_finished()

  def reached_preemption(self, step: int) -> bool:
    return self._inner.reached_preemption(step)

  def get_model_states(self, partitioner: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
    """As in Pax, but nothing large is read or computed yet.

    Raises:
      ConfigError: the checkpoint doesn't fit the experiment.
      CheckpointError: it can't be read.
    """
    with stored.lazily(), fits.restoring(self._inner, metadata):
      return self._inner.get_model_states(partitioner, metadata, *args, **kwargs)

  def close(self) -> None:
    """Waits for saves in progress; newer versions of Pax close their checkpointers."""
    with self._writing():
      if hasattr(self._inner, 'close'):
        self._inner.close()
      else:
        self._inner.wait_until_finished()

  def save_if_needed(self, step_i: int, partitioned_train_state: Any, *args: Any) -> None:
    if self._enabled() and self._inner.checkpoint_manager.should_save(step_i):
      state = self._prepare(step_i, partitioned_train_state)
      with self._writing():
        self._inner.save_if_needed(step_i, state, *args)

  def save_final(self, step_i: int, *, partitioned_train_state: Any, **kwargs: Any) -> None:
    latest = self._inner.checkpoint_manager.latest_step()
    if self._enabled() and (latest is None or latest < step_i):
      state = self._prepare(step_i, partitioned_train_state)
      with self._writing():
        self._inner.save_final(step_i, partitioned_train_state=state, **kwargs)

  def _prepare(self, step: int, state: Any) -> Any:
    stored.install()  # Pax may have registered handlers of its own since
    state = self._place(state)
    self._on_save(step)
    return state

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Explains why a checkpoint could not be written; one in the background may be an earlier."""
    try:
      yield
    except (OSError, ValueError, errors.CheckpointError) as error:  # TensorStore raises ValueError
      folder = self._inner.checkpoint_manager.directory
      raise stored_tree.unwritable(folder, error) from error

  def _enabled(self) -> bool:
    return getattr(self._inner, '_enable_checkpoint_saving', True)
