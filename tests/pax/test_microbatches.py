"""Splitting batches, and microbatches without weights."""

from __future__ import annotations

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from pax_mpmd import errors
from pax_mpmd.pax import loss
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import rules


def test_microbatches_are_strided():
  """With 8 rows in 4 microbatches, microbatch 1 is rows 1 and 5, as in Pax's pipeline."""
  split = microbatches.split_batch({'x': jnp.arange(8)}, 4)
  np.testing.assert_array_equal(split['x'], [[0, 4], [1, 5], [2, 6], [3, 7]])


def test_streams_are_contiguous():
  """With 2 streams the first half of the batch is the first half of the microbatches."""
  split = microbatches.split_batch({'x': jnp.arange(8)}, 4, streams=2)
  np.testing.assert_array_equal(split['x'], [[0, 2], [1, 3], [4, 6], [5, 7]])


def test_streams_that_do_not_split_are_refused():
  """The message says why and which numbers of microbatches would do."""
  with pytest.raises(errors.ConfigError, match=r'STREAM_IO.* 4 .*NUM_STAGES=3.*\[3, 6, 12\]'):
    microbatches.Microbatching(4, streams=3).count(12)
  assert microbatches.Microbatching(6, streams=3).count(12) == 6


@pytest.mark.parametrize('num_microbatches, streams', [(1, 1), (2, 1), (3, 3), (6, 1), (6, 2)])
def test_merging_undoes_splitting(num_microbatches, streams):
  """Per-example outputs come back in input order; a number per microbatch as its mean."""
  x = np.arange(6 * 5).reshape(6, 5)
  split = microbatches.split_batch(x, num_microbatches, streams)
  merged = microbatches.merge_microbatches(split, streams)
  np.testing.assert_array_equal(merged, x)
  assert microbatches.merge_microbatches(jnp.array([1.0, 2.0])) == 1.5


def test_a_gradient_through_an_empty_microbatch_is_finite():
  """A model that divides by its weights has gradient 0, not NaN, where they are all zero."""

  def objective(scale, weights):
    weights = loss.without_empty_weights({'weights': weights})['weights']
    value, weight = jnp.sum(scale * weights) / jnp.sum(weights), jnp.sum(weights)
    return rules.weighted(value, weight)

  np.testing.assert_allclose(jax.grad(objective)(2.0, jnp.zeros(4)), 0.0, atol=1e-12)
  np.testing.assert_allclose(jax.grad(objective)(2.0, jnp.ones(4)), 4.0)
