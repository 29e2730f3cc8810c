"""Makes a pipelined Pax task an MPMD one: swaps the pipeline layer and checks the configuration."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from praxis import pax_fiddle
from praxis.layers import transformers

from pax_mpmd import errors
from pax_mpmd.pax import layer
from pax_mpmd.pax import microbatches

__all__ = ['PipelineConfig', 'find_pipeline', 'mpmd_task', 'num_devices']

STAGE_AXIS = 'stage'


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """What MPMD execution must know of a pipelined task.

  Attributes:
    num_ranks: pipeline ranks of the configuration (Pax's num_stages).
    circular_repeat: stages per rank.
    microbatching: how a batch is split.
    num_devices: devices of the whole configured mesh.
  """

  num_ranks: int
  circular_repeat: int
  microbatching: microbatches.Microbatching
  num_devices: int

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
  """The pipeline layer's config in a task's config.

  Args:
    task: config of a `tasks_lib.SingleTask`.

  Raises:
    ConfigError: if the model isn't a language model over a `PipelinedTransformer`.
  """
  lm_tpl = getattr(task.model, 'lm_tpl', None)
  stack = getattr(lm_tpl, 'stacked_transformer_tpl', None)
  if stack is None or not issubclass(_cls(stack), transformers.PipelinedTransformer):
    found = 'none' if stack is None else _cls(stack).__name__
    raise errors.ConfigError(
        'The task has no pipeline to run: MPMD needs task.model.lm_tpl.stacked_transformer_tpl to'
        f' be a PipelinedTransformer, got {found}. Derive the experiment from'
        ' paxml.tasks.lm.model_params.TransformerLmSpmdPipelineAdafactor (or LmCloudSpmdPipeline)'
        ' and set NUM_STAGES, NUM_MICROBATCHES or MICROBATCH_SIZE, and'
        ' ICI_MESH_SHAPE = [NUM_STAGES, 1, 1, 1].'
    )
  return stack


def mpmd_task(task: Any) -> tuple[Any, PipelineConfig]:
  """Replaces the pipeline layer of a task by the MPMD one, in place.

  To be called on the finished config: Pax compares the class of the pipeline layer with `==` while
  it builds the config.

  Args:
    task: config of a `tasks_lib.SingleTask` whose language model has a `PipelinedTransformer`.

  Returns:
    The task and what was found in it.

  Raises:
    ConfigError: if MPMD execution doesn't support the task; names the field.
  """
  old = find_pipeline(task)
  config = check(task, old)
  if issubclass(_cls(old), layer.MpmdPipelinedTransformer):
    return task, config
  if _cls(old) is not transformers.PipelinedTransformer:
    raise errors.ConfigError(
        f'The pipeline layer is a {_cls(old).__name__}, a subclass of PipelinedTransformer that'
        ' pax_mpmd does not know. Derive it from pax_mpmd.pax.MpmdPipelinedTransformer instead.'
    )
  new = pax_fiddle.Config(layer.MpmdPipelinedTransformer)
  for name in old.__arguments__:
    setattr(new, name, getattr(old, name))
  task.model.lm_tpl.stacked_transformer_tpl = new
  return task, config


def check(task: Any, pipe: Any) -> PipelineConfig:
  """Checks a pipelined task; see `mpmd_task`."""
  microbatching = microbatches.Microbatching(
      pipe.num_pipeline_microbatches, pipe.pipeline_microbatch_size
  )
  if pipe.stream_io:
    raise errors.ConfigError(
        'STREAM_IO = True (stream_io of the pipeline layer) is a way to hide transfers of SPMD'
        ' pipelining and changes how the batch is split; it has no use with MPMD. Set'
        ' STREAM_IO = False.'
    )
  ranks = pipe.num_pipeline_stages
  if not ranks:
    raise errors.ConfigError(
        f'NUM_STAGES (num_pipeline_stages) must be at least 1; got {ranks}.'
    )
  mesh = _mesh(task.model)
  stage_axis = _stage_axis(pipe)
  for axis, size in mesh.items():
    if axis != stage_axis and size != 1:
      raise errors.ConfigError(
          f'ICI_MESH_SHAPE x DCN_MESH_SHAPE gives the mesh axis {axis!r} {size} devices; several'
          ' devices for one pipeline rank are not supported yet. Set'
          f' ICI_MESH_SHAPE = [{ranks}, 1, 1, 1] and leave DCN_MESH_SHAPE at 1 in this axis.'
      )
  if mesh and mesh.get(stage_axis, 1) != ranks:
    raise errors.ConfigError(
        f'The mesh axis {stage_axis!r} has {mesh.get(stage_axis, 1)} devices but NUM_STAGES is'
        f' {ranks}. Set ICI_MESH_SHAPE = [{ranks}, 1, 1, 1].'
    )
  return PipelineConfig(
      num_ranks=ranks,
      circular_repeat=pipe.circular_repeat,
      microbatching=microbatching,
      num_devices=num_devices(task.model.ici_mesh_shape, task.model.dcn_mesh_shape),
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
  if not hasattr(experiment, 'NUM_STAGES'):
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
        f' NUM_STAGES={stages}. Set ICI_MESH_SHAPE = [{stages}, 1, 1, 1].'
    )


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
