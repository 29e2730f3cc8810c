"""A model of one's own in pipeline stages: what pax_mpmd asks of it is in `Convolutions.__call__`.

Stock Pax trains it on one device, where `pipeline_yield` does nothing; with `--mpmd
--mpmd_num_stages=4 --mpmd_num_microbatches=8` it trains in four stages.
"""

from __future__ import annotations

from typing import Any

from jax import numpy as jnp
from paxml import experiment_registry
from paxml import tasks_lib
from paxml.tasks.lm import model_params
from praxis import base_layer
from praxis import base_model
from praxis import layers
from praxis import pax_fiddle
from praxis import py_utils
from praxis import pytypes
from praxis.layers import convolutions

from configs import stdlib_lm
from configs import stdlib_task
from pax_mpmd import pipeline_yield

NestedMap = py_utils.NestedMap
JTensor = pytypes.JTensor


class Block(base_layer.BaseLayer):
  """x + f(x), where f looks back 8 positions.

  Attributes:
    dims: width.
  """

  dims: int = 0

  def setup(self) -> None:
    self.create_child('norm', pax_fiddle.Config(layers.LayerNorm, dim=self.dims))
    self.create_child(
        'conv',
        pax_fiddle.Config(
            convolutions.DepthwiseConv1D, filter_shape=(8, self.dims, 1), is_causal=True
        ),
    )
    self.create_child(
        'ff', pax_fiddle.Config(layers.FeedForward, input_dims=self.dims, output_dims=self.dims)
    )

  def __call__(self, x: JTensor, paddings: JTensor) -> JTensor:
    return x + self.ff(self.conv(self.norm(x), paddings))


class Convolutions(base_model.BaseModel):
  """Predicts the next token with convolutions.

  Attributes:
    vocab_size: number of tokens.
    dims: width.
    num_blocks: number of blocks.
    num_stages: the pipeline stages that the blocks are dealt out to.
  """

  vocab_size: int = 0
  dims: int = 0
  num_blocks: int = 0
  num_stages: int = 4

  def setup(self) -> None:
    sizes = dict(input_dims=self.dims, num_classes=self.vocab_size)
    self.create_child('embedding', pax_fiddle.Config(layers.Embedding, **sizes))
    self.create_children(
        'blocks', [pax_fiddle.Config(Block, dims=self.dims) for _ in range(self.num_blocks)]
    )
    self.create_child('softmax', pax_fiddle.Config(layers.FullSoftmax, **sizes))

  def compute_predictions(self, input_batch: NestedMap) -> NestedMap:
    """Returns the softmax layer's output: loss, weight, logits."""
    x = self.embedding.emb_lookup(input_batch.ids)
    per_stage = self.num_blocks // self.num_stages
    for i, block in enumerate(self.blocks):
      if i and i % per_stage == 0:
        x = pipeline_yield(x)  # the end of a stage
      x = block(x, input_batch.paddings)
    return self.softmax(
        x, input_batch.weights[..., jnp.newaxis], class_ids=input_batch.labels[..., jnp.newaxis]
    )

  def compute_loss(
      self, predictions: NestedMap, input_batch: NestedMap
  ) -> tuple[dict[str, tuple[JTensor, JTensor]], dict[str, Any]]:
    """The loss is an average over tokens, so its weight is what it was divided by."""
    scores = -jnp.sum(predictions.per_example_xent * input_batch.weights, axis=-1)
    return dict(loss=(predictions.avg_xent, predictions.total_weight)), dict(scores=scores)


@experiment_registry.register
class StdlibConvolutions(stdlib_lm.StdlibDataset):
  """8 blocks on one device.

  Global batch size = 32 rows of 128 bytes.
  """

  PERCORE_BATCH_SIZE = 32
  DIMS = 128
  NUM_BLOCKS = 8
  TRAIN_STEPS = 120
  ICI_MESH_SHAPE = [1, 1, 1]

  def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
    """Returns the task parameters."""
    task_p = pax_fiddle.Config(tasks_lib.SingleTask, name='convolutions')
    task_p.model = pax_fiddle.Config(
        Convolutions,
        name='convolutions',
        fprop_dtype=jnp.float32,
        vocab_size=stdlib_task.VOCABULARY.vocab_size,
        dims=self.DIMS,
        num_blocks=self.NUM_BLOCKS,
    )
    task_p.model.ici_mesh_shape = self.ICI_MESH_SHAPE
    task_p.model.mesh_axis_names = ['replica', 'data', 'mdl']
    model_params.set_default_adam(task_p, 2e-3, 0.0, warmup_steps=20, decay_start=21)
    task_p.train.learner.loss_name = 'loss'
    task_p.train.num_train_steps = self.TRAIN_STEPS
    task_p.train.save_interval_steps = 20
    task_p.train.summary_interval_steps = 5
    task_p.train.eval_interval_steps = 40
    task_p.train.eval_skip_train = True
    return task_p
