"""What the MPMD pipeline layer does beyond being equal to Pax's."""

from __future__ import annotations

import jax
import numpy as np
from paxml import trainer_lib
import pytest

from tests.pax import tiny


def _marks(jaxpr, name):
  """Equations of a primitive in a jaxpr and those within it."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == name:
      yield eqn
    for param in eqn.params.values():
      inner = getattr(param, 'jaxpr', param)
      if hasattr(inner, 'eqns'):
        yield from _marks(inner, name)


@pytest.fixture(scope='module')
def dropout():
  """An MPMD run of the model with dropout."""
  return tiny.Run(tiny.TinyDropout, mpmd=True)


def test_yields_and_slices(dropout):
  """One loop, a yield forward and one backward between the stages, weights only sliced by stage."""
  fn = dropout.partitioner.traceable_step(trainer_lib.train_step_single_learner, is_eval=False)
  jaxpr = jax.make_jaxpr(fn)(dropout.initial, jax.random.PRNGKey(0), tiny.batch(0)).jaxpr
  (loop,) = _marks(jaxpr, 'accumulate_grads')
  body = loop.params['jaxpr'].jaxpr
  directions = [e.params['direction'] for e in _marks(body, 'pipeline_yield')]
  assert directions == ['forward', 'backward']
  stages = tiny.TinyDropout.NUM_STAGES
  weights = {v for v in body.invars if v.aval.shape[:1] == (stages,) and v.aval.ndim > 1}
  users = {e.primitive.name for e in body.eqns if weights.intersection(map(_hashable, e.invars))}
  assert users == {'slice'}


def test_dropout_masks_differ_and_repeat(dropout):
  """Stages, microbatches and steps draw different masks; the same key draws the same ones."""
  state, inputs = dropout.initial, tiny.batch(0)
  # The same rows in both microbatches: what differs between their outputs is the masks.
  twice = jax.tree_util.tree_map(lambda x: np.repeat(x[:8], 2, axis=0), inputs)
  _, out = dropout.step(state, twice)
  scores = out.per_example_out['scores'].reshape(8, 2)
  live = twice.weights[::2].sum(axis=1) > 0
  assert np.all(np.abs(scores[live, 0] - scores[live, 1]) > 1e-6)
  _, again = dropout.step(state, twice)
  assert out.loss == again.loss
  _, later = dropout.step(state.replace(step=state.step + 1), twice)
  assert out.loss != later.loss


def test_repeated_layers_keep_their_summaries():
  """Summaries of repeated layers, at which Pax's pipeline fails, come out per stage and layer."""
  experiment = type('Repeated', (tiny.TinyRepeated,), {'SUMMARIES': True})
  run = tiny.Run(experiment, mpmd=True)
  _, out = run.step(run.initial, tiny.batch(0))
  names = [n for n in out.summary_tensors if 'xformer_input_mean' in n]
  for stage in range(experiment.NUM_STAGES):
    assert sum(f'.stage{stage}' in n for n in names) == 2
  assert all(np.isfinite(out.summary_tensors[n]) for n in names)


def _hashable(x):
  return x if isinstance(x, jax.core.Var) else None
