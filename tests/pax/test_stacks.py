"""Experiments that Pax doesn't pipeline, in stages and microbatches, against stock Pax."""

from __future__ import annotations

from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
from paxml import base_experiment
from paxml import tasks_lib
from paxml.tasks.lm import model_params
from paxml.tasks.lm.params import lm_cloud
from praxis import base_hyperparams
from praxis import base_layer
from praxis import base_model
from praxis import layers
from praxis import pax_fiddle
from praxis.layers import normalizations
import pytest

import pax_mpmd
from pax_mpmd import errors
from pax_mpmd.pax import experiments
from pax_mpmd.pax import mixin
from pax_mpmd.pax import partitioner as partitioner_lib
from pax_mpmd.pax import stacks
from pax_mpmd.pax import transform
from tests.pax import compare
from tests.pax import tiny

# Statistics of activations that aren't sums over examples: the mean over the microbatches.
_STATISTICS = ('xformer_input_mean', 'xformer_input_std', 'xformer_input_abs_max')


class Repeated(lm_cloud.LmCloudSpmd):
  """5 repeated layers on 3 stages, Adam, active clipping, tied embedding, float32."""

  NUM_LAYERS = 5
  MODEL_DIMS = 16
  HIDDEN_DIMS = 32
  NUM_HEADS = 2
  DIMS_PER_HEAD = 8
  VOCAB_SIZE = tiny.VOCAB
  FPROP_DTYPE = jnp.float32
  ICI_MESH_SHAPE = [1, 1, 1]
  MAX_SEQ_LEN = tiny.LENGTH
  NUM_STAGES = 3
  NUM_MICROBATCHES = 4

  def task(self):
    task_p = super().task()
    task_p.train.learner.optimizer.clip_gradient_norm_to_value = 0.5
    task_p.train.learner.optimizer.learning_rate = 0.01
    return task_p


class Listed(Repeated):
  """4 layers of their own on 3 stages."""

  USE_REPEATED_LAYER = False
  NUM_LAYERS = 4


class OwnModel(base_model.BaseModel):
  """Three linear layers in three stages; the loss is a weighted mean over tokens."""

  yields: bool = True

  def setup(self):
    self.create_children(
        'body',
        [
            pax_fiddle.Config(layers.FeedForward, input_dims=8, output_dims=8, name=f'ff{i}')
            for i in range(3)
        ],
    )

  def compute_predictions(self, input_batch):
    x = jnp.sin(input_batch.ids[..., None] * (1.0 + jnp.arange(8)))
    for i, ff in enumerate(self.body):
      x = ff(x)
      if self.yields and i < 2:
        x = pax_mpmd.pipeline_yield(x)
    return x

  def compute_loss(self, predictions, input_batch):
    weight = jnp.sum(input_batch.weights)
    error = jnp.mean((predictions - input_batch.labels[..., None] / 64) ** 2, axis=-1)
    loss = jnp.sum(error * input_batch.weights) / weight
    self.add_summary('error', jnp.mean(error))
    per_example = dict(error=jnp.mean(error, axis=-1))
    return dict(loss=(loss, weight)), per_example


class Own(base_experiment.BaseExperiment):
  """An experiment that has nothing from Pax's language models."""

  ICI_MESH_SHAPE = [1, 1, 1]
  NUM_STAGES = 3
  NUM_MICROBATCHES = 4
  YIELDS = True

  def task(self):
    task_p = pax_fiddle.Config(tasks_lib.SingleTask, name='own')
    task_p.model = pax_fiddle.Config(OwnModel, name='model', yields=self.YIELDS)
    task_p.model.ici_mesh_shape = self.ICI_MESH_SHAPE
    task_p.model.mesh_axis_names = ['replica', 'data', 'mdl']
    model_params.set_default_adam(task_p, 0.01, 0.0)
    task_p.train.learner.loss_name = 'loss'
    return task_p

  def datasets(self):
    return []


_EXPERIMENTS = {'repeated': Repeated, 'listed': Listed, 'own': Own}


@pytest.fixture(scope='module', params=list(_EXPERIMENTS))
def runs(request):
  """(stock, ours) of the same experiment."""
  experiment = _EXPERIMENTS[request.param]
  return tiny.Run(experiment, mpmd=False), tiny.Run(experiment, mpmd=True)


def test_initial_state_is_bit_equal(runs):
  """The same seed gives stock Pax's own variable tree, optimizer slots and values."""
  stock, mpmd = runs
  compare.assert_close(mpmd.initial, stock.initial, 0, 0)


def test_train_steps_are_equal(runs):
  """Loss, scalars, norms, summaries, per-example outputs and state of 3 steps agree with Pax."""
  stock, mpmd = runs
  states = [stock.initial, mpmd.initial]
  for i in range(3):
    inputs = tiny.batch(i)
    states[0], desired = stock.step(states[0], inputs)
    states[1], actual = mpmd.step(states[1], inputs)
    step = f'step {i}: '
    np.testing.assert_allclose(actual.loss, desired.loss, rtol=2e-5, err_msg=step)
    compare.assert_close(actual.weighted_scalars, desired.weighted_scalars, 2e-5, 1e-7, step)
    compare.assert_close(actual.per_example_out, desired.per_example_out, 2e-5, 1e-6, step)
    summaries = [dict(out.summary_tensors) for out in (actual, desired)]
    assert sorted(summaries[0]) == sorted(summaries[1])
    assert [np.shape(summaries[0][k]) for k in summaries[1]] == [
        np.shape(x) for x in summaries[1].values()
    ]
    for tree in summaries:
      for name in [k for k in tree if any(s in k for s in _STATISTICS)]:
        del tree[name]
    assert any('grad_norm' in name for name in summaries[0])
    compare.assert_close(*summaries, 1e-4, 1e-5, step)
  compare.assert_close(states[1], states[0], 1e-4, 1e-5)


@pytest.mark.parametrize('num_layers, num_stages', [(10, 4), (6, 4), (8, 4), (3, 3), (5, 1)])
def test_chunks_are_as_equal_as_can_be(num_layers, num_stages):
  """Every layer is in one stage, in order, and no stage has two more layers than another."""
  bounds = stacks.chunk_bounds(num_layers, num_stages)
  assert [i for a, b in bounds for i in range(a, b)] == list(range(num_layers))
  sizes = [b - a for a, b in bounds]
  assert len(sizes) == num_stages
  assert max(sizes) - min(sizes) <= 1


def _moe(task_p):
  stack = task_p.model.lm_tpl.stacked_transformer_tpl
  stack.num_experts, stack.moe_layers = 2, [1]


def _batch_norm(task_p):
  task_p.model.lm_tpl.final_ln_tpl = pax_fiddle.Config(normalizations.BatchNorm)


def _intermediates(task_p):
  task_p.model.lm_tpl.stacked_transformer_tpl.collect_intermediate_outputs = True


_REFUSED = [
    (Repeated, dict(NUM_STAGES=6), None, ['NUM_STAGES=6', '--mpmd_num_stages', '1 to 5']),
    (Listed, dict(NUM_STAGES=7), None, ['NUM_STAGES=7', 'num_layers', '1 to 4']),
    (Listed, dict(NUM_STAGES=0), None, ['NUM_STAGES', 'got 0']),
    (Listed, dict(NUM_STAGES=None), None, ['a StackedTransformer', '--mpmd_num_stages']),
    (Listed, dict(NUM_MICROBATCHES=None), None, ['--mpmd_num_microbatches']),
    (Listed, dict(MICROBATCH_SIZE=2), None, ['NUM_MICROBATCHES=4', 'MICROBATCH_SIZE=2']),
    (Repeated, dict(ICI_MESH_SHAPE=None), None, ['ICI_MESH_SHAPE', '[1, 1, 1]']),
    (Listed, {}, _moe, ['tr', 'num_experts', 'NUM_MICROBATCHES=1']),
    (Listed, {}, _batch_norm, ['lm_tpl.final_ln_tpl', 'BatchNorm', 'NUM_MICROBATCHES=1']),
    (Repeated, {}, _intermediates, ['collect_intermediate_outputs=True', 'False']),
]


@pytest.mark.parametrize('base, fields, change, words', _REFUSED)
def test_refused(base, fields, change, words):
  """What can't be cut, or would compute something else, is refused with field, value and fix."""

  class Broken(base):

    def task(self):
      task_p = super().task()
      if change is not None:
        change(task_p)
      return task_p

  experiment = type('BrokenMpmd', (mixin.MpmdPipelineMixin, Broken), fields)
  with pytest.raises(errors.ConfigError) as info:
    experiment().task()
  for word in words:
    assert word in str(info.value)


def test_experts_run_in_one_microbatch():
  """With one microbatch a batch is routed as a whole, so nothing is refused."""

  class Moe(mixin.MpmdPipelineMixin, Listed):
    NUM_MICROBATCHES = 1

    def task(self):
      task_p = super().task()
      _moe(task_p)
      return task_p

  assert Moe().mpmd_pipeline().microbatching.num_microbatches == 1


@pytest.mark.parametrize('fields, words', [
    (dict(YIELDS=False), ['NUM_STAGES=3', 'OwnModel', '0 times', 'in place of 2']),
    (dict(NUM_STAGES=5), ['NUM_STAGES=5', '2 times', 'Set NUM_STAGES=3']),
])
def test_own_yields_that_do_not_fit_are_refused(fields, words):
  """A model without a known stack must mark its stages; checked before anything is initialised."""
  experiment = type('Unfit', (Own,), fields)
  task_p, pipeline = transform.mpmd_task(
      experiment().task(), **transform.stages_of(experiment)
  )
  task = base_hyperparams.instantiate(task_p)
  partitioner = partitioner_lib.MpmdPartitioner(task, pipeline, tiny.PlainBackend())
  with pytest.raises(errors.ConfigError) as info:
    partitioner.setup(task, jax.random.PRNGKey(0), train_inputs_shape_dtype=tiny.specs())
  for word in words:
    assert word in str(info.value)


def test_flags_say_how_to_cut():
  """The flags give the numbers that an experiment lacks, and contradict none that it has."""
  plain = type('Plain', (Listed,), dict(NUM_STAGES=None, NUM_MICROBATCHES=None))
  pipeline = experiments.mpmd_experiment(plain, num_stages=3, num_microbatches=4)().mpmd_pipeline()
  assert (pipeline.num_stages, pipeline.microbatching.num_microbatches) == (3, 4)
  assert not pipeline.own_yields
  with pytest.raises(errors.ConfigError, match=r'--mpmd_num_stages=3.*TinyLm has NUM_STAGES=4'):
    experiments.mpmd_experiment(tiny.TinyLm, num_stages=3)

  class PipelinedElsewhere(Own):
    NUM_STAGES = None

    def task(self):
      return tiny.TinyLm().task()

  experiment = experiments.mpmd_experiment(PipelinedElsewhere, num_stages=3)
  with pytest.raises(errors.ConfigError, match=r'--mpmd_num_stages.*NUM_STAGES=4'):
    experiment().task()


class Block(base_layer.BaseLayer):
  """Uses every kind of variable there is."""

  keep_prob: float = 1.0

  def setup(self):
    self.create_variable('w', base_layer.WeightHParams(shape=[4]))
    self.create_variable(
        'seen',
        base_layer.WeightHParams(shape=[], init=base_layer.WeightInit.Constant(0.0)),
        trainable=False,
    )
    self.create_child('dropout', pax_fiddle.Config(layers.Dropout, keep_prob=self.keep_prob))

  def __call__(self, x, *unused_args):
    self.add_summary('mean', jnp.mean(x))
    self.add_aux_loss('size', jnp.sum(x**2))
    self.update_var('seen', self.get_var('seen') + jnp.sum(x))
    return self.dropout(jnp.sin(x * self.theta.w) + x)


def _apply(cls: type, block: Any, variables: Any, **fields: Any) -> tuple[Any, Any]:
  stack = base_layer.instantiate(
      pax_fiddle.Config(cls, name='stack', block=block, x_times=5, **fields)
  )
  x = jnp.arange(1.0, 33.0).reshape(2, 4, 4) / 32
  with base_layer.JaxContext.new_context():
    if variables is None:
      return stack.init(jax.random.PRNGKey(0), x, None)
    rngs = {base_layer.RANDOM: jax.random.PRNGKey(1)}
    return stack.apply(variables, x, None, rngs=rngs, mutable=True)


def test_repeats_in_chunks_leave_the_same_collections():
  """Output, aux losses, summaries and updated variables of 5 repeats in 3 chunks are Praxis'."""
  block = pax_fiddle.Config(Block)
  variables = _apply(layers.StackedTransformerRepeated, block, None)
  desired = _apply(layers.StackedTransformerRepeated, block, variables)
  actual = _apply(stacks.MpmdStackedTransformerRepeated, block, variables, num_stages=3)
  assert {'aux_loss', 'summaries', 'non_trainable', 'params'} <= set(desired[1])
  compare.assert_close(actual, desired, 1e-6, 0)


def test_repeats_have_random_keys_of_their_own():
  """Layers at the same place of different chunks, and of one chunk, drop different units."""
  block = pax_fiddle.Config(Block, keep_prob=0.5)
  variables = _apply(layers.StackedTransformerRepeated, block, None)
  variables['params'] = jax.tree_util.tree_map(jnp.zeros_like, variables['params'])
  out, after = _apply(stacks.MpmdStackedTransformerRepeated, block, variables, num_stages=3)
  # Without weights a layer only drops and doubles: equal masks would never drop what is left.
  left = np.asarray(after['summaries']['repeat']['sub']['mean_scalar']).ravel()
  assert len(set(left)) == 5
  again, _ = _apply(stacks.MpmdStackedTransformerRepeated, block, variables, num_stages=3)
  np.testing.assert_array_equal(out, again)
  assert np.count_nonzero(out) < 8  # of 32; one mask in all layers would leave about 16
