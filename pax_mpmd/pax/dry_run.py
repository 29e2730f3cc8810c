"""`--mpmd_dry_run`: the train step traced, planned and verified, and what that looks like."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from paxml import trainer_lib
from praxis import base_hyperparams

from pax_mpmd import schedules
from pax_mpmd.pax import mixin
from pax_mpmd.pax import stacks
from pax_mpmd.pax import status as status_lib

__all__ = ['dry_run']


def dry_run(experiment: mixin.MpmdPipelineMixin) -> Any:
  """Plans an experiment's train step without starting anything; prints grid and sizes.

  Args:
    experiment: an experiment with the mixin.

  Returns:
    The planned step.
  """
  say = status_lib.status.say
  task = base_hyperparams.instantiate(experiment.task())
  partitioner = experiment.partitioner()
  specs_p = experiment.get_input_specs_provider_params()
  if hasattr(specs_p, 'input_p'):
    specs_p.input_p = partitioner.preprocess_input_config(specs_p.input_p)
  specs = trainer_lib.get_train_input_specs_for_model_init(
      task, base_hyperparams.instantiate(specs_p)
  )
  key = jax.random.PRNGKey(task.train.random_seed)
  partitioner.setup(task, key, train_inputs_shape_dtype=specs)
  metadata = partitioner.get_train_state_metadata()
  step = partitioner.build_step(trainer_lib.train_step_single_learner, is_eval=False)
  say('tracing and planning the train step')
  planned = step.plan(
      metadata.padded_global_shapes, jax.ShapeDtypeStruct(key.shape, key.dtype), specs
  )
  schedule = partitioner.backend.schedule
  batch_size = jax.tree_util.tree_leaves(specs)[0].shape[0]
  num_microbatches = partitioner.pipeline.microbatching.count(batch_size)
  layers = stacks.describe(experiment.task())
  if layers is not None:
    say(layers)
  print(schedules.format_grid(schedule, num_microbatches))
  simulation = schedules.simulate(schedule, num_microbatches)
  say(f'{num_microbatches} microbatches; bubble {simulation.bubble_fraction:.0%} at unit costs')
  num_devices = partitioner.pipeline.devices_per_actor
  per_device = f' on each of {num_devices} devices' if num_devices > 1 else ''
  for plan in planned.plan.actors:
    kinds: dict[str, int] = {}
    for instruction in plan.instructions:
      name = type(instruction).__name__
      kinds[name] = kinds.get(name, 0) + 1
    inputs = [plan.slots[slot] for slot in plan.inputs]
    held = sum(x.nbytes / (x.sharding.num_parts if x.sharding else 1) for x in inputs)
    counts = ', '.join(f'{n} {kind}' for kind, n in sorted(kinds.items()))
    say(f'actor {plan.actor}: {counts}; {held / 2**20:.1f} MiB of inputs{per_device}')
  size = sum(len(e.module) for e in planned.plan.executables.values())
  say(f'{len(planned.plan.executables)} programs, {size / 2**20:.1f} MiB; the plan is verified')
  for note in planned.notes:
    say(f'note: {note}')
  total = sum(np.prod(x.shape) for x in jax.tree_util.tree_leaves(
      metadata.unpadded_global_shapes.mdl_vars))
  say(f'{int(total):,} parameters; nothing was started')
  return planned
