"""Pax's train loop over actors: its own executor with progress, clean ends and gathered saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import signal
import threading
from typing import Any

from paxml import executors

from pax_mpmd import errors
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
    say('initialising the model' if step is None else f'restoring the checkpoint of step {step}')
    self._progress = programs.TrainWithProgress(
        train_program, jax_task.train.num_train_steps, self._report, self._status
    )
    super().setup(
        jax_task,
        job_log_dir,
        checkpoint.GatheringCheckpointer(
            checkpointer, partitioner.fetch, partitioner.global_mesh, self._on_save
        ),
        partitioner,
        input_specs_provider,
        train_input_p,
        self._progress,
        programs.with_progress(
            eval_programs, self._report, self._status, self._progress.exclude_pause
        ),
        decode_programs,
        *args,
        **kwargs,
    )
    say(f'{self._total_num_params:,} parameters')

  def start(self) -> None:
    """Trains; closes the actors whatever happens."""
    try:
      with self._stopping_signals():
        super().start()
        self._progress.finish()
    finally:
      self._status.say('stopping the actors')
      self._partitioner.close()
    self._say_end()

  def _on_save(self, step: int) -> None:
    self._saved_step = step
    if self._progress.stop_requested:
      self._progress.finish()
    self._status.say(f'saving a checkpoint at step {step}')

  @contextlib.contextmanager
  def _stopping_signals(self) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
      yield
      return
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.getsignal(number) for number in numbers}

    def install():
      for number in numbers:
        signal.signal(number, self._on_signal)

    install()
    # Ray installs a handler of its own when it starts.
    self._progress.after_first_step = install
    try:
      yield
    finally:
      for number, handler in old.items():
        signal.signal(number, handler)

  def _on_signal(self, number: int, frame: Any) -> None:
    del frame
    progress = self._progress
    if progress.steps_run == 0 or progress.stop_requested:
      if number == signal.SIGTERM:
        raise SystemExit(128 + number)
      raise KeyboardInterrupt
    progress.stop_requested = True
    name = signal.Signals(number).name
    self._status.say(f'{name}: ending after the step in progress (once more: at once)')

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
      say('stopped early; the same command goes on from the checkpoint')

