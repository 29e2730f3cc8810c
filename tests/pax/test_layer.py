"""What the MPMD pipeline layer does beyond being equal to Pax's."""

from __future__ import annotations

from typing import Any

import jax
from jax import ad_checkpoint
from jax import numpy as jnp
import numpy as np
from paxml import trainer_lib
from praxis import base_layer
from praxis import pax_fiddle
from praxis.layers import checkpoint_policy
from praxis.layers import pipeline
import pytest

from pax_mpmd.pax import layer
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


Policy = checkpoint_policy.AutodiffCheckpointType
# What Praxis' layers name for the policies, and in the pipeline of Pax itself.
_NAMES = (
    'combined_qkv_proj', 'query_proj', 'key_proj', 'value_proj', 'context', 'out_proj', 'ffn1',
    'ffn2', 'transformer_layer_out', 'conv_0', 'conv_1', 'conv_out', 'qlhs', 'qrhs', 'lhs_scale',
    'rhs_scale',
)


class Named(base_layer.BaseLayer):
  """Values of every name that a checkpoint policy knows, and both kinds of matrix products."""

  def setup(self) -> None:
    self.create_variable('w', base_layer.WeightHParams(shape=[4, 4]))

  def __call__(self, x: Any) -> Any:
    for name in _NAMES:
      x = ad_checkpoint.checkpoint_name(jnp.sin(x) + x, name)
    x = jnp.tanh(x @ self.theta.w)
    return jnp.cos(jnp.einsum('bij,bjk->bik', x, x))


def _gradient(cls, policy):
  """(x, variables) -> gradients by both, of a pipeline of 2 stages and one microbatch."""
  config = pax_fiddle.Config(
      cls, name='pipe', num_stages=2, num_microbatches=1, checkpoint_policy=policy,
      single_stage_body=pax_fiddle.Config(Named),
  )
  pipe = base_layer.instantiate(config)

  def loss(x, variables):
    with base_layer.JaxContext.new_context():
      return jnp.sum(pipe.apply(variables, x))

  x = jnp.linspace(-1.0, 1.0, 32).reshape(2, 4, 4)
  w = jnp.cos(jnp.arange(32.0)).reshape(2, 4, 4)
  variables = {'params': {'body': {'w': w}}}
  return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, variables), (x, w)


def _evaluate(closed, args):
  return jax.jit(jax.core.jaxpr_as_fun(closed))(*args)


@pytest.fixture(scope='module')
def gradients():
  """Gradients by Pax's pipeline; a policy changes when they are computed, not what they are."""
  return _evaluate(*_gradient(pipeline.LayerwiseShardablePipelined, Policy.SAVE_NOTHING))


@pytest.mark.parametrize('policy', list(Policy))
def test_checkpoint_policies(policy, gradients):
  """With each policy the same is computed again as in Pax's pipeline, and gradients are equal."""
  theirs, _ = _gradient(pipeline.LayerwiseShardablePipelined, policy)
  ours, args = _gradient(layer.MpmdPipelined, policy)
  for name in ('sin', 'tanh', 'dot_general'):
    # Pax's stages are one vectorized computation, in one scan forward and one backward.
    counts = [sum(1 for _ in _marks(x.jaxpr, name)) for x in (ours, theirs)]
    if policy == Policy.SAVE_DOT_WITH_NO_BATCH_DIM:
      # For Pax every product has one, the stages, so that it saves nothing.
      assert 0 < counts[0] <= 2 * counts[1], (name, counts)
    else:
      assert counts[0] == 2 * counts[1] > 0, (name, counts)
  for actual, desired in zip(_evaluate(ours, args), gradients):
    np.testing.assert_allclose(actual, desired, rtol=1e-5, atol=1e-6)
