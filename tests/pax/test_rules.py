"""Results of a batch from those of its microbatches; the oracle is the same code on the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from pax_mpmd import errors
from pax_mpmd.pax import metrics
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import rules

Fn = Callable[[Any, Any], Any]

M, BATCH, LENGTH = 4, 8, 100
WEIGHTS = {
    'ragged': (100, 3, 0, 57),
    'none': (0, 0, 0, 0),
    'one': (1, 1, 1, 1),
    'fractions': (0.02, 0.3, 0, 0.1),
}


def _total(x: Any, w: Any) -> Any:
  return jnp.sum(x * w)


# Values of weighted scalars, and their weights, of token losses x with weights w.
SCALARS: dict[str, tuple[Fn, Fn]] = {
    'loss': (lambda x, w: _total(x, w) / (jnp.sum(w) + 1e-6), lambda x, w: jnp.sum(w)),
    'divided by zero': (lambda x, w: _total(x, w) / jnp.sum(w), lambda x, w: jnp.sum(w)),
    'at least one': (
        lambda x, w: _total(x, w) / jnp.maximum(jnp.sum(w[..., None]), 1),
        lambda x, w: jnp.sum(w),
    ),
    'where': (
        lambda x, w: jnp.where(jnp.sum(w) > 0, _total(x, w) / jnp.sum(w), 0.0),
        lambda x, w: jnp.sum(w),
    ),
    'jitted average': (
        jax.jit(lambda x, w: jnp.sum(x * w) / (jnp.sum(w) + 1e-6)), lambda x, w: jnp.sum(w)
    ),
    'several terms': (
        lambda x, w: _total(x, w) / (jnp.sum(w) + 1e-6)
        + 0.1 * _total(x**2, w) / (jnp.sum(w) + 1e-6),
        lambda x, w: jnp.sum(w),
    ),
    'error': (lambda x, w: 1.0 - _total(x, w) / jnp.sum(w), lambda x, w: jnp.sum(w)),
    'all tokens count': (
        lambda x, w: _total(x, w) / jnp.sum(jnp.ones_like(w)), lambda x, w: jnp.sum(w)
    ),
    'all tokens weigh': (
        lambda x, w: jnp.mean(x), lambda x, w: jnp.sum(jnp.ones_like(w)),
    ),
    'aux_loss': (lambda x, w: _total(x**2, w) / (jnp.sum(w) + 1e-6), lambda x, w: 1.0),
    'num_predictions': (lambda x, w: jnp.sum(w), lambda x, w: 1.0),
    'total': (_total, lambda x, w: 1.0),
    'mean': (lambda x, w: jnp.mean(x), lambda x, w: 1.0),
    'mean of sums': (lambda x, w: jnp.mean(jnp.sum(x, axis=-1)) / 2.0, lambda x, w: 1.0),
    'largest': (lambda x, w: jnp.max(x), lambda x, w: 1.0),
    'constant': (lambda x, w: jnp.asarray(3.0), lambda x, w: 1.0),
}
SUMMARIES: dict[str, Fn] = {
    'rows': lambda x, w: x,
    'weighted rows': lambda x, w: x * w / (jnp.sum(w) + 1e-6),
    'count': lambda x, w: jnp.sum(x > 0.5),
    'largest': lambda x, w: jnp.max(x),
    'smallest': lambda x, w: jnp.min(x),
    'columns': lambda x, w: jnp.mean(x, axis=0),
    'text': lambda x, w: jnp.arange(3, dtype=jnp.uint8),
}


def _results(x: Any, w: Any, scalars: dict[str, tuple[Fn, Fn]]) -> rules.Results:
  pairs = {
      name: (jnp.asarray(value(x, w)), jnp.asarray(weight(x, w)))
      for name, (value, weight) in scalars.items()
  }
  summaries = {name: fn(x, w) for name, fn in SUMMARIES.items()}
  per_example = [x, jnp.sum(x * w, axis=-1), pairs['loss'][0], jnp.sum(x)]
  return rules.Results(metrics.take_apart(pairs, {}), summaries, per_example)


def _combined(x: Any, w: Any, scalars: dict[str, tuple[Fn, Fn]], m: int = M) -> rules.Results:
  def split(args):
    return [microbatches.split_batch(a, m)[0] for a in args]

  found = rules.find_rules('loss', lambda *a: _results(*a, scalars), (x, w), split, m)
  taken = [
      found.take(_results(*part, scalars))
      for part in zip(*(microbatches.split_batch(a, m) for a in (x, w)))
  ]
  sums = jax.tree_util.tree_map(lambda *xs: sum(xs), *[sums for sums, _ in taken])
  rows = jax.tree_util.tree_map(lambda *xs: jnp.stack(xs), *[rows for _, rows in taken])
  return found.finish(sums, rows, jax.tree_util.tree_structure([0] * 4))


@pytest.mark.parametrize('weights', list(WEIGHTS))
def test_results_are_those_of_the_whole_batch(weights):
  """Scalars, summaries and outputs of examples are the batch's, however the weights are spread."""
  x = np.random.RandomState(0).rand(BATCH, LENGTH).astype(np.float32)
  number = np.tile(WEIGHTS[weights], BATCH // M)[:, None]
  w = np.minimum(np.maximum(number - np.arange(LENGTH), 0), 1).astype(np.float32)
  actual = jax.jit(lambda x, w: _flat(_combined(x, w, SCALARS)))(x, w)
  desired = jax.jit(lambda x, w: _flat(_results(x, w, SCALARS)))(x, w)
  if weights == 'none':
    # Where the whole batch gives 0 / 0 there is 0.
    desired = jax.tree_util.tree_map(np.nan_to_num, desired)
  for name, d in desired.items():
    a = actual[name]
    assert (a.shape, a.dtype) == (d.shape, d.dtype), name
    np.testing.assert_allclose(a, d, rtol=1e-5, atol=1e-6, err_msg=name)


def _flat(results: rules.Results) -> dict[str, Any]:
  flat = {f'output {i}': x for i, x in enumerate(results.per_example)}
  flat |= {f'summary {name}': x for name, x in results.summaries.items()}
  for name, (value, weight) in results.metrics.scalars.items():
    flat |= {name: value, f'weight of {name}': weight}
  return flat


@pytest.mark.parametrize('value, words', [
    (lambda x, w: _total(x, w) / jnp.sum(w**2), "'bad'.*divided by.*none of the returned weights"),
    (lambda x, w: _total(x, w) / jnp.sum(w) + jnp.mean(x), "'bad'.*a sum of terms with different"),
    (lambda x, w: _total(x, w / jnp.sum(w)), "'bad'.*depends on a number of the whole batch"),
    (lambda x, w: jnp.vdot(x, w / jnp.linalg.norm(w)), "'bad'.*a number of the whole batch"),
    (lambda x, w: jnp.mean((x - jnp.mean(x)) ** 2), "'bad'.*a number of the whole batch"),
    (lambda x, w: jnp.exp(_total(x, w) / jnp.sum(w)), "'bad'.*by exp .*no sum, mean or quotient"),
    (lambda x, w: jnp.sqrt(jnp.mean(x**2)), "'bad'.*by sqrt"),
    (lambda x, w: jnp.mean(jax.lax.top_k(x.sum(1), 4)[0]), "'bad'.*whole batch by top_k"),
    (lambda x, w: jnp.mean(jnp.sort(x, axis=0) * w), "'bad'.*what sort makes of the whole batch"),
    (lambda x, w: jnp.mean(jax.nn.logsumexp(x @ x.T, axis=-1)), "'bad'.*with each other"),
])
def test_what_can_not_be_combined_is_refused(value, words):
  """What doesn't follow from sums over microbatches is refused by name, with place and fix."""
  scalars = dict(SCALARS, bad=(value, lambda x, w: jnp.sum(w)))
  x = np.ones((BATCH, LENGTH), np.float32)
  with pytest.raises(errors.ConfigError, match=f'{words}.*NUM_MICROBATCHES=1'):
    _combined(x, x, scalars)
  _combined(x, x, scalars, m=1)
