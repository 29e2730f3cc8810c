"""The pipeline layer: Praxis' pipelined Transformer with `pipeline_yield` between its stages.

The variables are those of Praxis' layers, stacked over the stages, because initialisation runs
Praxis' own code. Outside initialisation the stages are applied one after the other to one
microbatch, each on its own static slice of the stacked variables. Under plain `jax.jit` that is an
ordinary sequential model; under `mpmd_jit` the yields are where it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import threading
from typing import Any

from flax import linen as nn
from flax.core import lift
import jax
from jax import numpy as jnp
from praxis import base_layer
from praxis import pax_fiddle
from praxis import pytypes
from praxis.layers import checkpoint_policy
from praxis.layers import pipeline
from praxis.layers import transformers

from pax_mpmd.compile import marks

__all__ = [
    'MpmdCircularPipelined',
    'MpmdPipelined',
    'MpmdPipelinedTransformer',
    'collect_aux_losses',
]

PARAMS = base_layer.PARAMS
NON_TRAINABLE = base_layer.NON_TRAINABLE
AUX_LOSS = base_layer.AUX_LOSS
SUMMARIES = base_layer.SUMMARIES
RANDOM = base_layer.RANDOM
JTensor = pytypes.JTensor
VarTree = dict[str, Any]

_collector = threading.local()


@contextlib.contextmanager
def collect_aux_losses() -> Iterator[list[JTensor]]:
  """Collects the auxiliary losses that pipelines add while the context is open.

  Pax divides what a pipeline adds by the number of microbatches, unweighted, but the main loss by
  the weight of all examples. The gradient function needs the two apart.

  Yields:
    A list to which every pipeline traced inside appends float scalars, one for each loss.
  """
  outer = getattr(_collector, 'sums', None)
  _collector.sums = []
  try:
    yield _collector.sums
  finally:
    _collector.sums = outer


def fold_rngs(fn: Callable[..., Any], data: int) -> Callable[..., Any]:
  """Lifts `fn` so that its scope's random keys have `data` folded in (flax lacks this one)."""

  def inner(scope_fn, repack_fn, variable_groups, rng_groups, *args, **kwargs):
    folded = lift.tree_map_rngs(lambda key: jax.random.fold_in(key, data), rng_groups)
    scope = scope_fn(variable_groups, folded)
    y = fn(scope, *args, **kwargs)
    return y, repack_fn(scope)

  return lift.pack(inner, (True,), (True,), (True,), name='fold_rngs', enable_kwargs=True)


class _StageCollections:
  """The views of the stacked variables that one stage after the other sees and leaves behind.

  Attributes:
    aux_losses: auxiliary losses summed over the stages so far, or None.
    summaries: summaries of the stages so far, keyed as Pax's pipelines key them.
    non_trainable: the stacked non-trainable variables, updated by the stages so far, or None.
  """

  def __init__(self, rename: Callable[[str, tuple[int, ...]], str]):
    self._rename = rename
    self.aux_losses: Any = None
    self.summaries: VarTree = {}
    self.non_trainable: Any = None

  def enter(self, variables: VarTree, index: tuple[int, ...]) -> VarTree:
    """The variables of the stage at `index` of the stacked ones."""
    if NON_TRAINABLE in variables and self.non_trainable is None:
      self.non_trainable = variables[NON_TRAINABLE]
    view = {}
    for name, tree in variables.items():
      if name in (AUX_LOSS, SUMMARIES, base_layer.INTERMEDIATES):
        continue  # what earlier stages added isn't this stage's business
      if name == NON_TRAINABLE:
        tree = self.non_trainable
      view[name] = jax.tree_util.tree_map(lambda v: v[index], tree)
    return view

  def leave(self, variables: VarTree, index: tuple[int, ...]) -> VarTree:
    """The collections after the stage at `index`, with those of the stages before it."""
    out = dict(variables)
    if AUX_LOSS in out:
      if self.aux_losses is not None:
        out[AUX_LOSS] = jax.tree_util.tree_map(jnp.add, self.aux_losses, out[AUX_LOSS])
      self.aux_losses = out[AUX_LOSS]
    if SUMMARIES in out:
      self.summaries = _merge(self.summaries, self._suffixed(out[SUMMARIES], index))
      out[SUMMARIES] = self.summaries
    if NON_TRAINABLE in out:
      # With `set` on a static index the update stays a piece of its own.
      self.non_trainable = jax.tree_util.tree_map(
          lambda whole, piece: whole.at[index].set(piece), self.non_trainable, out[NON_TRAINABLE]
      )
      out[NON_TRAINABLE] = self.non_trainable
    return out

  def _suffixed(self, tree: VarTree, index: tuple[int, ...]) -> VarTree:
    renamed = {}
    for key, value in tree.items():
      if isinstance(value, dict):
        renamed[key] = self._suffixed(value, index)
        continue
      kind = base_layer.get_summary_type_from_key(key)
      suffix = base_layer.get_summary_type_suffix(kind)
      trimmed = base_layer.trim_summary_type_from_key(key)
      renamed[self._rename(trimmed, index) + suffix] = value
    return renamed


def _merge(a: VarTree, b: VarTree) -> VarTree:
  out = dict(a)
  for key, value in b.items():
    out[key] = _merge(out[key], value) if key in out and isinstance(value, dict) else value
  return out


class MpmdPipelined(pipeline.LayerwiseShardablePipelined):
  """A pipeline of `num_stages` stages, applied to one microbatch at a time.

  Inputs outside initialisation are one microbatch, `[microbatch, ...]`; splitting the batch is the
  business of whoever calls the model (`pax_mpmd.pax.loss`).
  """

  def _stage_indices(self) -> list[tuple[int, ...]]:
    """For each stage in order, the index of its variables in the stacked ones."""
    return [(s,) for s in range(self.num_stages)]

  def _summary_name(self, key: str, index: tuple[int, ...]) -> str:
    return f'{key}.stage{index[0]}'

  def __call__(self, inputs: Any, *broadcast_inputs, **broadcast_kwargs) -> Any:
    """Applies the stages in order.

    Args:
      inputs: what flows through the stages, leaves `[microbatch, ...]`.
      *broadcast_inputs: given to every stage as they are.
      **broadcast_kwargs: given to every stage as they are.

    Returns:
      The output of the last stage, structured as `inputs`.
    """
    if self.is_initializing():
      return super().__call__(inputs, *broadcast_inputs, **broadcast_kwargs)
    collections = _StageCollections(self._summary_name)
    indices = self._stage_indices()
    values = inputs
    for stage, index in enumerate(indices):
      values = self._apply_stage(
          stage, index, collections, values, broadcast_inputs, broadcast_kwargs
      )
      if stage + 1 < len(indices):
        values = marks.pipeline_yield(values, name=f'{self.name}/stage{stage}')
    self._report_aux_losses(collections)
    return values

  def _apply_stage(self, stage, index, collections, values, args, kwargs):
    policy = checkpoint_policy.custom_policy(self.checkpoint_policy)

    def fprop(body, values, args, kwargs):
      return body(values, *args, **kwargs)

    fprop = nn.remat(fprop, prevent_cse=False, policy=policy)
    fprop = nn.transforms.lift_transform(fold_rngs, fprop, stage)
    fprop = nn.map_variables(
        fprop,
        mapped_collections=True,
        mutable=True,
        trans_in_fn=lambda variables: collections.enter(variables, index),
        trans_out_fn=lambda variables: collections.leave(variables, index),
    )
    return fprop(self.body, values, args, kwargs)

  def _report_aux_losses(self, collections: _StageCollections) -> None:
    sums = getattr(_collector, 'sums', None)
    if sums is None or collections.aux_losses is None:
      return
    structs = jax.tree_util.tree_leaves(
        collections.aux_losses, is_leaf=lambda x: isinstance(x, base_layer.AuxLossStruct)
    )
    sums.extend(jnp.sum(x.value) for x in structs)


class MpmdCircularPipelined(MpmdPipelined, pipeline.CircularLayerwiseShardablePipelined):
  """A circular pipeline: `circular_repeat * num_stages` stages, stage r * num_stages + s.

  Each of the `num_stages` pipeline ranks owns `circular_repeat` stages that aren't neighbours.
  """

  def _stage_indices(self) -> list[tuple[int, ...]]:
    return [(r, s) for r in range(self.circular_repeat) for s in range(self.num_stages)]

  def _summary_name(self, key: str, index: tuple[int, ...]) -> str:
    return f'{key}.circular_layer{index[0]}.stage{index[1]}'


class MpmdPipelinedTransformer(transformers.PipelinedTransformer):
  """Praxis' `PipelinedTransformer` over `MpmdPipelined`.

  The fields below are those that `TransformerLm` sets on a stack of layers that it doesn't know as
  a pipeline (it compares classes with `==`); they are passed on to the stage.
  """

  model_dims: int = 0
  num_layers: int | None = None
  mask_self_attention: bool = False
  packed_input: bool = False
  fold_padding_with_segment_mask: bool = False
  ngrammer_tpls: Any = None

  def setup(self) -> None:
    stage = self.pipeline_stage.clone()
    block = stage.block if issubclass(
        stage.cls, transformers.StackedTransformerRepeated
    ) else stage
    block.model_dims = self.model_dims or block.model_dims
    block.mask_self_attention = self.mask_self_attention
    block.packed_input = self.packed_input
    block.fold_padding_with_segment_mask = self.fold_padding_with_segment_mask
    if self.ngrammer_tpls is not None:
      block.ngrammer_tpls = self.ngrammer_tpls
    common = dict(
        name=self.name,
        num_stages=self.num_pipeline_stages,
        single_stage_body=stage,
        num_microbatches=self.num_pipeline_microbatches,
        microbatch_size=self.pipeline_microbatch_size,
        checkpoint_policy=self.checkpoint_policy,
    )
    if self.circular_repeat == 1:
      config = pax_fiddle.Config(MpmdPipelined, **common)
    else:
      config = pax_fiddle.Config(
          MpmdCircularPipelined, circular_repeat=self.circular_repeat, **common
      )
    config.weight_split_dims_mapping.stages = self.weight_split_dims_mapping.stages
    self.create_child('pipeline', config)
