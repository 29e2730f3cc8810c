"""Runs that take over from one another: stock Pax, MPMD and back, in one job_log_dir."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from integration import stock

STEPS = list(range(1, 11))
MPMD = ('pax_mpmd.main', '--mpmd')
STOCK = ('paxml.main',)


@dataclasses.dataclass(frozen=True)
class Leg:
  """One run of a relay, and what it has left behind when the next one begins.

  Attributes:
    run: the run.
    checkpoint_steps: the steps of the checkpoints then.
    arrays: those of the latest.
  """

  run: stock.Run
  checkpoint_steps: list[int]
  arrays: dict[str, np.ndarray]


def _relay(folder: Path, legs: Sequence[tuple[str, Sequence[str]]]) -> list[Leg]:
  done = []
  for experiment, (module, *args) in legs:
    experiment = f'integration.experiments.{experiment}'
    run = stock.run_pax(experiment, folder, *args, module=module, timeout=600)
    done.append(Leg(run, stock.checkpoint_steps(folder), stock.checkpoint_arrays(folder)))
  return done


@pytest.fixture(scope='module')
def relays(
    submit: Callable[..., futures.Future],
    stock_run: futures.Future[stock.Run],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, futures.Future[list[Leg]]]:
  """Both relays, under way side by side."""
  del stock_run  # first in the queue
  legs = {
      'stock, mpmd, stock': [
          ('TinyTo4', STOCK), ('TinyTo7', MPMD), ('TinyPipelined', STOCK), ('TinyPipelined', MPMD)
      ],
      'mpmd, mpmd': [('TinyTo4', MPMD), ('TinyPipelined', (*MPMD, '--mpmd_schedule=gpipe'))],
  }
  return {
      name: submit(_relay, tmp_path_factory.mktemp('relay'), relay) for name, relay in legs.items()
  }


@pytest.fixture(params=['stock, mpmd, stock', 'mpmd, mpmd'])
def relay(request: pytest.FixtureRequest, relays) -> list[Leg]:
  """Each of the relays, when it is over."""
  return relays[request.param].result()


def test_same_training_as_without_a_break(relay: list[Leg], stock_run):
  """Losses and norms of all steps, and the final state, are those of one stock run.

  A wrong step, a wrong place in the data or a moment lost on the way would show in all of them.
  """
  expected = stock.scalars(stock_run.result().job_log_dir)
  scalars = stock.scalars(relay[0].run.job_log_dir)
  for tag in ('loss', 'lr_scalar', 'learning/raw_grad_norm_scalar', 'Metrics/log_pplx-weight'):
    assert sorted(scalars[tag]) == STEPS, tag
    np.testing.assert_allclose(
        [scalars[tag][step] for step in STEPS],
        [expected[tag][step] for step in STEPS],
        rtol=2e-5,
        err_msg=tag,
    )
  arrays = stock.checkpoint_arrays(stock_run.result().job_log_dir)
  assert relay[-1].arrays.keys() == arrays.keys()
  for leaf, array in arrays.items():
    error = np.max(np.abs(relay[-1].arrays[leaf].astype(np.float64) - array), initial=0.0)
    assert error <= 1e-4 * np.max(np.abs(array), initial=0.0), (leaf, error)


def test_each_leg_begins_where_the_last_one_ended(relay: list[Leg]):
  """A run restores the last checkpoint there is, and says so."""
  for before, leg in itertools.pairwise(relay):
    if '[   0s] importing Pax' in leg.run.output:  # stock Pax says it in other words
      step = before.checkpoint_steps[-1]
      assert f'restoring the checkpoint of step {step}\n' in leg.run.output


def test_checkpoints_of_each_leg(relays):
  """Each run leaves a checkpoint of its last step."""
  legs = relays['stock, mpmd, stock'].result()
  assert [leg.checkpoint_steps[-1] for leg in legs] == [4, 7, 10, 10]
  legs = relays['mpmd, mpmd'].result()
  assert [leg.checkpoint_steps[-1] for leg in legs] == [4, 10]


def test_finished_already(relays):
  """A run that finds its work done says so, starts no actors and leaves all as it is."""
  before, after = relays['stock, mpmd, stock'].result()[-2:]
  assert 'nothing left to train' in after.run.output
  assert 'Starting' not in after.run.output
  assert 'Traceback' not in after.run.output
  assert after.run.seconds_after_last_words < stock.PROMPTLY_S
  for leaf, array in before.arrays.items():
    np.testing.assert_array_equal(after.arrays[leaf], array)
