"""Pax's train loop over actors: its own executor with progress and clean ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paxml import executors

from pax_mpmd import errors
from pax_mpmd import signals
from pax_mpmd.pax import checkpoint
from pax_mpmd.pax import partitioner as partitioner_lib
from pax_mpmd.pax import programs
from pax_mpmd.pax import status as status_lib

__all__ = ['MpmdExecutor']


class MpmdExecutor(executors.DefaultExecutor):
  """Runs Pax's train loop with its train, eval and checkpoint parts; the steps run on actors.

  SIGINT or SIGTERM end training after the step in progress, with a checkpoint if saving is enabled;
  before the first step is done, or on a second signal, at once.
  """

  def __init__(self, status: status_lib.Status | None = None):
    super().__init__()
    self._status = status or status_lib.status
    self._report = programs.Report()
    self._progress: programs.TrainWithProgress | None = None
    self._saved_step: int | None = None

  def setup(
      self,
      jax_task: Any,
      job_log_dir: Any,
      checkpointer: Any,
      partitioner: partitioner_lib.MpmdPartitioner,
      input_specs_provider: Any,
      train_input_p: Any,
      train_program: Any,
      eval_programs: Sequence[Any],
      decode_programs: Sequence[Any],
      *args,
      **kwargs,
  ) -> None:
    """As in Pax; wraps the checkpointer and the programs.

    Raises:
      ConfigError: there is something to decode.
    """
    if decode_programs:
      raise errors.ConfigError(
          'Decoding during training (--decode_during_train) is not supported with MPMD pipelining.'
          ' Decode the checkpoints with --mode=decode, without --mpmd: they are the same.'
      )
    say = self._status.say
    step = checkpointer.step_to_restore
    say('preparing the model' if step is None else f'restoring the checkpoint of step {step}')
    self._progress = programs.TrainWithProgress(
        train_program, jax_task.train.num_train_steps, self._report, self._status
    )
    super().setup(
        jax_task,
        job_log_dir,
        checkpoint.PiecewiseCheckpointer(checkpointer, partitioner.place, self._on_save),
        partitioner,
        input_specs_provider,
        train_input_p,
        self._progress,
        programs.with_progress(
            eval_programs,
            self._report,
            self._status,
            self._progress.exclude_pause,
            is_cut=lambda: self._progress.stop_requested,
        ),
        decode_programs,
        *args,
        **kwargs,
    )
    say(f'{self._total_num_params:,} parameters')

  def start(self) -> None:
    """Trains; closes the actors whatever happens."""
    with signals.handlers.training(self._finish_early):
      try:
        super().start()
        self._progress.finish()
      finally:
        signals.handlers.begin_end()
        self._status.say('stopping the actors')
        self._partitioner.close()
    self._say_end()

  def _on_save(self, step: int) -> None:
    # A run that goes on from this checkpoint will not write them again.
    self._progress.finish_summaries()
    self._saved_step = step
    if self._progress.stop_requested:
      self._progress.finish()
    self._status.say(f'saving a checkpoint at step {step}')

  def _finish_early(self, name: str) -> bool:
    progress = self._progress
    if progress.steps_run == 0 or progress.stop_requested:
      return False
    progress.stop_requested = True
    self._status.say(f'{name}: ending after the step in progress (once more: at once)')
    return True

  def _say_end(self) -> None:
    say, report = self._status.say, self._report
    if report.losses:
      (first, a), (last, b) = report.losses[0], report.losses[-1]
      say(f'training loss: {a:.4f} at step {first}, {b:.4f} at step {last}')
      num_steps = self._task.train.num_train_steps
      if last < num_steps and not self._progress.stop_requested:
        say(f'early_stopping_fn ended training at step {last} of {num_steps}')
    else:
      say('nothing left to train: the checkpoint is at the last step already')
    for name, losses in report.eval_losses.items():
      (first, a), (last, b) = losses[0], losses[-1]
      say(f'loss on {name!r}: {a:.4f} at step {first}, {b:.4f} at step {last}')
    if self._saved_step is not None:
      say(f'checkpoint of step {self._saved_step}: {self._job_log_dir / "checkpoints"}')
    say(f'summaries: tensorboard --logdir={self._job_log_dir / "summaries"}')
    if self._progress.stop_requested:
      goes_on = '; the same command goes on from the checkpoint'
      say('stopped early' + (goes_on if self._saved_step is not None else ''))

