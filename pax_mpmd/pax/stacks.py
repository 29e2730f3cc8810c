"""Praxis' stacks of Transformer layers with `pipeline_yield` between chunks of their layers.

A model that Pax doesn't pipeline keeps its variables: a list of layers (`StackedTransformer`) or
one layer with variables stacked over the repeats (`StackedTransformerRepeated`). Initialisation
runs Praxis' own code. Outside of it the layers are applied in `num_stages` chunks, which need not
be equally long, to one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
from typing import Any

from flax import linen as nn
import jax
from jax import numpy as jnp
from praxis import base_layer
from praxis import pax_fiddle
from praxis import pytypes
from praxis.layers import checkpoint_policy
from praxis.layers import repeats
from praxis.layers import transformers

from pax_mpmd.compile import marks
from pax_mpmd.pax import layer

__all__ = [
    'MpmdStackedTransformer',
    'MpmdStackedTransformerRepeated',
    'chunk_bounds',
    'describe',
    'stack_of',
    'with_class',
]

AUX_LOSS = base_layer.AUX_LOSS
NON_TRAINABLE = base_layer.NON_TRAINABLE
SUMMARIES = base_layer.SUMMARIES
JTensor = pytypes.JTensor
VarTree = dict[str, Any]


def chunk_bounds(num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
  """The layers [a, b) of each stage, as equal as they can be.

  The first stages have one layer more where the number doesn't divide: the last one computes the
  softmax too.
  """
  assert 1 <= num_stages <= num_layers, (num_layers, num_stages)
  size, rest = divmod(num_layers, num_stages)
  cuts = [stage * size + min(stage, rest) for stage in range(num_stages + 1)]
  return tuple(itertools.pairwise(cuts))


def stack_of(model: Any) -> Any:
  """The config of a language model's stack of layers, pipelined or not; None if it has none."""
  return getattr(getattr(model, 'lm_tpl', None), 'stacked_transformer_tpl', None)


def with_class(config: Any, cls: type) -> Any:
  """A config of `cls` with the fields that `config` sets."""
  new = pax_fiddle.Config(cls)
  for name in config.__arguments__:
    setattr(new, name, getattr(config, name))
  return new


def describe(task: Any) -> str | None:
  """How many layers each stage of a task's stack has, in words; None if no stack was cut.

  Args:
    task: config of a `tasks_lib.SingleTask`.
  """
  stack = stack_of(task.model)
  cls = None if stack is None else pax_fiddle.get_callable(stack)
  fields = {MpmdStackedTransformer: 'num_layers', MpmdStackedTransformerRepeated: 'x_times'}
  if cls not in fields:
    return None
  num_layers = getattr(stack, fields[cls])
  sizes = [b - a for a, b in chunk_bounds(num_layers, stack.num_stages)]
  return f'{num_layers} layers in stages of {", ".join(map(str, sizes))}'


class MpmdStackedTransformer(transformers.StackedTransformer):
  """A list of Transformer layers in `num_stages` pipeline stages.

  Attributes:
    num_stages: number of stages, at most the number of layers.
  """

  num_stages: int = 1

  def __call__(
      self,
      inputs: JTensor,
      paddings: JTensor,
      segment_mask: JTensor | None = None,
      cross_inputs: JTensor | None = None,
      cross_paddings: JTensor | None = None,
      cross_segment_mask: JTensor | None = None,
      segment_pos: JTensor | None = None,
  ) -> JTensor:
    """Applies the layers in order to one microbatch; arguments as in Praxis.

    Returns:
      The output of the last layer, `[microbatch, T, D]`.
    """
    if self.is_initializing():
      return super().__call__(
          inputs, paddings, segment_mask, cross_inputs, cross_paddings, cross_segment_mask,
          segment_pos,
      )
    masks = transformers.compute_attention_masks_for_fprop(
        inputs,
        paddings,
        self.mask_self_attention,
        segment_mask,
        cross_inputs,
        cross_paddings,
        cross_segment_mask,
        fold_padding_with_segment_mask=self.fold_padding_with_segment_mask,
    )

    def fprop(one_layer, x, paddings, masks, cross_inputs, segment_pos):
      mask, cross_mask = masks
      return one_layer(x, paddings, mask, cross_inputs, cross_mask, segment_pos=segment_pos)[0]

    if self.remat:
      fprop = nn.remat(fprop, policy=checkpoint_policy.custom_policy(self.checkpoint_policy))
    x = self.input_dropout(inputs) if self.input_dropout_prob > 0.0 else inputs
    bounds = chunk_bounds(self.num_layers, self.num_stages)
    for stage, (start, limit) in enumerate(bounds):
      for i in range(start, limit):
        x = fprop(self.x_layers[i], x, paddings, masks, cross_inputs, segment_pos)
      if limit < self.num_layers:
        x = marks.pipeline_yield(x, name=f'{self.name}/stage{stage}')
    return x


class MpmdStackedTransformerRepeated(transformers.StackedTransformerRepeated):
  """A Transformer block repeated `x_times` in `num_stages` pipeline stages.

  Attributes:
    num_stages: number of stages, at most `x_times`.
  """

  num_stages: int = 1

  def __call__(self, inputs: JTensor, *args: Any, **kwargs: Any) -> JTensor:
    """Applies the blocks in order to one microbatch; arguments as in Praxis.

    Returns:
      The output of the last block, `[microbatch, T, D]`.
    """
    if self.is_initializing():
      return super().__call__(inputs, *args, **kwargs)

    def between(x, stage):
      return marks.pipeline_yield(x, name=f'{self.name}/stage{stage}')

    bounds = chunk_bounds(self.x_times, self.num_stages)
    return _repeat_in_chunks(self.repeat_layer, bounds, between, inputs, args, kwargs)


def _repeat_in_chunks(
    repeat: repeats.Repeat,
    bounds: Sequence[tuple[int, int]],
    between: Callable[[Any, int], Any],
    x: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
  """Applies `repeat` as one shorter repeat for each chunk of its stacked variables.

  Args:
    repeat: a bound layer, not initialising, with one stacked axis.
    bounds: [a, b) of each chunk.
    between: applied to what flows from chunk i to the next, with i.
    x: what flows through the repeats.
    args: more arguments for each repeat.
    kwargs: likewise.

  Returns:
    The output of the last repeat. Aux losses, summaries and updated variables of the chunks are
    left as one repeat over all would leave them.
  """
  chunks = _Chunks()
  for stage, (start, limit) in enumerate(bounds):

    def apply(repeat, x, args, kwargs, length=limit - start):
      # Praxis' own scan, remat and summaries, over fewer repeats of the same variables.
      shorter = repeat.clone(parent=repeat.scope.rewound(), x_times=length)
      return shorter(x, *args, **kwargs)

    fn = nn.transforms.lift_transform(layer.fold_rngs, apply, stage)
    fn = nn.map_variables(
        fn,
        mapped_collections=True,
        mutable=True,
        trans_in_fn=lambda tree, a=start, b=limit: chunks.enter(tree, a, b),
        trans_out_fn=lambda tree, b=limit: chunks.leave(tree, b),
    )
    x = fn(repeat, x, args, kwargs)
    if stage + 1 < len(bounds):
      x = between(x, stage)
  return x


class _Chunks:
  """The views of the stacked variables that one chunk after the other sees and leaves behind."""

  def __init__(self):
    self._aux_losses: Any = None
    self._summaries: Any = None
    self._before: VarTree = {}
    self._updated: list[Any] = []

  def enter(self, variables: VarTree, start: int, limit: int) -> VarTree:
    """The variables of the repeats [start, limit) of the stacked ones."""
    added = (AUX_LOSS, SUMMARIES, base_layer.INTERMEDIATES)
    if not self._before:
      self._before = {name: tree for name, tree in variables.items() if name not in added}
    return {
        name: jax.tree_util.tree_map(lambda v: jax.lax.slice_in_dim(v, start, limit), tree)
        for name, tree in self._before.items()
    }

  def leave(self, variables: VarTree, limit: int) -> VarTree:
    """The collections after the repeats up to `limit`, with those of the chunks before."""
    out = {name: self._before.get(name, tree) for name, tree in variables.items()}
    if AUX_LOSS in out:
      if self._aux_losses is not None:
        out[AUX_LOSS] = jax.tree_util.tree_map(jnp.add, self._aux_losses, out[AUX_LOSS])
      self._aux_losses = out[AUX_LOSS]
    if SUMMARIES in out:
      if self._summaries is not None:
        # Each leaf is a list with one entry a repeat.
        out[SUMMARIES] = jax.tree_util.tree_map(
            lambda a, b: [*a, *b],
            self._summaries,
            out[SUMMARIES],
            is_leaf=lambda x: isinstance(x, list),
        )
      self._summaries = out[SUMMARIES]
    if NON_TRAINABLE in out:
      self._updated.append(variables[NON_TRAINABLE])
      out[NON_TRAINABLE] = jax.tree_util.tree_map(
          lambda whole, *pieces: _join(pieces, whole, limit),
          self._before[NON_TRAINABLE],
          *self._updated,
      )
    return out


def _join(pieces: Sequence[Any], whole: Any, limit: int) -> Any:
  if limit < whole.shape[0]:
    pieces = (*pieces, jax.lax.slice_in_dim(whole, limit, whole.shape[0]))
  return jnp.concatenate(pieces) if len(pieces) > 1 else pieces[0]
