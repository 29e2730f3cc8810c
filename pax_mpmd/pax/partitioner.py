"""The partitioner: turns Pax's step functions into steps that `mpmd_jit` runs."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from absl import logging
import jax
import numpy as np
from paxml import partitioning
from paxml import trainer_lib

import pax_mpmd
from pax_mpmd import errors
from pax_mpmd.pax import initial
from pax_mpmd.pax import lazy
from pax_mpmd.pax import train_step as train_step_lib
from pax_mpmd.pax import transform
from pax_mpmd.pax import unpipelined

__all__ = ['MpmdPartitioner']

class MpmdPartitioner(partitioning.PjitPartitioner):
  """Partitions Pax's train and eval steps over actors.

  Everything but the steps is Pax's `PjitPartitioner` on the driver's own devices. The state is
  initialised as with Pax's SPMD pipelining, but nobody makes all of it: it consists of
  `DeferredArray`s until the first step, or the first save, has each actor make or read its part.
  From then on it is made of `MpmdArray`s.
  """

  def __init__(
      self,
      task: Any,
      pipeline: transform.PipelineConfig,
      backend: Any,
      *,
      init_is_eval: bool = False,
  ):
    """Constructor.

    Args:
      task: the task (instance or config), for its mesh.
      pipeline: what `transform.mpmd_task` found in it.
      backend: a `backend.Backend`, or what has its methods: `build_step(fn, donate_argnums, mesh,
        in_shardings)`, `place(step, state, *args)`, `check(num_microbatches)`, `fetch(tree)` and
        `close()`.
      init_is_eval: as in Pax.

    Raises:
      ConfigError: this process has fewer devices than one stage, so its programs can't be lowered.
    """
    devices, needed = jax.local_devices(), pipeline.num_devices
    if len(devices) == needed:
      device_mesh = None  # Pax's own
    elif len(devices) > needed:
      model = task.model
      dcn = model.dcn_mesh_shape or [1] * len(model.ici_mesh_shape)
      device_mesh = np.asarray(devices[:needed]).reshape(
          [i * d for i, d in zip(model.ici_mesh_shape, dcn)]
      )
    else:
      device_mesh = np.asarray(devices[:1]).reshape([1] * len(task.model.mesh_axis_names))
    super().__init__(init_is_eval, reshard_inputs=False, task=task, device_mesh=device_mesh)
    self._pipeline = pipeline
    self._backend = backend
    self._train_step: Any = None
    self._deferred: list[Any] = []  # the leaves of `_placed` as they were
    self._placed: Any = None
    sizes = [size for _, size in pipeline.stage_mesh] or [1] * len(self._mesh_names)
    per_actor = pipeline.devices_per_actor
    if len(devices) < per_actor:
      raise errors.ConfigError(
          f'A stage has {per_actor} devices ({dict(pipeline.stage_mesh)}, of ICI_MESH_SHAPE x'
          f' DCN_MESH_SHAPE), and this process has {len(devices)} to lower its programs for. Run it'
          ' by python -m pax_mpmd.main --mpmd, which makes them, or set'
          f' XLA_FLAGS=--xla_force_host_platform_device_count={needed}.'
      )
    self._actor_mesh = jax.sharding.Mesh(
        np.asarray(devices[:per_actor]).reshape(sizes), self._mesh_names
    )

  @property
  def pipeline(self) -> transform.PipelineConfig:
    """The pipeline's numbers."""
    return self._pipeline

  @property
  def backend(self) -> Any:
    """What runs the steps."""
    return self._backend

  def setup(self, *args, **kwargs) -> None:
    """As in Pax; then checks that the batch splits and the schedule can run its microbatches.

    Raises:
      ConfigError, ScheduleError: they don't; nothing has been traced yet.
    """
    super().setup(*args, **kwargs)
    batch_size = jax.tree_util.tree_leaves(self.train_inputs_shape_dtype)[0].shape[0]
    self._backend.check(self._pipeline.microbatching.count(batch_size))
    if self._pipeline.own_yields:
      metadata = self.get_train_state_metadata()
      with self._actor_mesh:
        unpipelined.check_own_yields(
            self._jax_task,
            self._pipeline.num_stages,
            metadata.unpadded_global_shapes,
            jax.eval_shape(lambda: jax.random.PRNGKey(0)),
            self.train_inputs_shape_dtype,
            metadata.var_weight_hparams,
        )

  def initialize_prng_key_and_train_state(
      self,
      root_prng_key: Any,
      train_state: Any,
      checkpoint_type: Any,
      discard_opt_states: bool | None = False,
  ) -> tuple[Any, Any, Any]:
    """As in Pax, but the state that is made is one of `DeferredArray`s."""
    if train_state is not None:
      return super().initialize_prng_key_and_train_state(
          root_prng_key, train_state, checkpoint_type, discard_opt_states
      )
    metadata = self.get_train_state_metadata(discard_opt_states)
    root_prng_key, init_key = jax.random.split(root_prng_key)
    state, provenance = initial.initial_state(
        self._jax_task, metadata, init_key, self._global_mesh, checkpoint_type, discard_opt_states
    )
    return root_prng_key, state, provenance

  def place(self, state: Any) -> Any:
    """The train state on the actors; makes or reads it if that has not been done yet.

    Raises:
      CheckpointError: an array can't be read.
    """
    self._build_train_step(trainer_lib.train_step_single_learner)
    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    return self._place(state, key, self.train_inputs_shape_dtype)

  def _build_train_step(self, step_fn: Any) -> Any:
    if self._train_step is None:
      self._train_step = self.build_step(step_fn, is_eval=False)
    return self._train_step

  def _place(self, state: Any, prng_key: Any, inputs: Any) -> Any:
    leaves = jax.tree_util.tree_leaves(state)
    if not any(isinstance(x, pax_mpmd.DeferredArray) for x in leaves):
      return state
    if len(leaves) == len(self._deferred) and all(
        a is b for a, b in zip(leaves, self._deferred)
    ):
      return self._placed
    placed = self._backend.place(self._train_step, state, prng_key, inputs)
    self._deferred, self._placed = leaves, placed
    return placed

  def fetch(self, tree: Any) -> Any:
    """The arrays of a tree, wherever they are, as host arrays."""
    return self._backend.fetch(tree)

  def close(self) -> None:
    """Stops the actors. The steps can't be called afterwards."""
    self._backend.close()

  def traceable_step(self, step_fn: Any, is_eval: bool) -> Callable[..., Any]:
    """The function (state, prng_key, inputs) -> (state, StepFnOutput) that gets distributed.

    Raises:
      ConfigError: if `step_fn` isn't Pax's train or eval step.
    """
    metadata = self.get_train_state_metadata(discard_opt_states=is_eval)
    makers = {
        trainer_lib.train_step_single_learner: train_step_lib.make_train_step,
        trainer_lib.eval_step_single_learner: train_step_lib.make_eval_step,
    }
    if step_fn not in makers:
      raise errors.ConfigError(
          "MPMD pipelining runs Pax's train and eval steps;"
          f' {getattr(step_fn, "__name__", step_fn)} is neither. Decoding'
          ' (--decode_during_train) and custom train programs with step'
          ' functions of their own are not supported: run them without --mpmd.'
      )
    step = makers[step_fn](
        self._jax_task, self._pipeline.microbatching, metadata.var_weight_hparams
    )

    @functools.wraps(step)
    def traced(state, prng_key, inputs):
      # Constraints inside are then those of one actor's devices.
      with self._actor_mesh:
        # Pax pads variables that the mesh doesn't divide.
        state, output = step(self._unpad_states(metadata, state), prng_key, inputs)
        return state and self._pad_states(metadata, state), output

    traced.__name__ = 'eval_step' if is_eval else 'train_step'  # in traces and notes
    return traced

  def build_step(self, step_fn: Any, is_eval: bool) -> Callable[..., Any]:
    """`mpmd_jit` of `traceable_step`."""
    specs = self.get_train_state_metadata(discard_opt_states=is_eval).partition_specs
    several = self._actor_mesh.size > 1
    return self._backend.build_step(
        self.traceable_step(step_fn, is_eval),
        donate_argnums=() if is_eval else (0,),
        mesh=self._actor_mesh if several else None,
        in_shardings=(specs, None, None) if several else None,
    )

  def _lazy_output(self, output: trainer_lib.StepFnOutput) -> trainer_lib.StepFnOutput:
    """Groups what Pax reads together: the loss of every step, all else only now and then."""
    loss = lazy.lazy(output.loss, self.fetch)
    rest = output.replace(loss=None, per_example_out=None)
    rest = lazy.lazy(rest, self.fetch)
    return rest.replace(
        loss=loss, per_example_out=lazy.lazy(output.per_example_out, self.fetch)
    )

  def partition(
      self, step_fn: Any, inputs_shape_dtype: Any, is_eval: bool
  ) -> tuple[partitioning.PartitionedStepFn, Any]:
    """Distributes a step function; see Pax's `Partitioner.partition`."""
    logging.info('[pax_mpmd] Building the %s step.', 'eval' if is_eval else 'train')
    # The train step may have been built before, to place a state.
    step = self.build_step(step_fn, True) if is_eval else self._build_train_step(step_fn)
    specs = trainer_lib.get_input_partition_specs(self._mesh_names, inputs_shape_dtype)

    def partitioned(state, prng_key, inputs, static_args=None):
      size = static_args.unpadded_global_batch_size if static_args else None
      inputs = jax.tree_util.tree_map(lambda x: np.asarray(x)[:size], inputs)
      prng_key = np.asarray(prng_key)
      if not is_eval:
        state = self._place(state, prng_key, inputs)
        self._deferred, self._placed = [], None
      new_state, output = step(state, prng_key, inputs)
      if is_eval:
        # Pax reads the outputs of every eval step at once anyway.
        return new_state, self.fetch(output)
      return new_state, self._lazy_output(output)

    return partitioned, specs
