"""Wrappers of Pax's train and eval programs that report progress and can be asked to stop."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import time
from typing import Any
from unittest import mock

import numpy as np
from paxml import programs

from pax_mpmd.pax import status as status_lib

__all__ = ['EvalWithProgress', 'Report', 'TrainWithProgress', 'with_progress']


class Report:
  """The numbers that the last lines of a run tell.

  Attributes:
    losses: (step, training loss) of the first and the newest step fetched.
    eval_losses: name of the data set -> (step, loss) of its first and last evaluation.
  """

  def __init__(self):
    self.losses: list[tuple[int, float]] = []
    self.eval_losses: dict[str, list[tuple[int, float]]] = {}

  def add_loss(self, step: int, loss: float) -> None:
    self.losses = [*self.losses[:1], (step, loss)]

  def add_eval_loss(self, name: str, step: int, loss: float) -> None:
    known = self.eval_losses.get(name, [])
    self.eval_losses[name] = [*known[:1], (step, loss)]


class TrainWithProgress:
  """A Pax train program that says on the terminal how far it is.

  It looks at losses one step late, so that it never waits for the step just started.
  """

  def __init__(
      self,
      inner: programs.BaseTrainProgram,
      num_steps: int,
      report: Report,
      status: status_lib.Status,
      interval_s: float = 5.0,
  ):
    """Constructor.

    Args:
      inner: the program that does the work.
      num_steps: the step training ends at.
      report: receives the losses.
      status: where to say it.
      interval_s: seconds between two lines.
    """
    self._inner = inner
    self._num_steps = num_steps
    self._report = report
    self._status = status
    self._interval_s = interval_s
    self._pending: collections.deque = collections.deque()
    self._window: tuple[float, int] | None = None
    self._pause = 0.0
    self.steps_run = 0
    self.stop_requested = False

  def __getattr__(self, name: str) -> Any:
    return getattr(self._inner, name)

  def should_run(self, state: Any, step: int) -> bool:
    return not self.stop_requested and self._inner.should_run(state, step)

  def run(self, state: Any, step: int) -> programs.TrainProgramOutput:
    if self.steps_run == 0:
      self._status.say('tracing and compiling the train step')
    output = self._inner.run(state, step)
    self.steps_run += 1
    self._pending.append((output.new_train_step, output.loss))
    if self.steps_run == 1:
      self._fetch(keep=0)
      self._say()
      self._window = (time.monotonic(), output.new_train_step)
    elif time.monotonic() - self._window[0] >= self._interval_s:
      self._fetch(keep=1)
      self._say()
    return output

  def exclude_pause(self, seconds: float) -> None:
    """Takes time spent on something else (evaluation, saving) out of the step rate."""
    if self._window is not None:
      self._window = (self._window[0] + seconds, self._window[1])

  def finish(self) -> None:
    """Says where training has got to, after all its steps are done."""
    if self._pending:
      self._fetch(keep=0)
      self._say()

  def finish_summaries(self) -> None:
    """Waits until the summaries of all steps so far are in their files.

    Pax fetches and writes them in a thread of its own.
    """
    handler = getattr(self._inner, '_train_summary_handler', None)
    pool = getattr(handler, '_summary_pool', None)
    if pool is not None:
      pool.submit(lambda: None).result()  # the pool has one thread: all before it is done

  def _fetch(self, keep: int) -> None:
    last = None
    while len(self._pending) > keep:
      last = self._pending.popleft()
    if last is not None:
      self._report.add_loss(last[0], float(np.mean(np.asarray(last[1]))))

  def _say(self) -> None:
    step, loss = self._report.losses[-1]
    text = f'step {step}/{self._num_steps}  loss {loss:.4f}'
    if self._window is not None:
      then, since = self._window
      rate = (step - since) / max(time.monotonic() - then, 1e-9)
      if rate > 0:
        text += f'  {rate:.2f} steps/s  {_duration((self._num_steps - step) / rate)} left'
      self._window = (time.monotonic(), step)
    self._status.say(text)


class _Cut(Exception):
  """Raised between two batches of an evaluation that nobody waits for any more."""


class EvalWithProgress:
  """A Pax eval program that says what it is doing and what came out.

  Attributes:
    inner: the program that does the work.
  """

  def __init__(
      self,
      inner: programs.BaseEvalProgram,
      report: Report,
      status: status_lib.Status,
      on_pause: Callable[[float], None] = lambda seconds: None,
      waits: bool = False,
      is_cut: Callable[[], bool] = lambda: False,
  ):
    """Constructor.

    Args:
      inner: the program that does the work.
      report: receives the losses.
      status: where to say it.
      on_pause: called with the seconds that an evaluation took.
      waits: Pax waits for the next checkpoint afterwards, if there is to be one.
      is_cut: asked before each batch; whether to leave the evaluation, without results.
    """
    self.inner = inner
    self._report = report
    self._status = status
    self._on_pause = on_pause
    self._waits = waits
    self._is_cut = is_cut

  def __getattr__(self, name: str) -> Any:
    return getattr(self.inner, name)

  def run(self, state: Any, step: int) -> programs.EvalProgramOutput:
    start = time.monotonic()
    name = self.inner.eval_input.name
    self._status.passing(f'evaluating on {name!r}')
    try:
      output = self._run(state, step)
    except _Cut:
      self._status.say(f'step {step}: evaluation on {name!r} not finished')
      return programs.EvalProgramOutput(state)
    metrics = output.eval_metrics
    if metrics is None:
      self._status.say(f'step {step}: evaluated on {name!r} before, in this job_log_dir')
    loss = (metrics or {}).get('total_loss', (metrics or {}).get('loss'))
    if loss is not None:
      self._report.add_eval_loss(name, step, float(loss))
      self._status.say(f'step {step}: loss on {name!r} {float(loss):.4f}')
    if self._waits:
      train_p = self.inner._task.train  # pylint: disable=protected-access
      if step + train_p.save_interval_steps <= train_p.num_train_steps:
        self._status.say(f'waiting for a checkpoint after step {step} (Ctrl-C ends)')
    self._on_pause(time.monotonic() - start)
    return output

  def _run(self, state: Any, step: int) -> programs.EvalProgramOutput:
    task = getattr(self.inner, '_task', None)
    # The function that may stop early can't do without the results.
    if not hasattr(self.inner, 'eval_step') or getattr(task, 'early_stopping_fn', None):
      return self.inner.run(state, step)
    whole = self.inner.eval_step

    def eval_step(*args, **kwargs):
      if self._is_cut():
        raise _Cut
      return whole(*args, **kwargs)

    # Between two steps nothing is under way on the actors, and nothing has been written yet.
    with mock.patch.object(self.inner, 'eval_step', eval_step):
      return self.inner.run(state, step)


def with_progress(
    inner: Sequence[Any],
    report: Report | None = None,
    status: status_lib.Status | None = None,
    on_pause: Callable[[float], None] = lambda seconds: None,
    waits: bool = False,
    is_cut: Callable[[], bool] = lambda: False,
) -> list[EvalWithProgress]:
  """Eval programs, with progress or without, as `EvalWithProgress`; see there."""
  report, status = report or Report(), status or status_lib.status
  inner = [p.inner if isinstance(p, EvalWithProgress) else p for p in inner]
  return [
      EvalWithProgress(p, report, status, on_pause, waits and p is inner[-1], is_cut)
      for p in inner
  ]


def _duration(seconds: float) -> str:
  if seconds < 100:
    return f'{seconds:.0f} s'
  if seconds < 6000:
    return f'{seconds / 60:.0f} min'
  return f'{seconds / 3600:.1f} h'
