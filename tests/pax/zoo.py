"""Every pipelined experiment that Pax ships, shrunk until a laptop can run it.

A shrunk experiment is a subclass with smaller sizes: fewer stages and layers, smaller dimensions,
a short warm-up of the learning rate so that weights move at once, and float32 in place of bfloat16
so that results can be compared closely. Everything that the original says of the architecture, the
learner, the pipeline and the mesh's form (which of ICI and DCN has the stages) stays.
"""

from __future__ import annotations

import re
from typing import Any

import jax
from jax import numpy as jnp
from paxml.tasks.lm import model_params
from paxml.tasks.lm.params import c4
from paxml.tasks.lm.params import lm_cloud
from paxml.tasks.lm.params import nvidia

from pax_mpmd.pax import transform
from tests.pax import tiny

MODULES = (model_params, lm_cloud, c4, nvidia)
SHIPPED = tuple(
    cls
    for module in MODULES
    for cls in vars(module).values()
    if isinstance(cls, type)
    and cls.__module__ == module.__name__
    and issubclass(cls, model_params.TransformerLmSpmdPipelineAdafactor)
)

# Of 6 slices with one stage each.
_STAGES = {'NVIDIA175B': 3}
# What says how often to save and the like, but not what a step computes. The one with the misspelt
# name is read by nothing.
_NOT_OF_A_STEP = re.compile(
    'CHECKPOINT_(EVERY|MAX).*|(EVAL|SUMMARY)_INTERVAL.*|PROFILER.*|TARGET_LOG_PPLX|MICROBATCH_SIAZE'
)


def shrink(experiment: type) -> type:
  """A subclass of a shipped experiment with smaller sizes."""
  stages = _STAGES.get(experiment.__name__, 2)
  ici, dcn = (
      [min(shape[0], stages), 1, 1, 1]
      for shape in (experiment.ICI_MESH_SHAPE or [stages], experiment.DCN_MESH_SHAPE)
  )
  fields = dict(
      NUM_STAGES=stages,
      NUM_LAYERS=stages * experiment.CIRCULAR_REPEAT,
      ICI_MESH_SHAPE=ici,
      DCN_MESH_SHAPE=dcn,
      MICROBATCH_SIZE=None if experiment.NUM_MICROBATCHES else tiny.BATCH // (2 * stages),
      PERCORE_BATCH_SIZE=tiny.BATCH / jax.device_count(),
      MODEL_DIMS=16,
      HIDDEN_DIMS=32,
      NUM_HEADS=2,
      DIMS_PER_HEAD=8,
      VOCAB_SIZE=tiny.VOCAB,
      MAX_SEQ_LEN=tiny.LENGTH,
      TRAINABLE_PE_MAX_SEQ_LEN=2 * tiny.LENGTH,
      FPROP_DTYPE=jnp.float32,
      LEARNING_RATE=0.01,
      LR_COS_WARMUP=1,
      LR_COS_DECAY_START=2,
      LR_COS_DECAY_END=100,
      task=_short_warm_up,
  )
  bases = (experiment, lm_cloud.SyntheticDataset)  # the second for classes without a data set
  if issubclass(experiment, lm_cloud.SyntheticDataset):
    bases = (experiment,)
  return type(f'Small{experiment.__name__}', bases, fields)


def _short_warm_up(self: Any) -> Any:
  task_p = super(type(self), self).task()
  schedule = task_p.train.learner.optimizer.lr_schedule
  schedule.warmup_steps, schedule.decay_start, schedule.decay_end = 1, 2, 100
  return task_p


def essence(experiment: type) -> tuple[Any, ...]:
  """What decides what a step of an experiment computes: its settings and the code of its task."""
  settings = {
      name: getattr(experiment, name)
      for name in dir(experiment)
      if name.isupper() and not _NOT_OF_A_STEP.fullmatch(name)
  }
  code = [vars(cls)['task'] for cls in experiment.__mro__ if 'task' in vars(cls)]
  return settings, code


def groups() -> list[list[type]]:
  """The shipped experiments by the essence of what they shrink to; each group needs one run."""
  found: list[tuple[Any, list[type]]] = []
  for experiment in SHIPPED:
    this = essence(shrink(experiment))
    for other, members in found:
      if this == other:
        members.append(experiment)
        break
    else:
      found.append((this, [experiment]))
  return [members for _, members in found]


def devices_per_stage(experiment: type) -> int:
  """How many devices one stage of a shipped experiment has."""
  shape = experiment.ICI_MESH_SHAPE or [1]
  return transform.num_devices(shape[1:], experiment.DCN_MESH_SHAPE[1:])


# By the first experiment of each group.
SCHEDULES = {
    'TransformerLmSpmdPipelineAdafactor': '1f1b',
    'LmCloudSpmdPipeline': 'gpipe',
    'LmCloudSpmdPipeline175B': '1f1b',
    'LmCloudSpmdPipelineMultislice2B': 'eager_1f1b',
    'LmCloudSpmdPipelineMultislice2BCircular': 'interleaved_1f1b',
    'TransformerLmSpmdPipelineAdam': 'zb_h1',
    'C4SpmdPipelineAdam': '1f1b',
    'C4SpmdPipelineGpt3AdamOrgHP': 'gpipe',
    'C4SpmdPipelineGpt3AdamMLPerfHPBS2k512Replicas': 'eager_1f1b',
    'NVIDIA5B': 'bfs',
    'NVIDIA175B': 'zb_h1',
}
