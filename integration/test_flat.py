"""An experiment that isn't pipelined, cut into stages by flags alone, between runs of stock Pax."""

from __future__ import annotations

import numpy as np
import pytest

from integration import stock


@pytest.fixture(scope='module')
def runs(flat_runs) -> list[stock.Run]:
  """(six steps by stock Pax, three by MPMD and three by stock Pax)."""
  return [run.result() for run in flat_runs]


@pytest.mark.parametrize('step', [0, 3, 6])
def test_checkpoints(runs, step: int):
  """Before, at the hand-over and at the end the state is stock Pax's, in the same files."""
  theirs, ours = [stock.checkpoint_arrays(run.job_log_dir, step) for run in runs]
  assert ours.keys() == theirs.keys()
  for leaf, expected in theirs.items():
    assert ours[leaf].dtype == expected.dtype and ours[leaf].shape == expected.shape, leaf
    error = np.max(np.abs(ours[leaf].astype(np.float64) - expected), initial=0.0)
    assert error <= (1e-4 if step else 0.0) * np.max(np.abs(expected), initial=0.0), (leaf, error)


def test_scalars(runs):
  """Losses, weighted scalars, norms and learning rates of all steps are stock Pax's.

  Of the summaries only statistics of a layer's input differ: those that aren't sums over examples.
  """
  theirs, ours = [stock.scalars(run.job_log_dir) for run in runs]
  assert ours.keys() == theirs.keys()
  assert sorted(ours['loss']) == list(range(1, 7))
  for tag in theirs.keys() - {'Steps/sec'}:
    if 'xformer_input_' in tag:
      continue
    np.testing.assert_allclose(
        [ours[tag][step] for step in sorted(theirs[tag])],
        [theirs[tag][step] for step in sorted(theirs[tag])],
        rtol=2e-5,
        err_msg=tag,
    )
