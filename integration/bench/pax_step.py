"""One side of a comparison: a Pax language model, by stock Pax or through MPMD.

`python -m integration.bench.pax_step SIDE JSON`, started by `integration.bench.alternating`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from integration.bench import alternating

__all__ = ['Model', 'build', 'side']


@dataclasses.dataclass(frozen=True)
class Model:
  """The model and how it is cut. The batch is the same for all sides, and so is remat."""

  layers: int = 8
  width: int = 256
  length: int = 128
  vocab: int = 4096
  batch: int = 16
  stages: int = 4
  circular_repeat: int = 1
  microbatches: int = 8
  schedule: str | None = None
  actors: int | None = None
  trace_dir: str | None = None


def side(name: str, model: Model) -> alternating.Side:
  """The command and environment of a side.

  Args:
    name: 'spmd' (Pax's pipelining), 'data' (stock Pax without a pipeline, 2-way data parallel) or
      'mpmd'.
    model: the model.
  """
  devices = 2 if name == 'data' else model.stages
  return alternating.side('integration.bench.pax_step', name, model, devices)


def build(name: str, model: Model, runtime: Any | None = None):
  """What `alternating.serve` needs.

  Args:
    name: of the side.
    model: the model.
    runtime: where it runs if it is distributed; None: what the side's name says.
  """
  import jax
  from jax import numpy as jnp
  import numpy as np
  from paxml import partitioning
  from paxml import trainer_lib
  from paxml.tasks.lm.params import lm_cloud
  from praxis import base_hyperparams
  from praxis import py_utils

  import pax_mpmd
  from pax_mpmd import schedules
  from pax_mpmd.pax import backend as backend_lib
  from pax_mpmd.pax import partitioner as partitioner_lib
  from pax_mpmd.pax import transform

  class Sizes:
    NUM_LAYERS = model.layers
    MODEL_DIMS = model.width
    HIDDEN_DIMS = model.width * 4
    NUM_HEADS = 4
    DIMS_PER_HEAD = model.width // 4
    VOCAB_SIZE = model.vocab
    MAX_SEQ_LEN = model.length
    FPROP_DTYPE = jnp.float32

  class Pipelined(Sizes, lm_cloud.LmCloudSpmdPipeline):
    NUM_STAGES = model.stages
    CIRCULAR_REPEAT = model.circular_repeat
    NUM_MICROBATCHES = model.microbatches
    MICROBATCH_SIZE = None
    ICI_MESH_SHAPE = [model.stages, 1, 1, 1]

  class Flat(Sizes, lm_cloud.LmCloudSpmd):
    ICI_MESH_SHAPE = [1, 2, 1]

  experiment = Flat() if name == 'data' else Pipelined()

  def batch(seed: int):
    rng = np.random.RandomState(seed)
    shape = (model.batch, model.length)
    ids, labels = rng.randint(1, model.vocab, size=(2, *shape)).astype(np.int32)
    return py_utils.NestedMap(
        ids=ids,
        labels=labels,
        paddings=np.zeros(shape, np.float32),
        weights=np.ones(shape, np.float32),
        segment_ids=np.ones(shape, np.int32),
        segment_pos=np.tile(np.arange(model.length, dtype=np.int32), (model.batch, 1)),
    )

  batches = [batch(i) for i in range(8)]
  specs = jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches[0])
  task_p = experiment.task()
  task_p.train.variable_norm_summary = False
  close = lambda: None
  if name == 'mpmd':
    task_p, pipeline = transform.mpmd_task(task_p)
    task = base_hyperparams.instantiate(task_p)
    stages = model.stages * model.circular_repeat
    default = 'interleaved_1f1b' if model.circular_repeat > 1 else '1f1b'
    schedule = schedules.get(model.schedule or default, stages, model.actors or model.stages)
    backend = backend_lib.Backend(
        schedule,
        runtime or pax_mpmd.RayRuntime(),
        trace_steps=5 if model.trace_dir else 0,
        trace_dir=model.trace_dir or '',
    )
    close = backend.close
    partitioner = partitioner_lib.MpmdPartitioner(task, pipeline, backend)
  else:
    task = base_hyperparams.instantiate(task_p)
    shape = experiment.ICI_MESH_SHAPE
    mesh = np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    partitioner = partitioning.PjitPartitioner(False, True, task, device_mesh=mesh)
  key = jax.random.PRNGKey(1234)
  partitioner.setup(task, key, train_inputs_shape_dtype=specs)
  with partitioner.global_mesh:
    key, state, _ = partitioner.initialize_prng_key_and_train_state(key, None, None)
  fn, _ = partitioner.partition(trainer_lib.train_step_single_learner, specs, False)
  static = trainer_lib.BaseStepFnStaticArgs(unpadded_global_batch_size=model.batch)
  box = {'state': state, 'count': 0}
  key = np.asarray(key)

  def step():
    inputs = batches[box['count'] % len(batches)]
    box['count'] += 1
    box['state'], out = fn(box['state'], key, inputs, static)
    return lambda: np.asarray(out.loss)

  return step, close


if __name__ == '__main__':
  alternating.serve(lambda: build(sys.argv[1], Model(**json.loads(sys.argv[2]))))
