"""The MPMD layer and gradient function under plain `jax.jit` against Pax's SPMD pipelining."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.pax import compare
from tests.pax import tiny

_EXPERIMENTS = {
    'plain': tiny.TinyLm,
    'circular': tiny.TinyCircular,
    'moe': tiny.TinyMoe,
    'repeated': tiny.TinyRepeated,
}


@pytest.fixture(scope='module', params=list(_EXPERIMENTS))
def runs(request):
  """(Pax's SPMD run, ours) of the same experiment."""
  experiment = _EXPERIMENTS[request.param]
  return tiny.Run(experiment, mpmd=False), tiny.Run(experiment, mpmd=True)


def _specs(tree):
  return jax.tree_util.tree_leaves(
      tree, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
  )


def _shapes(tree):
  return jax.tree_util.tree_map(lambda x: x.shape, tree)


def test_initial_state_is_bit_equal(runs):
  """The same seed gives the same variable tree, optimizer slots and values as Pax."""
  spmd, mpmd = runs
  compare.assert_close(mpmd.initial, spmd.initial, 0, 0)


def test_state_metadata_is_equal(runs):
  """Shapes and sharding annotations of the state are those of Pax."""
  spmd, mpmd = runs
  a = mpmd.partitioner.get_train_state_metadata()
  d = spmd.partitioner.get_train_state_metadata()
  assert _specs(a.partition_specs) == _specs(d.partition_specs)
  assert _shapes(a.unpadded_global_shapes) == _shapes(d.unpadded_global_shapes)


def test_train_steps_are_equal(runs):
  """Loss, weighted scalars, summaries and state of 4 steps agree with Pax; clipping is active."""
  spmd, mpmd = runs
  states = [spmd.initial, mpmd.initial]
  for i in range(4):
    inputs = tiny.batch(i)
    states[0], desired = spmd.step(states[0], inputs)
    states[1], actual = mpmd.step(states[1], inputs)
    step = f'step {i}: '
    np.testing.assert_allclose(actual.loss, desired.loss, rtol=2e-5, err_msg=step)
    compare.assert_close(actual.weighted_scalars, desired.weighted_scalars, 2e-5, 1e-7, step)
    compare.assert_close(actual.per_example_out, desired.per_example_out, 2e-5, 1e-6, step)
    assert sorted(actual.summary_tensors) == sorted(desired.summary_tensors)
    compare.assert_close(
        dict(actual.summary_tensors), dict(desired.summary_tensors), 1e-4, 1e-5, step
    )
    scales = [x for name, x in desired.summary_tensors.items() if 'grad_scale' in name]
    assert all(x < 0.99 for x in scales)
  compare.assert_close(states[1], states[0], 1e-4, 1e-5)


def test_eval_step_is_equal(runs):
  """The eval step gives Pax's loss, weighted scalars and per-example outputs, in input order."""
  spmd, mpmd = runs
  inputs = tiny.batch(17)
  _, desired = spmd.step(spmd.initial, inputs, is_eval=True)
  _, actual = mpmd.step(spmd.initial, inputs, is_eval=True)
  np.testing.assert_allclose(actual.loss, desired.loss, rtol=2e-5)
  compare.assert_close(actual.weighted_scalars, desired.weighted_scalars, 2e-5, 1e-7)
  compare.assert_close(actual.per_example_out, desired.per_example_out, 2e-5, 1e-6)
  assert sorted(actual.summary_tensors) == sorted(desired.summary_tensors)


def test_a_batch_without_weights_changes_nothing_to_nan(runs):
  """Where all weights are zero the loss is 0 and no gradient is NaN."""
  _, mpmd = runs
  inputs = tiny.batch(5)
  inputs.weights = np.zeros_like(inputs.weights)
  state, out = mpmd.step(mpmd.initial, inputs)
  assert np.isfinite(out.loss)
  assert all(np.all(np.isfinite(x)) for x in jax.tree_util.tree_leaves(state))
