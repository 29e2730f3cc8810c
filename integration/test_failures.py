"""Runs that are killed, interrupted or told to end: what they say, keep and leave behind.

Two runs train side by side, each in a folder of its own. Both are stopped, started again in their
folders, and stopped again, each time in another way. A third is told to end while it compiles.
"""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path
import re
import shutil
import signal
import sys
import time

import numpy as np
import pytest

from integration import live
from integration import stock

# Until the first step is done; a busy machine takes long to import, trace and compile.
START_LIMIT_S = 600
# From a failure to the error, and to the last process of the run being gone.
ERROR_LIMIT_S = 10
GONE_LIMIT_S = 10
# From a signal to the end of the run, a checkpoint included; other suites may run beside this.
STOP_LIMIT_S = 60


def _start(folder: Path) -> live.Live:
  command = [
      sys.executable, '-m', 'pax_mpmd.main', '--exp=integration.experiments.TinyEndless',
      f'--job_log_dir={folder}', '--mpmd',
  ]
  return live.Live(command, stock.environment(), stock.REPOSITORY)


def _wait_until_training(run: live.Live, folder: Path) -> None:
  """Waits until a run has trained and has saved a checkpoint of its own."""
  step = int(run.wait_for(r'\] step (\d+)/', START_LIMIT_S).group(1))
  assert live.repeat_until(lambda: max(stock.checkpoint_steps(folder), default=0) >= step, 240)


def _shared_memory() -> set[str]:
  return set(os.listdir('/dev/shm'))


class _Pair:
  """Starts two runs in two folders.

  Attributes:
    folders: {name: folder}.
    runs: {name: run}.
    begun_at: {name: the latest checkpoint there was before}.
  """

  def __init__(self, folders: dict[str, Path]):
    self.folders = folders
    self.shared_memory = _shared_memory()
    self.begun_at = {
        name: max(stock.checkpoint_steps(folder), default=0) for name, folder in folders.items()
    }
    self.runs = {name: _start(folder) for name, folder in folders.items()}

  def close(self) -> None:
    for run in self.runs.values():
      run.kill()

  def training(self, name: str) -> tuple[live.Live, Path]:
    _wait_until_training(self.runs[name], self.folders[name])
    return self.runs[name], self.folders[name]

  def check_nothing_left(self, run: live.Live) -> None:
    assert run.gone(GONE_LIMIT_S), run.failure(f'left behind:\n{run.describe_family()}')
    # What others on this machine make there they also remove.
    assert live.repeat_until(lambda: _shared_memory() <= self.shared_memory, 5), _shared_memory()


@pytest.fixture(scope='module')
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Pair]:
  """Two runs from the start."""
  pair = _Pair({name: tmp_path_factory.mktemp(name) for name in ('a', 'b')})
  yield pair
  pair.close()


@pytest.fixture(scope='module')
def second(first: _Pair) -> Iterator[_Pair]:
  """The same two started again in their folders, with at least one checkpoint in each."""
  for name in first.runs:
    if first.runs[name].family():  # only if their own tests were not run, or have failed
      first.training(name)
  first.close()
  pair = _Pair(first.folders)
  yield pair
  pair.close()


def _half_written(folder: Path) -> list[str]:
  return [name for name in os.listdir(folder / 'checkpoints') if 'tmp' in name]


def test_killed_driver_while_saving(first: _Pair, tmp_path: Path):
  """kill -9 of the driver during a save, at any moment of it, leaves the checkpoint before whole.

  What would be on disk is looked at several times, with all processes stopped for a moment; the
  last time the driver is really killed. That takes the actors and Ray with it.
  """
  run, folder = first.training('a')
  seen: set[str] = set()
  for number, seconds in enumerate((0.0, 0.005, 0.02, 0.05, 0.0)):
    def begins() -> bool:
      return not seen.issuperset(_half_written(folder))

    assert live.repeat_until(begins, START_LIMIT_S, 0.0005), run.failure('saves no more')
    time.sleep(seconds)
    with run.frozen():
      half_written = _half_written(folder)
      seen.update(half_written)
      shutil.copytree(folder / 'checkpoints', tmp_path / str(number) / 'checkpoints')
      if number == 4:
        assert half_written
        run.send(signal.SIGKILL)
  assert run.wait(5) == -signal.SIGKILL
  first.check_nothing_left(run)
  names = set()
  for number in range(5):
    step = stock.checkpoint_steps(tmp_path / str(number))[-1]
    arrays = stock.checkpoint_arrays(tmp_path / str(number), step)
    assert arrays['step'] == step > 0
    assert all(np.isfinite(array).all() for array in arrays.values())
    names |= arrays.keys()
    assert arrays.keys() == names
  assert len(_half_written(folder)) == 1


def test_sigterm(first: _Pair):
  """SIGTERM ends a run after the step in progress, with a checkpoint of that step."""
  run, folder = first.training('b')
  before = stock.checkpoint_steps(folder)[-1]
  run.send(signal.SIGTERM)
  assert run.wait(STOP_LIMIT_S) == 0
  assert 'Traceback' not in run.output
  step = int(re.findall(r'checkpoint of step (\d+): ', run.output)[-1])
  assert step >= before and stock.checkpoint_steps(folder)[-1] == step
  assert 'the same command goes on from the checkpoint' in run.output
  first.check_nothing_left(run)


def test_ctrl_c_after_going_on(second: _Pair):
  """A run whose driver was killed in a save goes on; Ctrl-C ends it with another checkpoint.

  What the save had left is gone.
  """
  run, folder = second.training('a')
  restored = int(re.search(r'restoring the checkpoint of step (\d+)', run.output).group(1))
  assert restored == second.begun_at['a'] > 0
  assert int(re.search(r'\] step (\d+)/', run.output).group(1)) == restored + 1
  # As a terminal does it: to all processes of the foreground.
  os.killpg(run.pid, signal.SIGINT)
  assert run.wait(STOP_LIMIT_S) == 0
  assert 'Traceback' not in run.output
  step = int(re.findall(r'checkpoint of step (\d+): ', run.output)[-1])
  assert step > restored and stock.checkpoint_steps(folder)[-1] == step
  assert not _half_written(folder)
  second.check_nothing_left(run)


def test_killed_worker(second: _Pair):
  """kill -9 of one actor's process ends the run with one error that names the actor."""
  run, folder = second.training('b')
  assert re.search(r'restoring the checkpoint of step [1-9]', run.output)
  workers = run.workers()
  assert sorted(workers) == [0, 1, 2, 3], run.output
  killed = time.monotonic()
  os.kill(workers[2], signal.SIGKILL)
  line = run.wait_for('ActorError: (.*)', 3 * ERROR_LIMIT_S).group(1)
  assert time.monotonic() - killed < ERROR_LIMIT_S
  # Where it was is known only if it was killed inside an instruction.
  pattern = r'actor 2(, stage 2)?(, step \d+)?(, instruction `.*`)?: its process died'
  assert re.match(pattern, line), line
  assert run.wait(ERROR_LIMIT_S) == 1
  assert 'Traceback' not in run.output and 'restart' not in run.output
  second.check_nothing_left(run)
  assert stock.checkpoint_steps(folder)


def test_told_to_end_while_compiling(tmp_path: Path):
  """Before the first step is done SIGTERM ends a run at once, with one line and nothing left."""
  before = _shared_memory()
  with _start(tmp_path) as run:
    run.wait_for('compiling programs', START_LIMIT_S)
    run.send(signal.SIGTERM)
    assert run.wait(STOP_LIMIT_S) == 128 + signal.SIGTERM
    assert re.search(r'\] SIGTERM: ending at once, nothing to save\n', run.output)
    assert 'Traceback' not in run.output and 'Error' not in run.output
    assert run.gone(GONE_LIMIT_S), run.failure(f'left behind:\n{run.describe_family()}')
  assert live.repeat_until(lambda: _shared_memory() <= before, 5), _shared_memory()
