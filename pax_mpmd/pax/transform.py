"""Makes a Pax task an MPMD one: swaps its pipeline or stack of layers, checks the configuration."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from paxml.tasks.lm import model_params
from praxis import pax_fiddle
from praxis.layers import transformers

from pax_mpmd import errors
from pax_mpmd.pax import layer
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import stacks
from pax_mpmd.pax import unpipelined

__all__ = ['PipelineConfig', 'find_pipeline', 'mpmd_task', 'num_devices', 'stages_of']

STAGE_AXIS = 'stage'


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """What MPMD execution must know of a task.

  Attributes:
    num_ranks: pipeline ranks of the configuration (Pax's num_stages).
    circular_repeat: stages per rank.
    microbatching: how a batch is split.
    num_devices: devices of the whole configured mesh.
    stage_mesh: names and sizes of the mesh axes within one stage, the stage axis having size 1.
    own_yields: the stages are marked by `pipeline_yield` calls of the model's own.
  """

  num_ranks: int
  circular_repeat: int
  microbatching: microbatches.Microbatching
  num_devices: int
  stage_mesh: tuple[tuple[str, int], ...] = ()
  own_yields: bool = False

  @property
  def devices_per_actor(self) -> int:
    """Devices of the mesh of one actor."""
    return math.prod(size for _, size in self.stage_mesh)

  @property
  def num_stages(self) -> int:
    """Number of stages in the sense of pax_mpmd: of all ranks and repeats."""
    return self.num_ranks * self.circular_repeat


def num_devices(
    ici_mesh_shape: Sequence[int] | None, dcn_mesh_shape: Sequence[int] | None
) -> int:
  """Devices of a mesh over slices: prod(ICI_MESH_SHAPE) * prod(DCN_MESH_SHAPE)."""
  return math.prod(ici_mesh_shape or (1,)) * math.prod(dcn_mesh_shape or (1,))


def find_pipeline(task: Any) -> Any:
  """The config of the pipeline layer in a task's config, None if the task isn't pipelined.

  Args:
    task: config of a `tasks_lib.SingleTask`.
  """
  stack = stacks.stack_of(task.model)
  if stack is None or not issubclass(_cls(stack), transformers.PipelinedTransformer):
    return None
  return stack


def mpmd_task(
    task: Any,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    microbatch_size: int | None = None,
) -> tuple[Any, PipelineConfig]:
  """Replaces the pipeline layer, or the stack of layers, of a task by the MPMD one, in place.

  To be called on the finished config: Pax compares the classes of these layers with `==` while it
  builds the config.

  Args:
    task: config of a `tasks_lib.SingleTask`.
    num_stages: number of stages where the task isn't pipelined; where it is, it says so itself.
    num_microbatches: likewise; this or `microbatch_size`.
    microbatch_size: likewise.

  Returns:
    The task and what was found in it.

  Raises:
    ConfigError: if MPMD execution doesn't support the task; names the field.
  """
  _check_learner(task)
  old = find_pipeline(task)
  if old is None:
    return _cut_task(task, num_stages, num_microbatches, microbatch_size)
  for name, value, own in (
      ('NUM_STAGES', num_stages, old.num_pipeline_stages),
      ('NUM_MICROBATCHES', num_microbatches, old.num_pipeline_microbatches),
      ('MICROBATCH_SIZE', microbatch_size, old.pipeline_microbatch_size),
  ):
    if value is not None and value != own:
      raise errors.ConfigError(
          f'{name}={value} (--mpmd_{name.lower()}), but the task has a pipeline of its own, with'
          f' {name}={own}. Leave it out, or change it where the experiment builds its'
          f' {_cls(old).__name__}.'
      )
  config = check(task, old)
  if issubclass(_cls(old), layer.MpmdPipelinedTransformer):
    return task, config
  if _cls(old) is not transformers.PipelinedTransformer:
    raise errors.ConfigError(
        f'task.model.lm_tpl.stacked_transformer_tpl is a {_cls(old).__name__}, a subclass of'
        ' PipelinedTransformer that pax_mpmd does not know. Derive it from'
        ' pax_mpmd.pax.MpmdPipelinedTransformer instead.'
    )
  new = stacks.with_class(old, layer.MpmdPipelinedTransformer)
  task.model.lm_tpl.stacked_transformer_tpl = new
  return task, config


def _cut_task(
    task: Any, num_stages: int | None, num_microbatches: int | None, microbatch_size: int | None
) -> tuple[Any, PipelineConfig]:
  """`mpmd_task` of a task that isn't pipelined."""
  stack = stacks.stack_of(task.model)
  if num_stages is None:
    found = 'nothing' if stack is None else f'a {_cls(stack).__name__}'
    raise errors.ConfigError(
        f'The experiment is not pipelined (task.model.lm_tpl.stacked_transformer_tpl is {found}, no'
        ' PipelinedTransformer) and does not say into how many stages to cut it. Give'
        ' --mpmd_num_stages and --mpmd_num_microbatches, or set NUM_STAGES and NUM_MICROBATCHES'
        ' in the experiment; or derive it from'
        ' paxml.tasks.lm.model_params.TransformerLmSpmdPipelineAdafactor (or LmCloudSpmdPipeline).'
    )
  if not isinstance(num_stages, int) or num_stages < 1:
    raise errors.ConfigError(
        f'NUM_STAGES (--mpmd_num_stages) must be an integer of at least 1; got {num_stages!r}.'
    )
  microbatching = unpipelined.microbatching_of(num_microbatches, microbatch_size)
  cut = unpipelined.cut_stack(task, num_stages)
  unpipelined.check_mesh(_mesh(task.model))
  unpipelined.check_same_per_microbatch(task, microbatching)
  return task, PipelineConfig(
      num_ranks=num_stages,
      circular_repeat=1,
      microbatching=microbatching,
      num_devices=num_devices(task.model.ici_mesh_shape, task.model.dcn_mesh_shape),
      stage_mesh=tuple(_mesh(task.model).items()),
      own_yields=not cut,
  )


def _check_learner(task: Any) -> None:
  stochastic = getattr(task.train.learner, 'stochastic_gradient', None)
  if stochastic is not None:
    cls = _cls(stochastic) if isinstance(stochastic, pax_fiddle.Config) else type(stochastic)
    raise errors.ConfigError(
        f'train.learner.stochastic_gradient is a {cls.__name__}; gradients of single examples are'
        ' not supported with MPMD pipelining, which sums them over microbatches. Set'
        ' stochastic_gradient = None.'
    )


def check(task: Any, pipe: Any) -> PipelineConfig:
  """Checks a pipelined task; see `mpmd_task`."""
  ranks = pipe.num_pipeline_stages
  if not ranks:
    raise errors.ConfigError(
        f'NUM_STAGES (num_pipeline_stages) must be at least 1; got {ranks}.'
    )
  # Streaming itself, a way to hide transfers of SPMD pipelining, has no use here; but it changes
  # which rows are a microbatch, which aux losses and dropout see.
  microbatching = microbatches.Microbatching(
      pipe.num_pipeline_microbatches,
      pipe.pipeline_microbatch_size,
      streams=ranks if pipe.stream_io else 1,
  )
  mesh = _mesh(task.model)
  stage_axis = _stage_axis(pipe)
  if mesh and mesh.get(stage_axis, 1) != ranks:
    raise errors.ConfigError(
        f'The mesh axis {stage_axis!r} has {mesh.get(stage_axis, 1)} devices but NUM_STAGES is'
        f' {ranks}. Set ICI_MESH_SHAPE = [{ranks}, 1, 1, 1].'
    )
  unpipelined.check_same_per_microbatch(task, microbatching, stages=pipe.pipeline_stage)
  return PipelineConfig(
      num_ranks=ranks,
      circular_repeat=pipe.circular_repeat,
      microbatching=microbatching,
      num_devices=num_devices(task.model.ici_mesh_shape, task.model.dcn_mesh_shape),
      stage_mesh=tuple((axis, 1 if axis == stage_axis else n) for axis, n in mesh.items()),
  )


def check_experiment(experiment: Any) -> None:
  """Checks the fields of Pax's pipelined experiments that its own `task()` only asserts.

  Args:
    experiment: an experiment or its class. Fields that it doesn't have are not checked.

  Raises:
    ConfigError: names the field and values that would work.
  """
  fields = {
      name: getattr(experiment, name, None)
      for name in ('NUM_STAGES', 'NUM_LAYERS', 'NUM_MICROBATCHES', 'MICROBATCH_SIZE')
  }
  if not _is_pipelined(experiment):
    return
  microbatches.Microbatching(fields['NUM_MICROBATCHES'], fields['MICROBATCH_SIZE'])
  stages, layers = fields['NUM_STAGES'], fields['NUM_LAYERS']
  if not isinstance(stages, int) or stages < 1:
    raise errors.ConfigError(
        f'NUM_STAGES must be an integer of at least 1; got {stages!r}. Set it to the number of'
        ' pipeline ranks.'
    )
  repeat = getattr(experiment, 'CIRCULAR_REPEAT', 1)
  if isinstance(layers, int) and layers % (stages * repeat):
    allowed = [s for s in range(1, layers + 1) if layers % (s * repeat) == 0]
    raise errors.ConfigError(
        f'NUM_LAYERS={layers} do not divide into NUM_STAGES={stages} times'
        f' CIRCULAR_REPEAT={repeat} equal stages. Set NUM_STAGES to one of {allowed}, or NUM_LAYERS'
        f' to a multiple of {stages * repeat}.'
    )
  shape = getattr(experiment, 'ICI_MESH_SHAPE', None)
  if shape is None or len(shape) != 4:
    raise errors.ConfigError(
        f'ICI_MESH_SHAPE must be [stage, replica, data, mdl]; got {shape}. Set'
        f' ICI_MESH_SHAPE = [{stages}, 1, 1, 1].'
    )
  dcn = getattr(experiment, 'DCN_MESH_SHAPE', None) or [1, 1, 1, 1]
  if shape[0] * dcn[0] != stages:
    raise errors.ConfigError(
        f'ICI_MESH_SHAPE[0] * DCN_MESH_SHAPE[0] = {shape[0]} * {dcn[0]} must be'
        f' NUM_STAGES={stages}. Set ICI_MESH_SHAPE = {[stages // (dcn[0] or 1), *shape[1:]]}.'
    )


def stages_of(experiment: Any) -> dict[str, int | None]:
  """What an experiment says about stages outside of its task: the arguments of `mpmd_task`.

  Nothing where it is one of Pax's pipelined ones, which build their pipeline from these fields.
  """
  if _is_pipelined(experiment):
    return {}
  names = ('NUM_STAGES', 'NUM_MICROBATCHES', 'MICROBATCH_SIZE')
  return {name.lower(): getattr(experiment, name, None) for name in names}


def _is_pipelined(experiment: Any) -> bool:
  cls = experiment if isinstance(experiment, type) else type(experiment)
  return issubclass(cls, model_params.TransformerLmSpmdPipelineAdafactor)


def _cls(config: Any) -> type:
  return pax_fiddle.get_callable(config)


def _mesh(model: Any) -> dict[str, int]:
  ici = model.ici_mesh_shape
  if ici is None:
    return {}
  dcn = model.dcn_mesh_shape or [1] * len(ici)
  return {axis: i * d for axis, i, d in zip(model.mesh_axis_names, ici, dcn)}


def _stage_axis(pipe: Any) -> str | None:
  stages = pipe.weight_split_dims_mapping.stages
  return stages[0] if stages else None
