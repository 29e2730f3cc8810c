"""The one distributed backend of an experiment: its schedule, its runtime and the steps on it."""

from __future__ import annotations

import atexit
from collections.abc import Callable
import copy
import functools
from typing import Any
import weakref

import fiddle as fdl
import jax

import pax_mpmd
from pax_mpmd import errors
from pax_mpmd import schedules
from pax_mpmd.pax import status as status_lib
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


class _SendingStateOnce:
  """A step of an unchanged first argument, which moves to the actors with the first call."""

  def __init__(self, fn: Callable[..., Any], jit: Callable[..., Any]):

    @functools.wraps(fn)
    def with_state(state, *args):
      return state, fn(state, *args)

    self._step = jit(fn)
    self._step_with_state = jit(with_state)
    self._sent: list[Any] = []
    self._held: Any = None

  def __call__(self, state: Any, *args: Any) -> Any:
    leaves = jax.tree_util.tree_leaves(state)
    if not all(isinstance(x, jax.Array) for x in leaves):  # on the actors, or it may be written to
      return self._step(state, *args)
    if len(leaves) == len(self._sent) and all(a is b for a, b in zip(leaves, self._sent)):
      state = self._held
    # Before the call, so that the actors don't hold two states.
    self._sent, self._held = [], None
    self._held, result = self._step_with_state(state, *args)
    self._sent = leaves
    return result

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
  ):
    """Constructor.

    Args:
      schedule: see `make_schedule`.
      runtime: see `make_runtime`; nothing is started before the first step.
      status: where to say what is being done.
    """
    self.schedule = schedule
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
    jit = functools.partial(
        pax_mpmd.mpmd_jit,
        schedule=self.schedule,
        runtime=self._runtime,
        donate_argnums=donate_argnums,
        mesh=mesh,
        in_shardings=in_shardings,
        on_progress=self._on_progress,
    )
    return jit(fn) if donate_argnums else _SendingStateOnce(fn, jit)

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
