"""A tiny pipelined language model, its data, and Pax's own SPMD pipelining of it as the oracle."""

from __future__ import annotations

from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
from paxml import partitioning
from paxml import trainer_lib
from paxml.tasks.lm.params import lm_cloud
from praxis import base_hyperparams
from praxis import py_utils

from pax_mpmd.pax import backend as backend_lib
from pax_mpmd.pax import partitioner as partitioner_lib
from pax_mpmd.pax import transform

BATCH, LENGTH, VOCAB = 16, 16, 64


class TinyLm(lm_cloud.LmCloudSpmdPipeline):
  """4 stages of a layer each, 8 microbatches, Adam, active clipping, tied embedding, float32."""

  NUM_LAYERS = 4
  NUM_STAGES = 4
  NUM_MICROBATCHES = 8
  MODEL_DIMS = 32
  HIDDEN_DIMS = 64
  NUM_HEADS = 2
  DIMS_PER_HEAD = 16
  VOCAB_SIZE = VOCAB
  FPROP_DTYPE = jnp.float32
  ICI_MESH_SHAPE = [4, 1, 1, 1]
  MAX_SEQ_LEN = LENGTH
  CLIP = 0.5

  def task(self):
    task_p = super().task()
    task_p.train.learner.optimizer.clip_gradient_norm_to_value = self.CLIP
    task_p.train.learner.optimizer.learning_rate = 0.01
    # Warmed up at once: weights that don't move would hide a wrong update.
    schedule = task_p.train.learner.optimizer.lr_schedule
    schedule.warmup_steps, schedule.decay_start, schedule.decay_end = 1, 2, 100
    return task_p


class TinyCircular(TinyLm):
  """2 ranks that own 2 stages each."""

  NUM_LAYERS = 4
  NUM_MICROBATCHES = 4

  NUM_STAGES = 2
  CIRCULAR_REPEAT = 2
  ICI_MESH_SHAPE = [2, 1, 1, 1]


class TinyMoe(TinyLm):
  """Every second layer is a mixture of experts, which adds auxiliary losses in the pipeline."""

  NUM_LAYERS = 4
  NUM_STAGES = 2
  NUM_MICROBATCHES = 4
  ICI_MESH_SHAPE = [2, 1, 1, 1]

  def task(self):
    task_p = super().task()
    stage = task_p.model.lm_tpl.stacked_transformer_tpl.pipeline_stage
    stage.num_experts = 2
    stage.num_groups = 1
    stage.moe_layers = [1]
    return task_p


class TinyRepeated(TinyLm):
  """Two layers a stage, as a `scan` over stacked weights.

  Pax's own pipeline can not take apart the summaries of repeated layers; without them it runs.
  """

  NUM_LAYERS = 4
  NUM_STAGES = 2
  NUM_MICROBATCHES = 4
  ICI_MESH_SHAPE = [2, 1, 1, 1]
  USE_REPEATED_LAYER = True
  SUMMARIES = False

  def task(self):
    task_p = super().task()
    if not self.SUMMARIES:
      task_p.summary_verbosity = 0
    return task_p


class TinyDropout(TinyLm):
  """With dropout, in two stages."""

  NUM_LAYERS = 2
  NUM_STAGES = 2
  NUM_MICROBATCHES = 2
  ICI_MESH_SHAPE = [2, 1, 1, 1]
  DROPOUT_PROB = 0.5


def batch(seed: int, rows: int = BATCH) -> py_utils.NestedMap:
  """Packed rows with two segments each, ragged ends, and weights that differ between rows.

  Row 3 has no weight at all; with 8 microbatches of 2 rows, rows 3 and 11 are microbatch 3.
  """
  rng = np.random.RandomState(seed)
  ids, labels = rng.randint(1, VOCAB, size=(2, rows, LENGTH)).astype(np.int32)
  cut = rng.randint(2, LENGTH - 2, size=(rows, 1))
  end = rng.randint(LENGTH // 4, LENGTH + 1, size=(rows, 1))
  column = np.arange(LENGTH)[None]
  padded = column >= end
  weights = (~padded & (rng.rand(rows, LENGTH) > 0.2)).astype(np.float32)
  weights[[3, 11 % rows]] = 0.0
  segment_pos = np.where(column < cut, column, column - cut)
  return py_utils.NestedMap(
      ids=ids,
      labels=labels,
      paddings=padded.astype(np.float32),
      weights=weights,
      segment_ids=np.where(padded, 0, 1 + (column >= cut)).astype(np.int32),
      segment_pos=np.where(padded, 0, segment_pos).astype(np.int32),
  )


def specs(inputs: Any = None) -> Any:
  """Shapes and dtypes of a batch."""
  inputs = batch(0) if inputs is None else inputs
  return jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)


class Run:
  """A task with its partitioner, initial state and step functions."""

  def __init__(
      self,
      experiment: type,
      mpmd: bool,
      seed: int = 1234,
      schedule: Any = None,
      actors: int | None = None,
      initial: Any = None,
      inputs: Any = None,
  ):
    """Constructor.

    Args:
      experiment: the experiment.
      mpmd: whether through MPMD; else by Pax itself.
      seed: of the initial values.
      schedule: runs the MPMD steps by `mpmd_jit` on local actors with this schedule; None: under
        plain `jax.jit`.
      actors: number of actors; None: one for each pipeline rank.
      initial: the initial state; None: made from the seed.
      inputs: a batch such as the steps will get; None: one of `batch`.
    """
    self._specs = specs(inputs)
    task_p = experiment().task()
    if mpmd:
      task_p, pipeline = transform.mpmd_task(task_p, **transform.stages_of(experiment))
    self.task = base_hyperparams.instantiate(task_p)
    if mpmd:
      backend = PlainBackend()
      if schedule is not None:
        backend = backend_lib.Backend(
            backend_lib.make_schedule(schedule, pipeline, actors), 'local'
        )
      self.partitioner = partitioner_lib.MpmdPartitioner(self.task, pipeline, backend)
    else:
      model = task_p.model
      dcn = model.dcn_mesh_shape or [1] * len(model.ici_mesh_shape)
      mesh = np.asarray(jax.devices()[: pipeline_devices(task_p)]).reshape(
          [i * d for i, d in zip(model.ici_mesh_shape, dcn)]
      )
      self.partitioner = partitioning.PjitPartitioner(False, True, self.task, device_mesh=mesh)
    self._steps: dict[bool, Any] = {}
    key = jax.random.PRNGKey(seed)
    self.partitioner.setup(self.task, key, train_inputs_shape_dtype=self._specs)
    if initial is not None:
      self.initial = initial
      return
    with self.partitioner.global_mesh:
      _, self.initial, _ = self.partitioner.initialize_prng_key_and_train_state(key, None, None)
    self.initial = jax.tree_util.tree_map(np.asarray, self.initial)

  def step(self, state: Any, inputs: Any, is_eval: bool = False) -> tuple[Any, Any]:
    """Runs Pax's train or eval step; everything comes back as numpy arrays."""
    if is_eval not in self._steps:
      fn = (
          trainer_lib.eval_step_single_learner
          if is_eval
          else trainer_lib.train_step_single_learner
      )
      self._steps[is_eval] = self.partitioner.partition(fn, self._specs, is_eval)[0]
    if not isinstance(self.partitioner, partitioner_lib.MpmdPartitioner):
      # Where a stage has several devices, Pax's step takes its state in its own shardings only.
      specs_of_state = self.partitioner.get_train_state_metadata().partition_specs
      mesh = self.partitioner.global_mesh
      is_masked = py_utils.is_optax_masked_node
      state = jax.tree_util.tree_map(
          lambda x, spec: (
              x if is_masked(x) else jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
          ),
          state,
          specs_of_state,
          is_leaf=is_masked,
      )
    if is_eval:
      state = state.to_eval_state()
    static = trainer_lib.BaseStepFnStaticArgs(unpadded_global_batch_size=None)
    out = self._steps[is_eval](state, jax.random.PRNGKey(7), inputs, static)
    return jax.tree_util.tree_map(np.asarray, out)

  def close(self) -> None:
    """Stops local actors."""
    if isinstance(self.partitioner, partitioner_lib.MpmdPartitioner):
      self.partitioner.close()


def pipeline_devices(task_p: Any) -> int:
  """Devices of the task's mesh."""
  return transform.num_devices(task_p.model.ici_mesh_shape, task_p.model.dcn_mesh_shape)


class PlainBackend:
  """Runs steps under plain `jax.jit`, on the driver."""

  def build_step(self, fn, donate_argnums=(), mesh=None, in_shardings=None):
    del donate_argnums  # the tests look at states again
    del mesh, in_shardings  # of devices that plain jit would take from the arguments
    return jax.jit(fn)

  def place(self, step, state, *args):
    del step, args
    return jax.tree_util.tree_map(np.asarray, state)

  def check(self, num_microbatches):
    assert num_microbatches > 0

  def fetch(self, tree):
    return jax.device_get(tree)

  def close(self):
    pass
