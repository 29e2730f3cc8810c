"""Models that Pax doesn't pipeline: which can be cut into stages, and where."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from typing import Any

import jax
from paxml import trainer_lib
from praxis import pax_fiddle
from praxis.layers import ngrammer
from praxis.layers import normalizations
from praxis.layers import transformers

from pax_mpmd import errors
from pax_mpmd.compile import jax_compat
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import stacks

__all__ = ['check_own_yields', 'check_same_per_microbatch', 'cut_stack', 'microbatching_of']

# What each of these computes for an example depends on the other examples of the batch.
_MIXING_EXAMPLES = {
    transformers.TransformerFeedForwardMoe: (
        'routes the tokens of the whole batch to experts of limited capacity and balances their'
        ' load over the batch (fields num_experts and moe_layers of the stack)'
    ),
    normalizations.BatchNorm: 'normalizes by the mean and variance of the whole batch',
    ngrammer.VectorQuantization: 'moves its centroids by the sums over the whole batch',
}


def microbatching_of(
    num_microbatches: int | None, microbatch_size: int | None
) -> microbatches.Microbatching:
  """How a batch is split where the task itself doesn't say.

  Raises:
    ConfigError: not exactly one of the two is given.
  """
  if num_microbatches is None and microbatch_size is None:
    raise errors.ConfigError(
        'An experiment that Pax does not pipeline says nothing about microbatches. Give'
        ' --mpmd_num_microbatches=M, or set NUM_MICROBATCHES or MICROBATCH_SIZE in the experiment;'
        ' M must divide the global batch.'
    )
  return microbatches.Microbatching(num_microbatches, microbatch_size)


def cut_stack(task: Any, num_stages: int) -> bool:
  """Replaces the stack of layers of a task's language model by one in stages, in place.

  Args:
    task: config of a `tasks_lib.SingleTask`.
    num_stages: number of stages.

  Returns:
    Whether there is a stack to cut. If not, the model's own `pipeline_yield` calls have to do it.

  Raises:
    ConfigError: the stack can't be cut into that many stages.
  """
  stack = stacks.stack_of(task.model)
  if stack is None:
    return False
  cls = pax_fiddle.get_callable(stack)
  ours = {
      transformers.StackedTransformer: stacks.MpmdStackedTransformer,
      transformers.StackedTransformerRepeated: stacks.MpmdStackedTransformerRepeated,
  }
  if cls not in ours and cls not in ours.values():
    return False
  repeated = issubclass(cls, transformers.StackedTransformerRepeated)
  if repeated:
    _check_repeated(stack)
  field = 'x_times' if repeated else 'num_layers'
  num_layers = getattr(stack, field)
  if num_stages > num_layers:
    raise errors.ConfigError(
        f'NUM_STAGES={num_stages} (--mpmd_num_stages) is more than the {num_layers} layers of the'
        f' model (NUM_LAYERS; {field} of its {cls.__name__}). A stage needs at least one: set it to'
        f' a number from 1 to {num_layers}.'
    )
  if cls in ours:
    task.model.lm_tpl.stacked_transformer_tpl = stack = stacks.with_class(stack, ours[cls])
  stack.num_stages = num_stages
  return True


def _check_repeated(stack: Any) -> None:
  for name, works in (
      ('nd_prefix_shape', None),
      ('return_intermediate_outputs', False),
      ('collect_intermediate_outputs', False),
  ):
    value = getattr(stack, name)
    if value and not (name == 'nd_prefix_shape' and len(value) == 1):
      raise errors.ConfigError(
          f'{name}={value} of the StackedTransformerRepeated (lm_tpl.stacked_transformer_tpl) is'
          f' not supported with MPMD, which cuts the repeats into stages. Set it to {works}.'
      )


def check_mesh(mesh: dict[str, int]) -> None:
  """Checks that there is a mesh.

  Args:
    mesh: axis name -> devices of ici_mesh_shape x dcn_mesh_shape; empty if there is none.

  Raises:
    ConfigError: there is none.
  """
  if not mesh:
    raise errors.ConfigError(
        'ICI_MESH_SHAPE (ici_mesh_shape of the model) is None: Pax then runs the model with pmap,'
        ' which has other random keys. MPMD continues runs that have a mesh: set ICI_MESH_SHAPE ='
        ' [1, 1, 1] (replica, data, mdl), or in task() model.ici_mesh_shape = [1, 1, 1] and'
        " model.mesh_axis_names = ['replica', 'data', 'mdl']."
    )


def check_same_per_microbatch(
    task: Any, microbatching: microbatches.Microbatching, stages: Any = None
) -> None:
  """Checks that microbatches give what Pax computes of the whole batch.

  Args:
    task: config of a `tasks_lib.SingleTask`.
    microbatching: how a batch is split.
    stages: config of what Pax too runs in microbatches, a pipeline's stage; it is not checked.

  Raises:
    ConfigError: a layer of the model mixes the examples of a batch; names it.
  """
  if microbatching.num_microbatches == 1:
    return
  advice = (
      'make the model a pipelined one (PipelinedTransformer), which Pax too runs in microbatches'
      if stages is None
      else 'put it into the pipeline_stage'
  )
  for path, config in _configs(task.model, 'task.model', stages):
    cls = pax_fiddle.get_callable(config)
    for known, does in _MIXING_EXAMPLES.items():
      if isinstance(cls, type) and issubclass(cls, known):
        raise errors.ConfigError(
            f'{path} is a {cls.__name__}, which {does}. In microbatches it would compute something'
            ' else than this experiment does without --mpmd. Set NUM_MICROBATCHES=1'
            ' (--mpmd_num_microbatches=1), leave the layer out'
            + ('.' if known is ngrammer.VectorQuantization else f', or {advice}.')
        )


def _configs(config: Any, path: str, but: Any) -> Iterator[tuple[str, Any]]:
  """All configs that take part in a model, with their paths, except for those in `but`."""
  if isinstance(config, (list, tuple)):
    for i, value in enumerate(config):
      yield from _configs(value, f'{path}[{i}]', but)
  elif isinstance(config, pax_fiddle.Config) and config is not but:
    yield path, config
    for name in config.__arguments__:
      # Every stack has a template of experts, used or not.
      if name != 'moe_layer_tpl' or (config.moe_layers and config.num_experts):
        yield from _configs(getattr(config, name), f'{path}.{name}', but)


def check_own_yields(
    task: Any,
    num_stages: int,
    state: Any,
    prng_key: Any,
    inputs: Any,
    var_weight_hparams: Any,
) -> None:
  """Checks that a model without a stack to cut marks its stages itself.

  Args:
    task: the instantiated task.
    num_stages: number of stages.
    state: the train state, or its shapes and dtypes; so are the next two.
    prng_key: a key.
    inputs: a batch.
    var_weight_hparams: Praxis' metadata of the model's variables.

  Raises:
    ConfigError: the loss doesn't call `pipeline_yield` as often as the stages need.
  """
  found = 0

  class Found(Exception):
    """The rest of the step is of no interest."""

  def grad_fn(loss_fn, learner, mdl_vars, inputs, prng_key):
    nonlocal found
    del learner
    jaxpr = jax.make_jaxpr(lambda *args: loss_fn(*args)[0])(mdl_vars, inputs, prng_key)
    found = _count_yields(jaxpr.jaxpr)
    raise Found

  def step(state, prng_key, inputs):
    return trainer_lib.train_step_single_learner(
        task, state, prng_key, inputs, task.model.fprop_dtype, var_weight_hparams, grad_fn=grad_fn
    )

  with contextlib.suppress(Found):
    jax.eval_shape(step, state, prng_key, inputs)
  if found in (num_stages - 1, num_stages) and (found or num_stages == 1):
    return
  model = task.model
  stack = stacks.stack_of(model)
  of_stack = ''
  if stack is not None:
    of_stack = f' (its stack of layers is a {pax_fiddle.get_callable(stack).__name__})'
  raise errors.ConfigError(
      f'NUM_STAGES={num_stages} (--mpmd_num_stages): the model {type(model).__name__}{of_stack} has'
      ' no StackedTransformer or StackedTransformerRepeated at lm_tpl.stacked_transformer_tpl that'
      f' could be cut into stages, and its loss calls pax_mpmd.pipeline_yield {found} times in'
      f' place of {num_stages - 1}. '
      + (
          f'Set NUM_STAGES={found + 1}, or call it between the stages.'
          if found
          else 'Call it between the stages; without --mpmd it changes nothing.'
      )
  )


def _count_yields(jaxpr: Any) -> int:
  count = 0
  for eqn in jaxpr.eqns:
    count += eqn.primitive.name == 'pipeline_yield' and eqn.params['direction'] == 'forward'
    count += sum(_count_yields(sub) for sub in jax_compat.inner_jaxprs(eqn))
  return count
