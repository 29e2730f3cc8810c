"""What a Pax experiment can say, and experiments that say it, several features to each.

The experiments are small: compiling a step of Pax takes seconds however small the model is, so
features that don't get in each other's way share one.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

from clu import metrics
from jax import numpy as jnp
import numpy as np
from paxml import learners
from paxml import sgf
from praxis import base_layer
from praxis import layers
from praxis import optimizers
from praxis import pax_fiddle
from praxis import py_utils
from praxis import schedules
from praxis.layers import activations
from praxis.layers import models
from praxis.layers import ngrammer

from tests.pax import tiny


class Small(tiny.TinyLm):
  """One layer in each of 2 stages, 4 microbatches."""

  NUM_LAYERS = 2
  NUM_STAGES = 2
  NUM_MICROBATCHES = 4
  ICI_MESH_SHAPE = [2, 1, 1, 1]
  MODEL_DIMS = 16
  HIDDEN_DIMS = 32
  DIMS_PER_HEAD = 8

  def task(self) -> Any:
    task_p = super().task()
    stack = task_p.model.lm_tpl.stacked_transformer_tpl.pipeline_stage
    self.edit(task_p, stack.transformer_layer_params_tpl, task_p.train.learner)
    return task_p

  def edit(self, task_p: Any, layer_p: Any, learner_p: Any) -> None:
    """Changes the task's config, in it that of a layer and that of the learner."""


def _optimizer(learner_p: Any, cls: type, **fields: Any) -> Any:
  """Another optimizer with the learning rate and schedule of the one there is."""
  old = learner_p.optimizer
  learner_p.optimizer = pax_fiddle.Config(
      cls, learning_rate=old.learning_rate, lr_schedule=_constant(), **fields
  )
  return learner_p.optimizer


def _constant() -> Any:
  return pax_fiddle.Config(schedules.Constant, value=1.0)


class Llama(Small):
  """Rotary positions, RMS norm, gated activations; Adafactor and EMA."""

  USE_ROTARY_POSITION_EMB = True
  USE_GATED_ACTIVATION = True
  ACTIVATION_CLS = activations.Swish
  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_QKV_OUT_PROJ

  def edit(self, task_p, layer_p, learner_p):
    lm_p = task_p.model.lm_tpl
    lm_p.position_emb_tpl = None
    lm_p.final_ln_tpl = pax_fiddle.Config(layers.RmsNorm)
    layer_p.ln_tpl = pax_fiddle.Config(layers.RmsNorm)
    layer_p.tr_fflayer_tpl.ln_tpl = pax_fiddle.Config(layers.RmsNorm)
    _optimizer(
        learner_p,
        optimizers.ShardedAdafactor,
        decay_method='adam',
        decay_adam=0.99,
        weight_decay=1e-3,
        min_dim_size_to_factor=8,
        clip_gradient_norm_to_value=0.5,
        ema_decay=0.9,
    )


class Relative(Small):
  """Relative bias, trained positions, separate embeddings; SGD, norms of each variable."""

  RELATIVE_BIAS = True
  TRAINABLE_POSITION_EMB = True
  TRAINABLE_PE_MAX_SEQ_LEN = 32
  SEPARATE_EMBEDDING = True
  NORM_POLICY = 'post'
  COMBINE_QKV = False
  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_DOT_ONLY

  def edit(self, task_p, layer_p, learner_p):
    bias = layer_p.tr_atten_tpl.relative_bias_tpl
    bias.relative_attention_num_buckets = 8
    bias.relative_attention_max_distance = 16
    _optimizer(
        learner_p,
        optimizers.ShardedSgd,
        momentum=0.9,
        nesterov=True,
        clip_gradient_single_norm_to_value=0.05,
    )
    learner_p.grad_norm_individual_vars = True
    learner_p.var_norm_individual_vars = True
    task_p.train.variable_norm_summary = True


class Streamed(Small):
  """Circular pipeline with streams, inputs that aren't packed, gradients over 2 steps."""

  NUM_LAYERS = 4
  CIRCULAR_REPEAT = 2
  STREAM_IO = True
  PIPELINE_BROADCAST_INPUTS = True
  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_ITERATION_INPUT

  def edit(self, task_p, layer_p, learner_p):
    task_p.model.lm_tpl.packed_input = False
    inner = learner_p.optimizer
    task_p.vn.vn_scale = 0.01
    task_p.vn.vn_regex = '.*ffn_layer1.*'
    _optimizer(
        learner_p,
        optimizers.ShardedStaticAccumulator,
        optimizer_tpl=inner,
        num_sub_batches=2,
        clip_gradient_norm_to_value=0.5,
    )


class MovingAverages(Small):
  """Batch norm in the stages; L2 regularization, variables that are left out of training."""

  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_EVERYTHING

  def edit(self, task_p, layer_p, learner_p):
    layer_p.ln_tpl = pax_fiddle.Config(layers.BatchNorm, decay=0.9)
    learner_p.optimizer.l2_regularizer_weight = 1e-3
    learner_p.optimizer.weight_decay = 0.0
    learner_p.bprop_variable_exclusion = ['.*ff_layer/ffn_layer1.*']


class Skipping(Small):
  """Steps with NaN or too large gradients are skipped; several optimizers, n-grams."""

  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_TRANSFORMER_LAYER_OUTPUT
  TRAINABLE_POSITION_EMB = True
  TRAINABLE_PE_MAX_SEQ_LEN = 32

  def edit(self, task_p, layer_p, learner_p):
    lm_p = task_p.model.lm_tpl
    lm_p.ngrammer_tpl = pax_fiddle.Config(
        ngrammer.Ngrammer,
        ngram_vocab_size=32,
        unigram_vocab_size=tiny.VOCAB,
        ngram_emb_dim=4,
        num_heads=2,
        dim_per_head=8,
    )
    schedule = dict(learning_rate=0.01, lr_schedule=_constant())
    several = pax_fiddle.Config(
        learners.MultiOptimizerLearner,
        loss_name=learner_p.loss_name,
        optimizer=learner_p.optimizer,
        auxiliary_optimizers=[
            pax_fiddle.Config(optimizers.ShardedAdagrad, **schedule),
            pax_fiddle.Config(optimizers.Lion, weight_decay=1e-3, **schedule),
        ],
        auxiliary_regex=['.*softmax.*', '.*self_attention.*'],
        auxiliary_names=['softmax', 'attention'],
        skip_step_gradient_norm_value=100.0,
    )
    several.optimizer.decoupled_weight_decay = 1e-2
    several.optimizer.weight_decay = 0.0
    task_p.train.learner = several


class Bfloat16(Small):
  """Computes in bfloat16; SGD, since Adam makes a large step of a small difference."""

  FPROP_DTYPE = jnp.bfloat16

  def edit(self, task_p, layer_p, learner_p):
    _optimizer(
        learner_p, optimizers.ShardedSgd, momentum=0.9, clip_gradient_norm_to_value=0.5
    )


def poisoned(seed: int) -> py_utils.NestedMap:
  """Batches of which every second one makes an activation NaN."""
  inputs = tiny.batch(seed)
  if seed % 2:
    inputs.paddings[5, 1] = np.nan
  return inputs


@dataclasses.dataclass(frozen=True)
class Case:
  """An experiment that is compared with Pax.

  Attributes:
    experiment: the experiment.
    features: what it has, as rows of the table in the docs.
    schedule: None: the MPMD steps run under plain `jax.jit`; else by `mpmd_jit` on local actors.
    batch: seed -> a batch.
    num_steps: number of train steps.
    rtol: relative tolerance of all that is compared, where it isn't that of float32.
  """

  experiment: type
  features: tuple[str, ...]
  schedule: str | None = None
  batch: Callable[[int], py_utils.NestedMap] = tiny.batch
  num_steps: int = 3
  rtol: float | None = None


CASES = (
    Case(
        Llama,
        (
            'Rotary position embedding (`USE_ROTARY_POSITION_EMB`)',
            'RMS norm (`ln_tpl`)',
            'Gated activations (`USE_GATED_ACTIVATION`)',
            'Packed inputs (`packed_input`)',
            'Sharded Adafactor, factored',
            'EMA (`ema_decay`)',
            'Global norm clipping (`clip_gradient_norm_to_value`)',
        ),
        schedule='1f1b',
    ),
    Case(
        Relative,
        (
            'Relative bias (`RELATIVE_BIAS`)',
            'Trainable position embedding (`TRAINABLE_POSITION_EMB`)',
            'Separate embeddings (`SEPARATE_EMBEDDING`)',
            'Norm after the layer (`NORM_POLICY`)',
            'Sharded SGD with Nesterov momentum',
            'Single norm clipping (`clip_gradient_single_norm_to_value`)',
            'Norms of each gradient and variable (`grad_norm_individual_vars`,'
            ' `var_norm_individual_vars`, `variable_norm_summary`)',
        ),
    ),
    Case(
        Streamed,
        (
            'Circular pipeline (`CIRCULAR_REPEAT`)',
            'Streams (`STREAM_IO`)',
            'Pipelined broadcast inputs (`PIPELINE_BROADCAST_INPUTS`)',
            'Unpacked inputs (`packed_input = False`)',
            'Gradients over several steps (`ShardedStaticAccumulator`)',
            'Variational noise (`vn_scale`)',
        ),
        num_steps=4,
    ),
    Case(
        MovingAverages,
        (
            'Variables updated in the forward pass of the stages (`BatchNorm`)',
            'L2 regularization (`l2_regularizer_weight`)',
            'Variables left out of training (`bprop_variable_exclusion`)',
        ),
        schedule='1f1b',
    ),
    Case(
        Skipping,
        (
            'Steps with NaN are skipped (`enable_skip_step_on_gradient_anomalies`)',
            'Steps with a large gradient are skipped (`skip_step_gradient_norm_value`)',
            'Several optimizers (`MultiOptimizerLearner`): Adam, Adagrad, Lion',
            'Decoupled weight decay, and its mask',
            'N-grams of the embedding (`ngrammer_tpl`)',
        ),
        batch=poisoned,
        num_steps=4,
    ),
    Case(
        Bfloat16,
        ('bfloat16 (`FPROP_DTYPE`), within its precision',),
        num_steps=2,
        rtol=1e-2,
    ),
)


class SquaringNorm(layers.LayerNorm):
  """A layer norm with a variable that every forward pass squares."""

  def setup(self) -> None:
    super().setup()
    self.create_variable(
        'squared',
        base_layer.WeightHParams(
            shape=[self.dim],
            init=base_layer.WeightInit.Constant(1.0),
            collections=[base_layer.WeightHParamsCollection.REQUIRES_MEAN_SYNC],
        ),
        trainable=False,
    )

  def __call__(self, inputs: Any, paddings: Any = None) -> Any:
    self.update_var('squared', self.get_var('squared') ** 2)
    return super().__call__(inputs, paddings)


class Squared(Small):
  """Updates a variable in a way that isn't supported."""

  def edit(self, task_p, layer_p, learner_p):
    layer_p.ln_tpl = pax_fiddle.Config(SquaringNorm)


class CluModel(models.LanguageModel):
  """Returns a clu metric among weighted scalars, which Pax's summaries can't take."""

  def compute_loss(self, predictions: Any, input_batch: Any) -> Any:
    scalars, per_example = super().compute_loss(predictions, input_batch)
    scalars.average = metrics.Average.from_model_output(values=predictions.per_token_xent)
    return scalars, per_example


class WithBothMetrics(Small):
  """Returns weighted scalars and clu metrics at once."""

  MODEL_CLASS = CluModel


@dataclasses.dataclass(frozen=True)
class Refused:
  """What is refused when the task's config is made.

  Attributes:
    what: row of the table in the docs.
    field: the field that the error names.
    words: what else it says.
    fields: settings of the experiment.
    edit: changes the task's config.
  """

  what: str
  field: str
  words: tuple[str, ...] = ()
  fields: tuple[tuple[str, Any], ...] = ()
  edit: Callable[[Any], None] | None = None


def _batch_norm_at_the_end(task_p: Any) -> None:
  task_p.model.lm_tpl.final_ln_tpl = pax_fiddle.Config(layers.BatchNorm)


def _bfloat16_variables(task_p: Any) -> None:
  task_p.model.dtype = jnp.bfloat16
  task_p.model.lm_tpl.stacked_transformer_tpl.bf16_accum_in_fp32 = True


def _private_gradients(task_p: Any) -> None:
  task_p.train.learner.stochastic_gradient = pax_fiddle.Config(sgf.DpSgdStochasticGradient)


class OwnPipeline(layers.PipelinedTransformer):
  """A pipeline of a user's own."""


def _own_pipeline(task_p: Any) -> None:
  old = task_p.model.lm_tpl.stacked_transformer_tpl
  new = pax_fiddle.Config(OwnPipeline)
  for name in old.__arguments__:
    setattr(new, name, getattr(old, name))
  task_p.model.lm_tpl.stacked_transformer_tpl = new


REFUSED = (
    Refused(
        'Batch norm, VQ n-grams or experts outside of the stages',
        'final_ln_tpl',
        ('BatchNorm', 'NUM_MICROBATCHES=1'),
        edit=_batch_norm_at_the_end,
    ),
    Refused(
        'Sums in float32 of bfloat16 variables (`bf16_accum_in_fp32`)',
        'bf16_accum_in_fp32',
        ('dtype', 'jnp.float32'),
        edit=_bfloat16_variables,
    ),
    Refused(
        'Gradients of single examples (`stochastic_gradient`)',
        'stochastic_gradient',
        ('DpSgdStochasticGradient', 'None'),
        edit=_private_gradients,
    ),
    Refused(
        'A pipeline layer of your own (a subclass of `PipelinedTransformer`)',
        'stacked_transformer_tpl',
        ('OwnPipeline', 'MpmdPipelinedTransformer'),
        edit=_own_pipeline,
    ),
)


# What other tests hold: feature, result, test.
ELSEWHERE = [
    ('Tied embeddings, Adam, packed rows with ragged ends', 'equal to Pax', '`TinyLm`'),
    (
        'Several devices in a stage (`ICI_MESH_SHAPE` or `DCN_MESH_SHAPE` with `replica`, `data` or'
        ' `mdl` > 1), sizes that they do not divide included',
        'equal to Pax',
        '`test_sharded.py`',
    ),
    ('Experts in the stages, their aux losses (`moe_layers`)', 'equal to Pax', '`TinyMoe`'),
    (
        'Repeated layers in a stage (`USE_REPEATED_LAYER`)',
        'equal to Pax; also with summaries, where Pax fails',
        '`TinyRepeated`',
    ),
    (
        'Checkpoint policies (`CHECKPOINT_POLICY`): save_nothing, save_everything, save_dot_only,'
        ' save_iteration_input, save_qkv_out_proj, save_transformer_layer_output,'
        ' save_dot_for_mlperf_200b; the others only list other names',
        'equal to Pax',
        '`CASES`, zoo',
    ),
    (
        'clu metrics in place of weighted scalars: WeightedScalarCluMetric, Average, Std,'
        ' LastValue, CollectingMetric, and others that merge',
        'equal to Pax',
        '`test_metrics.py`',
    ),
    (
        'Dropout (`DROPOUT_PROB`)',
        'other random bits than Pax; the same for any schedule and number of actors',
        '`test_dropout_does_not_depend_on_schedule_or_actors`',
    ),
]
REFUSED_ELSEWHERE = [
    (
        'Both or none of `NUM_MICROBATCHES` and `MICROBATCH_SIZE`; layers, mesh or batch that do'
        ' not divide',
        'refused: `ConfigError` that names the field and what would work',
        '`test_transform.py`',
    ),
    (
        'Streams (`STREAM_IO`) between which the microbatches do not divide',
        'refused: `ConfigError` that names `STREAM_IO`',
        '`test_microbatches.py`',
    ),
    (
        'Variables of the stages whose update depends on the order of the microbatches',
        'refused: `ConfigError` that names the variable',
        '`test_refused_while_tracing`',
    ),
    (
        'clu metrics that count a batch as one, whatever its size; or among weighted scalars',
        'refused: `ConfigError` that names the metric',
        '`test_metrics.py`, `test_refused_while_tracing`',
    ),
]
