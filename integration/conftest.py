"""What the end-to-end tests share: runs side by side, and the stock run they compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
import os
from pathlib import Path

import pytest

from integration import stock

# Before a test reads summaries: TensorFlow says much where there is no CUDA.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

# For the fixtures; a run has its own limit. Generous, since a busy machine takes three times as
# long as a free one.
TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Tests wait for whole command lines: more time for each than unit tests get."""
  for item in items:
    item.add_marker(pytest.mark.timeout(2 * TIMEOUT_S), append=False)


@pytest.fixture(scope='session')
def submit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., futures.Future]]:
  """A function that has a callable run in the background; two run at a time."""
  del tmp_path_factory  # outlives the pool
  pool = futures.ThreadPoolExecutor(2)
  yield pool.submit
  pool.shutdown(cancel_futures=True)


@pytest.fixture(scope='session')
def stock_run(
    submit: Callable[..., futures.Future], tmp_path_factory: pytest.TempPathFactory
) -> futures.Future[stock.Run]:
  """10 steps of TinyPipelined by stock Pax, begun at the first use."""
  folder: Path = tmp_path_factory.mktemp('stock')
  experiment = 'integration.experiments.TinyPipelined'
  return submit(stock.run_pax, experiment, folder, timeout=TIMEOUT_S)


@pytest.fixture(scope='session')
def undisturbed(
    submit: Callable[..., futures.Future], tmp_path_factory: pytest.TempPathFactory
) -> futures.Future[stock.Run]:
  """The same by MPMD: 1F1B on Ray's actors."""
  folder: Path = tmp_path_factory.mktemp('undisturbed')
  args = ('--mpmd', '--mpmd_runtime=ray', '--mpmd_schedule=1f1b')
  experiment = 'integration.experiments.TinyPipelined'
  return submit(
      stock.run_pax, experiment, folder, *args, module='pax_mpmd.main', timeout=TIMEOUT_S
  )


def _flat_relay(folder: Path) -> stock.Run:
  """Three steps by MPMD, and three more by stock Pax from its checkpoint."""
  flags = ('--mpmd', '--mpmd_num_stages=4', '--mpmd_num_microbatches=8')
  experiment = 'integration.experiments.TinyFlat'
  stock.run_pax(
      f'{experiment}To3', folder, *flags, module='pax_mpmd.main', timeout=TIMEOUT_S
  )
  return stock.run_pax(experiment, folder, devices=1, timeout=TIMEOUT_S)


@pytest.fixture(scope='session')
def flat_runs(
    submit: Callable[..., futures.Future], tmp_path_factory: pytest.TempPathFactory
) -> tuple[futures.Future[stock.Run], futures.Future[stock.Run]]:
  """TinyFlat, which isn't pipelined: six steps by stock Pax; three by MPMD, then three by Pax."""
  experiment = 'integration.experiments.TinyFlat'
  folders: list[Path] = [tmp_path_factory.mktemp(name) for name in ('flat', 'relay')]
  return (
      submit(stock.run_pax, experiment, folders[0], devices=1, timeout=TIMEOUT_S),
      submit(_flat_relay, folders[1]),
  )
