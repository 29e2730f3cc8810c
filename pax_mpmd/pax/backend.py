"""The one distributed backend of an experiment: its schedule, its runtime and the steps on it."""

from __future__ import annotations

import atexit
from collections.abc import Callable
import copy
import os
from typing import Any
import weakref

import fiddle as fdl
import jax
import numpy as np

import pax_mpmd
from pax_mpmd import errors
from pax_mpmd import schedules
from pax_mpmd.pax import status as status_lib
from pax_mpmd.pax import stored
from pax_mpmd.pax import stored_tree
from pax_mpmd.pax import transform

__all__ = ['Backend', 'close_all', 'make_runtime', 'make_schedule']

# Those whose actors may be running.
_open: weakref.WeakSet = weakref.WeakSet()


def close_all() -> None:
  """Stops the actors of all backends that have some, and says so."""
  backends = list(_open)
  if backends:
    status_lib.status.say('stopping the actors')
  for backend in backends:
    backend.close()


def make_schedule(
    spec: Any, pipeline: transform.PipelineConfig, num_actors: int | None = None
) -> schedules.Schedule:
  """Builds the schedule of an experiment.

  Args:
    spec: None for the default (1F1B, interleaved where actors own several stages), a short name,
      the path of a .csv table, a `Schedule`, or a Fiddle config of one, whose `num_stages` and
      `num_actors` may be left out.
    pipeline: numbers of the experiment's pipeline.
    num_actors: number of actors; None means one for each pipeline rank.

  Raises:
    ConfigError, ScheduleError: if there is no such schedule, or it doesn't fit the pipeline.
  """
  stages = pipeline.num_stages
  actors = num_actors or pipeline.num_ranks
  if spec is None:
    several = stages > actors and stages % actors == 0
    spec = 'interleaved_1f1b' if several else '1f1b'
  if isinstance(spec, fdl.Buildable):
    spec = copy.copy(spec)  # the experiment's own stays as it is
    for name, value in (('num_stages', stages), ('num_actors', actors)):
      if name in spec.__signature_info__.parameters and getattr(spec, name, None) is None:
        setattr(spec, name, value)
    spec = fdl.build(spec)
  if not isinstance(spec, schedules.Schedule):
    spec = schedules.get(spec, stages, actors)
  if spec.num_stages != stages:
    raise errors.ConfigError(
        f'The schedule {type(spec).__name__} is for {spec.num_stages} stages, but the experiment'
        f' has {stages} (NUM_STAGES={pipeline.num_ranks} times'
        f' CIRCULAR_REPEAT={pipeline.circular_repeat}). Give SCHEDULE num_stages={stages}, or leave'
        ' num_stages out of its Fiddle config.'
    )
  return spec


def make_runtime(spec: Any) -> Any:
  """Builds the runtime: None or 'ray', 'local', a runtime, or a Fiddle config of one."""
  if isinstance(spec, fdl.Buildable):
    return fdl.build(spec)
  if spec is None or spec == 'ray':
    return pax_mpmd.RayRuntime()
  if spec == 'local':
    return pax_mpmd.LocalRuntime()
  if isinstance(spec, str):
    raise errors.ConfigError(
        f"There is no runtime named {spec!r}. RUNTIME (--mpmd_runtime) is 'ray', 'local', a runtime"
        ' object or a Fiddle config of one.'
    )
  return spec


def _shapes(tree: Any) -> Any:
  return jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


class _SendingStateOnce:
  """A step of an unchanged first argument, which moves to the actors with the first call."""

  def __init__(self, step: Any):
    self._step = step
    self._sent: list[Any] = []
    self._held: Any = None

  def __call__(self, state: Any, *args: Any) -> Any:
    leaves = jax.tree_util.tree_leaves(state)
    # Arrays that can't be written to; others may have changed since.
    if not all(isinstance(x, (jax.Array, pax_mpmd.DeferredArray)) for x in leaves):
      return self._step(state, *args)
    if len(leaves) != len(self._sent) or any(a is not b for a, b in zip(leaves, self._sent)):
      self._sent, self._held = [], None  # first, so that the actors don't hold two states
      self._held = self._step.place(state, *_shapes(args))[0]
      self._sent = leaves
    return self._step(self._held, *args)

  def plan(self, *args: Any) -> Any:
    """As of `mpmd_jit`'s functions."""
    return self._step.plan(*args)


class Backend:
  """Builds distributed steps; all steps of an experiment share its actors.

  Attributes:
    schedule: the schedule of all steps.
  """

  def __init__(
      self,
      schedule: schedules.Schedule,
      runtime: Any,
      status: status_lib.Status | None = None,
      trace_steps: int = 0,
      trace_dir: str | os.PathLike = 'mpmd_trace',
  ):
    """Constructor.

    Args:
      schedule: see `make_schedule`.
      runtime: see `make_runtime`; nothing is started before the first step.
      status: where to say what is being done.
      trace_steps: how many steps of each kind to show in traces.
      trace_dir: where traces are written.
    """
    self.schedule = schedule
    self._trace_steps = trace_steps
    self._trace_dir = trace_dir
    self._status = status or status_lib.status
    self._spec = runtime
    self._runtime: Any = None

  def check(self, num_microbatches: int) -> None:
    """Raises ScheduleError if the schedule can't run that many microbatches."""
    schedules.validate(self.schedule, num_microbatches)

  def build_step(
      self,
      fn: Callable[..., Any],
      donate_argnums: tuple[int, ...] = (),
      mesh: Any | None = None,
      in_shardings: Any = None,
  ) -> Callable[..., Any]:
    """`mpmd_jit` of a step function with this backend's schedule and runtime.

    A state (the first argument) that is on the host and isn't donated, as in evaluation jobs, is
    sent to the actors once and stays there as long as it is the same.
    """
    if self._runtime is None:
      self._status.capture_logger('pax_mpmd')
      self._runtime = make_runtime(self._spec)
      atexit.register(self.close)  # for ways out that don't go through the executor
      _open.add(self)
    step = pax_mpmd.mpmd_jit(
        fn,
        schedule=self.schedule,
        runtime=self._runtime,
        donate_argnums=donate_argnums,
        mesh=mesh,
        in_shardings=in_shardings,
        on_progress=self._on_progress,
        trace_steps=self._trace_steps,
        trace_dir=self._trace_dir,
    )
    return step if donate_argnums else _SendingStateOnce(step)

  def place(self, step: Any, state: Any, *args: Any) -> Any:
    """A state on the actors that a step needs it on.

    Args:
      step: a step of `build_step`.
      state: its first argument.
      *args: the others, which stay where they are: arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      CheckpointError: an array of a checkpoint can't be read.
    """
    what, folder = 'initialising the model', None
    for leaf in jax.tree_util.tree_leaves(state):
      if isinstance(leaf, stored.StoredArray):
        what, folder = 'restoring the checkpoint', leaf.folder
    try:
      state = step.place(state, *_shapes(args))[0]
      leaves = jax.tree_util.tree_leaves(state)
      for i, leaf in enumerate(leaves):
        self._on_progress(what, i, len(leaves))
        if isinstance(leaf, pax_mpmd.MpmdArray):
          leaf.block_until_ready()
    except errors.CheckpointError as error:
      if folder is None:
        raise
      raise stored_tree.explained(folder, error) from error
    self._on_progress(what, len(leaves), len(leaves))
    return state

  def _on_progress(self, what: str, done: int, total: int) -> None:
    text = what if total <= 1 else f'{what}: {done} of {total}'
    self._status.passing(text, last=done == total)

  def fetch(self, tree: Any) -> Any:
    """The arrays of a tree as host arrays."""
    return pax_mpmd.device_get(tree)

  def close(self) -> None:
    """Stops the actors."""
    if self._runtime is not None:
      self._runtime.close()
      atexit.unregister(self.close)
      _open.discard(self)
