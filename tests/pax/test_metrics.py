"""clu metrics over microbatches: those of Pax on the whole batch, or refused."""

from __future__ import annotations

from typing import Any

from clu import metrics as clu_metrics
import flax
import jax
from jax import numpy as jnp
import numpy as np
from paxml import base_metrics
from praxis.layers import models
import pytest

from pax_mpmd import errors
from pax_mpmd.pax import metrics
from pax_mpmd.pax import microbatches
from tests.pax import compare
from tests.pax import features
from tests.pax import tiny


class CluModel(models.LanguageModel):
  """Returns all that it reports as clu metrics, of each kind that clu has."""

  def compute_loss(self, predictions: Any, input_batch: Any) -> Any:
    scalars, per_example = super().compute_loss(predictions, input_batch)
    found = type(scalars)()
    for name, (value, weight) in scalars.items():
      found[name] = base_metrics.WeightedScalarCluMetric.create(value, weight)
    losses, weights = predictions.per_token_xent, input_batch.weights
    found.average = clu_metrics.Average.from_model_output(values=losses, mask=weights)
    found.unmasked = clu_metrics.Average.from_model_output(values=losses)
    found.std = clu_metrics.Std.from_model_output(values=losses, mask=weights)
    found.last = clu_metrics.LastValue.from_model_output(jnp.mean(losses, axis=-1))
    pairs = clu_metrics.CollectingMetric.from_outputs(('loss', 'labels'))
    # Two columns: Pax's pipeline fails on CPUs where such a result has the shape of a variable.
    found.collected = pairs.from_model_output(
        loss=jnp.stack([predictions.per_sequence_xent] * 2, axis=-1), labels=input_batch.labels
    )
    return found, per_example


class Clu(features.Small):
  """A small model that returns clu metrics."""

  MODEL_CLASS = CluModel


@pytest.mark.parametrize('is_eval', [False, True], ids=['train', 'eval'])
def test_equal_to_pax(is_eval: bool, runs):
  """Each metric has the fields, and gives the values, that it has on the whole batch in Pax."""
  outputs = []
  for run in runs:
    state, output = run.step(run.initial, tiny.batch(0), is_eval)
    outputs.append((None if is_eval else state.mdl_vars, output))
  (theirs, desired), (ours, actual) = outputs
  compare.assert_close(actual.loss, desired.loss, 2e-5, 0)
  compare.assert_close(ours, theirs, 1e-4, 1e-5)
  assert not actual.weighted_scalars and not desired.weighted_scalars
  assert actual.clu_metrics.keys() == desired.clu_metrics.keys() > {'std', 'total_loss'}
  for name, metric in desired.clu_metrics.items():
    assert type(actual.clu_metrics[name]).__name__ == type(metric).__name__
    compare.assert_close(
        jax.tree_util.tree_leaves(actual.clu_metrics[name]),
        jax.tree_util.tree_leaves(metric),
        2e-5, 1e-6, name,
    )
    compare.assert_close(actual.clu_metrics[name].compute(), metric.compute(), 1e-4, 1e-5, name)


@pytest.fixture(scope='module')
def runs() -> list[tiny.Run]:
  """Pax's own run and the one through MPMD, from the same state."""
  theirs = tiny.Run(Clu, mpmd=False)
  return [theirs, tiny.Run(Clu, mpmd=True, initial=theirs.initial)]


@flax.struct.dataclass
class PerExample(clu_metrics.Metric):
  """Holds a row for each example, and adds them up when merged."""

  rows: Any

  def merge(self, other: Any) -> PerExample:
    return PerExample(self.rows + other.rows)


_ONE = clu_metrics.CollectingMetric.from_outputs(('x',))
REFUSED = {
    'an average of averages': (
        lambda x: clu_metrics.Average.from_model_output(values=jnp.mean(x)),
        r"'metric' \(Average\).* its count is 1 for a whole batch, but .* 4 microbatches it is 4",
    ),
    'a last mean': (
        lambda x: clu_metrics.LastValue(value=jnp.mean(x)),
        r"'metric' \(LastValue\).* its count is 1",
    ),
    'a collected mean': (
        lambda x: _ONE.from_model_output(x=jnp.mean(x)),
        r'its values.*shape \(1,\).*CollectingMetric',
    ),
    'rows of examples': (PerExample, r'rows is of shape \(8,\) .* \(2,\) for a microbatch'),
}


def _check(make_metric: Any) -> None:
  split = microbatches.Microbatching(num_microbatches=4)
  metrics.check_mergeable(
      lambda x: metrics.take_apart({}, {'metric': make_metric(x)}),
      (jnp.arange(8.0),),
      lambda args: (split.first(args[0]),),
      4,
  )


@pytest.mark.parametrize('name', REFUSED)
def test_refused(name: str):
  """What would come out otherwise is refused; the message names metric, field and numbers."""
  make_metric, words = REFUSED[name]
  with pytest.raises(errors.ConfigError, match=words):
    _check(make_metric)


def test_a_mean_with_its_weight_is_allowed():
  """The same mean is fine with the number of its values as the weight, or over the values."""
  _check(lambda x: clu_metrics.Average.from_model_output(values=x))
  _check(lambda x: base_metrics.WeightedScalarCluMetric.create(jnp.mean(x), x.size))


def test_collected_rows_are_in_the_order_of_the_batch():
  """Microbatches are strided, and what they collect is put back; with streams too."""
  for streams in (1, 2):
    rows = microbatches.split_batch(np.arange(8.0), 4, streams)
    stacked = {'metric': _ONE(values={'x': (rows,)})}
    merged = metrics.merge(stacked, streams)['metric'].compute()
    np.testing.assert_array_equal(merged['x'], np.arange(8.0))
