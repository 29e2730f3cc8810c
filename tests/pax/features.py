"""What a Pax experiment can say, and experiments that say it, several features to each.

The experiments are small: compiling a step of Pax takes seconds however small the model is, so
features that don't get in each other's way share one.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

from jax import numpy as jnp
import numpy as np
from paxml import learners
from praxis import base_layer
from praxis import layers
from praxis import optimizers
from praxis import pax_fiddle
from praxis import py_utils
from praxis import schedules
from praxis.layers import activations
from praxis.layers import multi_query_attention
from praxis.layers import ngrammer
from praxis.layers import transformer_models

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


class Observed(layers.RmsNorm):
  """A norm with summaries of every kind."""

  def __call__(self, inputs: Any, paddings: Any = None) -> Any:
    kinds = base_layer.SummaryType
    self.add_summary('values', inputs, summary_type=kinds.HISTOGRAM)
    self.add_summary('image', inputs[..., None], summary_type=kinds.IMAGE)
    self.add_summary('text', jnp.arange(3, dtype=jnp.uint8), summary_type=kinds.TEXT)
    self.add_summary('positive', jnp.sum(inputs > 0))
    self.add_summary('columns', jnp.mean(inputs, axis=(0, 1)), verbosity=4)
    self.add_summary('largest', jnp.max(inputs), verbosity=5)
    return super().__call__(inputs, paddings)


class Llama(Small):
  """Rotary positions, RMS norm, gated activations, GShard's softmax; Adafactor and EMA."""

  USE_ROTARY_POSITION_EMB = True
  USE_GATED_ACTIVATION = True
  ACTIVATION_CLS = activations.Swish
  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_QKV_OUT_PROJ

  def edit(self, task_p, layer_p, learner_p):
    lm_p = task_p.model.lm_tpl
    lm_p.position_emb_tpl = None
    lm_p.final_ln_tpl = pax_fiddle.Config(Observed)
    lm_p.softmax_tpl = pax_fiddle.Config(
        layers.GShardSharedEmbeddingSoftmax,
        soft_cap_logits=30.0,
        logits_abs_max=5.0,
        z_loss_weight=1e-2,
        label_smoothing_prob=0.1,
    )
    task_p.model.count_tokens = True
    task_p.summary_verbosity = 4
    layer_p.ln_tpl = pax_fiddle.Config(Observed)
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
  """Relative bias, trained positions, separate embeddings, a prefix; SGD, norms of variables."""

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
    model_p = task_p.model
    model_p.model_type = transformer_models.LanguageModelType.PREFIX
    model_p.return_predictions = True
    model_p.apply_eval_sample_weights = True
    model_p.report_strict_acc = True
    model_p.lm_tpl.entropy_loss_weight = 0.1
    model_p.lm_tpl.record_activations_in_xent_output = True
    softmax_p = model_p.lm_tpl.softmax_tpl
    softmax_p.label_smoothing_prob = 0.1
    softmax_p.z_loss_weight = 1e-2


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
  """Batch norm in stages, no mask; L2 regularization, variables that are left out of training."""

  CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_EVERYTHING

  def edit(self, task_p, layer_p, learner_p):
    layer_p.ln_tpl = pax_fiddle.Config(layers.BatchNorm, decay=0.9)
    learner_p.optimizer.l2_regularizer_weight = 1e-3
    learner_p.optimizer.weight_decay = 0.0
    learner_p.bprop_variable_exclusion = ['.*ff_layer/ffn_layer1.*']
    learner_p.keep_optimizer_state_for_excluded_vars = True
    learner_p.check_valid_step = False
    task_p.model.model_type = transformer_models.LanguageModelType.BIDIRECTIONAL
    layer_p.tr_atten_tpl = pax_fiddle.Config(
        multi_query_attention.MultiQueryDotProductAttention, num_kv_heads=1
    )
    task_p.model.lm_tpl.stacked_transformer_tpl.pipeline_stage.remat = True


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
    learner_p.optimizer.learning_rate = 0.5


class Bfloat16Variables(Bfloat16):
  """Keeps its variables in bfloat16 too, and adds up their gradients in float32."""

  def edit(self, task_p, layer_p, learner_p):
    super().edit(task_p, layer_p, learner_p)
    task_p.model.dtype = jnp.bfloat16
    task_p.model.lm_tpl.stacked_transformer_tpl.bf16_accum_in_fp32 = True


def prefixed(seed: int) -> py_utils.NestedMap:
  """Batches with a prefix, an example that doesn't count, and weights that sum up to less than 1.

  A microbatch's weights do, that is.
  """
  inputs = tiny.batch(seed)
  scale = np.random.RandomState(seed).rand(*inputs.weights.shape).astype(np.float32)
  inputs.weights *= 0.03 * scale
  rows = np.arange(tiny.BATCH)
  inputs.inputs_indicator = (np.arange(tiny.LENGTH) < rows[:, None] // 2).astype(np.int32)
  inputs.eval_sample_weights = (rows != 5).astype(np.float32)
  return inputs


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
            "GShard's softmax (`GShardSharedEmbeddingSoftmax`), whose loss is divided by the number"
            ' of tokens; label smoothing, z-loss, capped logits (`soft_cap_logits`,'
            ' `logits_abs_max`)',
            'Summaries of layers in and outside of the stages: scalars, counts, histograms, images,'
            ' text; their verbosity (`summary_verbosity`)',
            'Tokens counted (`count_tokens`)',
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
            'A prefix (`model_type`), weights of examples (`apply_eval_sample_weights`,'
            ' `report_strict_acc`), weights that are fractions',
            'Outputs of examples (`return_predictions`, `record_activations_in_xent_output`)',
            'Entropy loss (`entropy_loss_weight`)',
        ),
        batch=prefixed,
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
            'Variables left out of training (`bprop_variable_exclusion`), with optimizer slots or'
            ' without (`keep_optimizer_state_for_excluded_vars`)',
            'Steps that are not checked (`check_valid_step = False`)',
            'Attention in both directions (`model_type`)',
            'Multi-query attention (`MultiQueryDotProductAttention`)',
            'Layers recomputed within a stage (`remat` of `pipeline_stage`)',
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
    Case(
        Bfloat16Variables,
        (
            'Variables in bfloat16 (`dtype` of the model), their gradients summed in float32'
            ' (`bf16_accum_in_fp32`) or not, within the precision of bfloat16',
        ),
        schedule='gpipe',
        num_steps=2,
        rtol=1e-2,
    ),
)
