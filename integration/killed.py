"""Actors that are killed at a chosen instruction, and the experiment for it."""

from __future__ import annotations

from collections.abc import Callable
import json
import mmap
import os
from pathlib import Path
import signal
from typing import Any

from absl import flags
import fiddle as fdl
from paxml import experiment_registry

from integration import experiments
from integration import live
from pax_mpmd.pax import MpmdPipelineMixin
from pax_mpmd.plan.instructions import Run
from pax_mpmd.runtime.ray_runtime import RayRuntime

__all__ = ['TellingRuntime', 'TinyKilled', 'hit']


class TellingRuntime(RayRuntime):
  """Writes down what each actor's instructions are, in the job_log_dir."""

  def load(self, plan: Any, *args, **kwargs) -> int:
    handle = super().load(plan, *args, **kwargs)
    labels = [
        [i.label if isinstance(i, Run) else '' for i in actor.instructions] for actor in plan.actors
    ]
    if '0F0' in labels[0]:
      told = {'handle': handle, 'labels': labels}
      (Path(flags.FLAGS.job_log_dir) / 'plan.json').write_text(json.dumps(told))
    return handle


@experiment_registry.register
class TinyKilled(MpmdPipelineMixin, experiments.TinyPipelined):
  """TinyPipelined with a checkpoint every 3 steps and little patience with stopped actors."""

  SCHEDULE = '1f1b'
  RUNTIME = fdl.Config(TellingRuntime, ping_timeout_s=3.0)
  CHECKPOINT_EVERY_N_STEPS = 3


def hit(
    run: live.Live,
    folder: Path,
    rank: int,
    wanted: Callable[[str], bool],
    step: int,
    number: int = signal.SIGKILL,
) -> str:
  """Sends a signal to an actor that is at a certain instruction, which it stays at.

  Args:
    run: a run of TinyKilled.
    folder: its job_log_dir.
    rank: which actor.
    wanted: whether the label of a program is the right one.
    step: the first step, counted from the start of the actors, to do it in.
    number: the signal: SIGKILL, or SIGSTOP.

  Returns:
    The label of the program that was running.

  Raises:
    AssertionError: the actor was never seen there.
  """
  told: dict[str, Any] = {}
  found: list[str] = []

  def ready() -> bool:
    if (folder / 'plan.json').exists():
      told.update(json.loads((folder / 'plan.json').read_text()))
    return bool(told) and len(run.workers()) == len(told['labels'])

  assert live.repeat_until(ready, 600, 0.5), run.failure('no actors')
  pid = run.workers()[rank]
  words = _progress(pid)
  labels = told['labels'][rank]
  indices = {i for i, label in enumerate(labels) if label and wanted(label)}
  assert indices, labels

  def there() -> bool:
    return words[0] == told['handle'] + 1 and words[1] >= step and words[2] in indices

  def look() -> bool:
    if not there():
      return live.state_of(pid) == 'Z'
    os.kill(pid, signal.SIGSTOP)
    live.repeat_until(lambda: live.state_of(pid) in 'TZ', 5, 0.0001)
    if not there():
      os.kill(pid, signal.SIGCONT)
      return False
    found.append(labels[words[2]])
    os.kill(pid, number)
    return True

  live.repeat_until(look, 600, 0.0002)
  assert found, run.failure(f'actor {rank} was not seen at one of {sorted(indices)}')
  return found[0]


def _progress(pid: int) -> memoryview:
  """What `pax_mpmd.runtime.interpreter.Progress` calls `words`, of an actor's process."""
  for path in Path(f'/proc/{pid}/fd').iterdir():
    if 'pax-mpmd-progress' in os.readlink(path):
      with path.open('rb') as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)).cast('q')
  raise AssertionError(f'process {pid} has no pax-mpmd-progress')

