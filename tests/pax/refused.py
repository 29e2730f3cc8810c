"""What a Pax experiment can say and is refused for, and what other tests hold.

The rest of the table in the docs; its first part is in `features`.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

from clu import metrics
from paxml import base_metrics
from paxml import sgf
from praxis import base_layer
from praxis import layers
from praxis import pax_fiddle
from praxis.layers import models
from praxis.layers import ngrammer

from tests.pax import features


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


class Squared(features.Small):
  """Updates a variable in a way that isn't supported."""

  def edit(self, task_p, layer_p, learner_p):
    layer_p.ln_tpl = pax_fiddle.Config(SquaringNorm)


class Quantized(features.Small):
  """Vector quantization in the stages, whose centroids the next microbatch sees."""

  def edit(self, task_p, layer_p, learner_p):
    task_p.model.lm_tpl.stacked_transformer_tpl.pipeline_stage.ngrammer_tpls = [
        pax_fiddle.Config(
            ngrammer.VQNgrammer,
            ngram_vocab_size=32,
            ngram_emb_dim=8,
            num_clusters=4,
            num_heads=2,
            dim_per_head=8,
        )
    ]


class SeveralLosses(features.Small):
  """Trains on the sum of two losses."""

  def edit(self, task_p, layer_p, learner_p):
    learner_p.loss_name = None
    task_p.loss_aggregator = pax_fiddle.Config(
        base_metrics.MultiLossAggregator, loss_keys=['total_loss', 'avg_xent']
    )


class CluModel(models.LanguageModel):
  """Returns a clu metric among weighted scalars, which Pax's summaries can't take."""

  def compute_loss(self, predictions: Any, input_batch: Any) -> Any:
    scalars, per_example = super().compute_loss(predictions, input_batch)
    scalars.average = metrics.Average.from_model_output(values=predictions.per_token_xent)
    return scalars, per_example


class WithBothMetrics(features.Small):
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
        'Checkpoint policies (`CHECKPOINT_POLICY`): all 17',
        'equal to Pax, and the same is recomputed; save_dot_with_no_batch_dims saves the products'
        ' with weights, for Pax none, since there all have the stages as a batch dimension',
        '`test_checkpoint_policies`, zoo',
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
        'VQ n-grams in the stages (`ngrammer_tpls`), which Pax updates from microbatch to'
        ' microbatch',
        'refused: `ConfigError` that names the variable',
        '`test_refused_while_tracing`',
    ),
    (
        'A loss or metric that is divided by something else than the returned weight, or whose'
        ' summands depend on the whole batch (weights divided by their sum, hard examples, products'
        ' of examples), or that is a function of an average (a perplexity); an output of examples'
        ' without a row for each',
        'refused: `ConfigError` that names it',
        '`test_rules.py`',
    ),
    (
        'Several losses (`MultiLossAggregator`)',
        'refused: `ConfigError` that names `loss_aggregator`',
        '`test_refused_while_tracing`',
    ),
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
