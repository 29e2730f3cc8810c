"""What the processes of a run hold, seen from outside: the driver no state, an actor its share.

Two models are trained, saved and restored that differ in the width of one layer only, so that all
else (code, programs, activations) is equal: what their processes need more is due to the state.
"""

from __future__ import annotations

from concurrent import futures
from pathlib import Path
import re
import sys

import pytest

from integration import live
from integration import stock

# What two runs of the same program may differ by: malloc, timing.
NOISE = 24 << 20
# While an array is written, TensorStore copies, compresses and writes it.
COPIES_TO_WRITE = 6
LIMIT_S = 900


def _memory(pid: int) -> dict[str, int]:
  """Bytes of physical memory: the most so far (VmHWM), now anonymous (RssAnon), of files."""
  text = Path(f'/proc/{pid}/status').read_text()
  return {name: int(kb) << 10 for name, kb in re.findall(r'(VmHWM|Rss\w+):\s+(\d+) kB', text)}


class _Anonymous:
  """The most memory of their own that processes had: not that of code, which comes as it is used.

  Args:
    pids: of the processes.
  """

  def __init__(self, pids: list[int]):
    self._pids = pids
    self.peaks = [0] * len(pids)

  def until(self, run: live.Live, pattern: str) -> list[int]:
    """Watches them until the run prints this; the peaks so far."""

    def look() -> bool:
      for i, pid in enumerate(self._pids):
        now = _memory(pid)
        # The kernel keeps the peak of the sum only; what was between two looks may show in it.
        least = now['VmHWM'] - now['RssFile'] - now['RssShmem']
        self.peaks[i] = max(self.peaks[i], now['RssAnon'], least)
      return bool(re.search(pattern, run.output))

    assert live.repeat_until(look, LIMIT_S, 0.01), run.failure(f'no line with {pattern}')
    return list(self.peaks)


class _Peaks:
  """A run of an experiment, and the peaks of its processes at certain lines of its output.

  Attributes:
    made: per actor, when it had its part of the state.
    saved: per actor, when it had saved that, if it did.
    driver: at the end.
  """

  def __init__(self, experiment: str, folder: Path):
    command = [
        sys.executable, '-m', 'pax_mpmd.main', f'--exp=integration.experiments.{experiment}',
        f'--job_log_dir={folder}', '--mpmd',
    ]
    with live.Live(command, stock.environment(), stock.REPOSITORY) as run:
      run.wait_for(r'(initialising|restoring).*: 0 of ', LIMIT_S)
      workers = run.workers()
      actors = _Anonymous([workers[rank] for rank in range(4)])
      self.made = actors.until(run, r'(initialising|restoring).*: (\d+) of \2')
      self.saved = actors.until(run, 'tracing and compiling the train step')
      run.wait_for('stopping the actors', LIMIT_S)
      self.driver = _memory(run.pid)['VmHWM']
      assert run.wait(LIMIT_S) == 0, run.output
    self.restored = 'restoring the checkpoint: ' in run.output


def _both(name: str, folder: Path) -> list[_Peaks]:
  """The first run, which initialises the model, and the second, which restores it."""
  return [_Peaks(f'{name}To{steps}', folder) for steps in (1, 2)]


@pytest.fixture(scope='module')
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
  return {name: tmp_path_factory.mktemp(name) for name in ('Narrow', 'Wide')}


@pytest.fixture(scope='module')
def peaks(submit, folders) -> dict[str, list[_Peaks]]:
  """Of both models; they run side by side."""
  under_way: dict[str, futures.Future] = {
      name: submit(_both, name, folder) for name, folder in folders.items()
  }
  return {name: future.result() for name, future in under_way.items()}


@pytest.fixture(scope='module')
def growth(peaks, folders) -> int:
  """How many bytes the whole state of the wide model is larger."""
  del peaks  # the checkpoints are there then
  sizes = {
      name: [array.nbytes for array in stock.checkpoint_arrays(folder).values()]
      for name, folder in folders.items()
  }
  assert len(sizes['Wide']) == len(sizes['Narrow'])
  return sum(sizes['Wide']) - sum(sizes['Narrow'])


@pytest.mark.parametrize('run', [0, 1], ids=['initialised', 'restored'])
def test_the_driver_holds_no_state(peaks, growth, run: int):
  """A state that is twice as large changes the driver's peak by less than a tenth of that."""
  wide, narrow = peaks['Wide'][run], peaks['Narrow'][run]
  assert wide.restored == narrow.restored == bool(run)
  assert wide.driver - narrow.driver < growth / 10, (wide.driver, narrow.driver, growth)


@pytest.mark.parametrize('run', [0, 1], ids=['initialised', 'restored'])
def test_an_actor_holds_its_share_and_one_leaf(peaks, growth, folders, run: int):
  """More state makes each actor's peak grow by its share of it, and by the largest leaf at most."""
  leaf = max(
      wide.nbytes - narrow.nbytes
      for wide, narrow in zip(
          stock.checkpoint_arrays(folders['Wide']).values(),
          stock.checkpoint_arrays(folders['Narrow']).values(),
      )
  )
  allowed = growth / 4 + leaf + NOISE
  for wide, narrow in zip(peaks['Wide'][run].made, peaks['Narrow'][run].made):
    assert growth / 4 - NOISE < wide - narrow < allowed, (wide, narrow, growth, leaf)


def test_saving_copies_one_array_at_a_time(peaks, folders):
  """Arrays are written from where they are: saving needs some copies of one piece, no second state.

  Nearly all of the state is in arrays of four equal pieces, one for each actor.
  """
  arrays = stock.checkpoint_arrays(folders['Wide']).values()
  piece = max(array.nbytes for array in arrays) // 4
  wide = peaks['Wide'][0]
  for made, saved in zip(wide.made, wide.saved):
    assert saved - made < COPIES_TO_WRITE * piece + NOISE, (made, saved, piece)
