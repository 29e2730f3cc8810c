"""One run whose actors fail again and again, at chosen moments, against one that is left alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import dataclasses
import os
from pathlib import Path
import re
import signal
import sys

import numpy as np
import pytest

from integration import killed
from integration import live
from integration import stock

RESTARTS = 5
TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Survived:
  """A run that was killed many times.

  Attributes:
    folder: its job_log_dir.
    output: what it printed.
    status: its exit status.
    hits: where the actors were when it happened.
    newest: the newest checkpoint after each failure.
    left: what was left of it: processes, and files in shared memory.
  """

  folder: Path
  output: str
  status: int
  hits: list[str]
  newest: list[int]
  left: tuple[str, set[str]]


def _half_written(folder: Path) -> list[str]:
  names = os.listdir(folder / 'checkpoints') if (folder / 'checkpoints').exists() else []
  return [name for name in names if 'tmp' in name]


def _survive(folder: Path) -> Survived:
  shared_memory = set(os.listdir('/dev/shm'))
  command = [
      sys.executable, '-m', 'pax_mpmd.main', '--exp=integration.killed.TinyKilled',
      f'--job_log_dir={folder}', '--mpmd', f'--mpmd_max_restarts={RESTARTS}',
  ]
  hits, newest = [], []
  with live.Live(command, stock.environment(), stock.REPOSITORY) as run:

    def while_compiling() -> str:
      run.wait_for('compiling programs', TIMEOUT_S)
      os.kill(run.workers()[1], signal.SIGKILL)
      return 'compiling'

    def while_saving() -> str:
      # What a start before has left half-written is gone when the actors are there.
      assert live.repeat_until(lambda: len(run.workers()) == 4, TIMEOUT_S, 0.5), run.output
      assert live.repeat_until(lambda: _half_written(folder), TIMEOUT_S, 0.001), run.output
      os.kill(run.workers()[0], signal.SIGKILL)
      return 'saving'

    for number, fail in enumerate((
        while_compiling,
        # Late enough for a new checkpoint in the first three starts that train.
        lambda: killed.hit(run, folder, 2, lambda label: 'F' in label, 4),
        lambda: killed.hit(run, folder, 1, lambda label: 'B' in label, 1, signal.SIGSTOP),
        lambda: killed.hit(run, folder, 3, lambda label: 'epilogue' in label, 3),
        while_saving,
    ), 1):
      hits.append(fail())
      run.wait_for(f'restart {number} of {RESTARTS}', TIMEOUT_S)
      newest.append(stock.checkpoint_steps(folder)[-1])
    status = run.wait(TIMEOUT_S)
    run.gone(10)
    # What others on this machine make there they also remove.
    live.repeat_until(lambda: set(os.listdir('/dev/shm')) <= shared_memory, 5)
    left = run.describe_family(), set(os.listdir('/dev/shm')) - shared_memory
    return Survived(folder, run.output, status, hits, newest, left)


@pytest.fixture(scope='module')
def survived(
    submit: Callable[..., futures.Future],
    undisturbed: futures.Future[stock.Run],
    tmp_path_factory: pytest.TempPathFactory,
) -> Survived:
  """The run, when it is over."""
  del undisturbed  # under way beside it
  return submit(_survive, tmp_path_factory.mktemp('killed')).result()


def test_it_comes_to_its_end(survived: Survived):
  """After five failures the sixth start reaches the last step; nothing is left behind."""
  assert survived.status == 0, survived.output
  assert 'step 10/10' in survived.output
  assert survived.left == ('', set())
  assert not _half_written(survived.folder)


def test_one_error_for_each_failure(survived: Survived):
  """Each failure is told in one line that says which actor it was and where; no tracebacks."""
  errors = re.findall(r'ActorError: actor (\d)(.*)', survived.output)
  assert len(errors) == RESTARTS, survived.output
  assert len(re.findall(r'\w+Error\b', survived.output)) == RESTARTS
  assert 'Traceback' not in survived.output
  assert [int(actor) for actor, _ in errors] == [1, 2, 1, 3, 0]
  _, forward, backward, epilogue, _ = survived.hits
  assert re.fullmatch('2F.', forward) and re.fullmatch('1B.', backward) and 'epilogue' in epilogue
  for (_, text), label in zip(errors, survived.hits):
    says = 'has not answered' if label == backward else 'its process died'
    assert says in text, text
    if label not in ('compiling', 'saving'):
      assert f'instruction `run {label}:' in text, text


def test_it_goes_on_from_the_newest_checkpoint(survived: Survived):
  """Each start takes up the checkpoint that was promised, the newest there was."""
  promised = re.findall(r'restart \d of \d: from the checkpoint of step (\d+)', survived.output)
  restored = re.findall(r'restoring the checkpoint of step (\d+)', survived.output)
  assert list(map(int, promised)) == list(map(int, restored)) == survived.newest
  assert len(set(survived.newest)) > 2  # else nothing was trained in between


def test_same_as_undisturbed(survived: Survived, undisturbed: futures.Future[stock.Run]):
  """Losses and norms of all steps, and the final state, are bit for bit those without a failure.

  A batch read twice or left out, or a part of the state lost on the way, would show in all of them.
  """
  expected = undisturbed.result().job_log_dir
  theirs, ours = [stock.scalars(folder) for folder in (expected, survived.folder)]
  for tag in ('loss', 'learning/raw_grad_norm_scalar', 'Metrics/total_loss-weight'):
    assert sorted(theirs[tag]) == list(range(1, 11))
    assert ours[tag] == theirs[tag], tag
  theirs, ours = [stock.checkpoint_arrays(folder, 10) for folder in (expected, survived.folder)]
  assert ours.keys() == theirs.keys()
  for leaf in theirs:
    np.testing.assert_array_equal(ours[leaf], theirs[leaf], err_msg=leaf)
