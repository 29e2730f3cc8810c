"""The initial train state, which nobody makes as a whole."""

from __future__ import annotations

from typing import Any

from absl import logging
import jax
from jax import numpy as jnp
from paxml import train_states
from paxml import trainer_lib
from praxis import py_utils

import pax_mpmd
from pax_mpmd import errors
from pax_mpmd.pax import stored

__all__ = ['initial_state']


def initial_state(
    task: Any,
    metadata: trainer_lib.TrainStateMetadata,
    prng_key: jax.Array,
    mesh: jax.sharding.Mesh,
    checkpoint_type: Any,
    discard_opt_states: bool | None = False,
) -> tuple[train_states.TrainState, Any]:
  """What Pax's `initialize_partitioned_model_states` gives, as `DeferredArray`s.

  Args:
    task: the task.
    metadata: its train state's, of the partitioner.
    prng_key: the key that Pax initialises with.
    mesh: the mesh of the whole pipeline, as Pax has it.
    checkpoint_type: of checkpoints that the state starts from (init_from_checkpoint_rules).
    discard_opt_states: leave the optimizer's states out.

  Returns:
    The state, and where it comes from.
  """
  specs = metadata.partition_specs
  shapes = jax.tree_util.tree_map(
      jnp.shape,
      task.create_train_state_unpadded_shapes(metadata.var_weight_hparams, discard_opt_states),
  )
  model_p = task.model.hparams

  def init(key):
    state, _ = trainer_lib.initialize_model_state(
        task,
        key,
        metadata.input_shape_dtype,
        discard_opt_states,
        do_init_checkpoint_rules=False,
        var_weight_hparams=metadata.var_weight_hparams,
    )
    return py_utils.maybe_pad_uneven_sharding(
        state, specs, shapes, model_p.mesh_shape, model_p.mesh_axis_names
    )

  try:
    with mesh:
      state = pax_mpmd.deferred(init, prng_key)
  except errors.PartitionError as error:
    logging.warning('[pax_mpmd] The state is initialised on the driver as a whole: %s', error)
    with mesh:
      state = jax.jit(init)(prng_key)
  provenance = train_states.build_train_state_provenance(state)
  if task.hparams.train.init_from_checkpoint_rules:
    with stored.lazily():
      state, provenance, _ = task.apply_init_checkpoint_rules(
          state,
          provenance,
          train_state_partition_specs=specs,
          global_mesh=mesh,
          checkpoint_type=checkpoint_type,
      )
  return state, provenance
