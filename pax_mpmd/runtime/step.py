"""`mpmd_jit`: from a step function to a callable that runs it on actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import logging
import math
import os
from typing import Any

import jax
import numpy as np

from pax_mpmd import plan as planning
from pax_mpmd.compile.program import Leaf
from pax_mpmd.compile.program import StepProgram
from pax_mpmd.compile.step import compile_step
from pax_mpmd.compile.step import num_microbatches_of
from pax_mpmd.compile.trace import mesh_sizes
from pax_mpmd.compile.trace import trace_step
from pax_mpmd.errors import ConfigError
from pax_mpmd.errors import shown
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.runtime import arguments
from pax_mpmd.runtime.arrays import MpmdArray
from pax_mpmd.runtime.base import Runtime
from pax_mpmd.runtime.buffers import Buffer
from pax_mpmd.runtime.deferred import DeferredArray
from pax_mpmd.runtime.tracing import StepTracer
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import Schedule
from pax_mpmd.schedules.validate import checked_tasks

__all__ = ['MpmdFunction', 'PlannedStep', 'mpmd_jit']

_log = logging.getLogger('pax_mpmd')


@dataclasses.dataclass(frozen=True)
class PlannedStep:
  """A step compiled and planned for one set of argument shapes.

  Attributes:
    program: the step cut into programs.
    plan: the verified plan of every actor.
    notes: a line for every place where a slower way had to be taken.
    out_tree: tree structure of the result.
  """

  program: StepProgram
  plan: Plan
  notes: tuple[str, ...]
  out_tree: Any


def mpmd_jit(
    step: Callable[..., Any],
    *,
    schedule: Schedule,
    runtime: Runtime,
    donate_argnums: int | Sequence[int] = (),
    mesh: jax.sharding.Mesh | None = None,
    in_shardings: Any = None,
    on_progress: Callable[[str, int, int], None] | None = None,
    trace_steps: int = 0,
    trace_dir: str | os.PathLike = 'mpmd_trace',
) -> MpmdFunction:
  """Compiles `step` to run on pipeline actors.

  The result is that of `jax.jit(step)`; only where and when things are computed changes.

  Args:
    step: a function of pytrees of arrays that runs its microbatches through `accumulate_grads`
      and whose loss function calls `pipeline_yield` between the stages.
    schedule: which actor runs which stage of which microbatch, in which order.
    runtime: where the actors live: `LocalRuntime()` or `RayRuntime()`.
    donate_argnums: positions of arguments the caller gives up, as in `jax.jit`: usually the
      training state.
    mesh: gives each actor several devices, over which its programs are partitioned as `jax.jit`
      would: `jax.lax.with_sharding_constraint` in `step` is on this mesh. Its axes count; its
      devices are those of this process that the programs are lowered with. None: one device.
    in_shardings: with `mesh`: a tuple with a `PartitionSpec` (or `NamedSharding`) for each
      argument, or a tree of them for its leaves, as in `jax.jit`; None: whole on each device. What
      a result replaces in the next step keeps its sharding.
    on_progress: called with (what is being done, how many are done, how many there are) while a
      step is traced, planned and compiled.
    trace_steps: how many steps to show in a trace: from the third call on, as the first is slow and
      the second counts bytes. 0: none.
    trace_dir: the folder where it is written, in the background: STEP.json for ui.perfetto.dev,
      STEP.svg and STEP.txt, where STEP is the step's name.

  Returns:
    A function of the same arguments. Its array results are `MpmdArray`s, whose data stays on the
    actors until somebody reads it.

  Raises:
    ConfigError: `schedule` isn't a Schedule, or `donate_argnums` isn't made of positions, or
      `in_shardings` is given without `mesh`, or `trace_steps` isn't a number. When
      called: an argument isn't an array of numbers, or `in_shardings` doesn't fit the arguments.
    ScheduleError: when called: the schedule isn't valid for the number of microbatches.
    PartitionError: when called: the step can't be cut.
  """
  if isinstance(trace_steps, bool) or not isinstance(trace_steps, int) or trace_steps < 0:
    raise ConfigError(
        f'mpmd_jit: trace_steps={shown(trace_steps)} must be a number of steps, or 0 for no trace.'
    )
  return MpmdFunction(
      step, schedule, runtime, donate_argnums, mesh, in_shardings, on_progress,
      trace_steps, os.fspath(trace_dir),
  )


class MpmdFunction:
  """What `mpmd_jit` returns."""

  def __init__(
      self, step, schedule, runtime, donate_argnums, mesh, in_shardings, on_progress,
      trace_steps, trace_dir,
  ):
    if not isinstance(schedule, Schedule):
      raise ConfigError(
          f'mpmd_jit: schedule={shown(schedule)} is a {type(schedule).__name__}; it must be a'
          ' pax_mpmd.schedules.Schedule, for example OneFOneB(num_stages=4). A name or a .csv file'
          ' becomes one by pax_mpmd.schedules.get(name, num_stages=4).'
      )
    if isinstance(runtime, type) or not hasattr(runtime, 'load'):
      raise ConfigError(
          f'mpmd_jit: runtime={shown(runtime)} must be a runtime object: pax_mpmd.LocalRuntime() or'
          ' pax_mpmd.RayRuntime(), with the parentheses.'
      )
    donate = donate_argnums if isinstance(donate_argnums, Sequence) else (donate_argnums,)
    if donate_argnums is None:
      donate = ()
    if not callable(step):
      raise ConfigError(f'mpmd_jit: the step must be a function, but is {shown(step)}.')
    if any(not isinstance(i, int) or i < 0 for i in donate):
      raise ConfigError(
          f'mpmd_jit: donate_argnums={donate_argnums!r} must be positions of arguments, counted'
          ' from 0.'
      )
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
      raise ConfigError(
          f'mpmd_jit: mesh={shown(mesh)} must be a jax.sharding.Mesh of the devices of one actor,'
          ' or None.'
      )
    if in_shardings is not None and mesh is None:
      raise ConfigError('mpmd_jit: in_shardings needs mesh, the mesh its axes are of.')
    functools.update_wrapper(self, step, updated=())
    self._step = step
    self._schedule = schedule
    self._runtime = runtime
    self._donate = tuple(donate)
    self._num_devices = math.prod(mesh_sizes(mesh).values())
    self._mesh = mesh if self._num_devices > 1 else None
    self._in_shardings = in_shardings
    self._on_progress = on_progress or (lambda what, done, total: None)
    self._planned: dict[Any, PlannedStep] = {}
    self._handles: dict[Any, int] = {}
    self._trace_steps = trace_steps
    self._trace_dir = trace_dir
    self._tracers: dict[Any, StepTracer] = {}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    leaves, in_tree, avals = arguments.flatten(args, kwargs)
    key = arguments.key(in_tree, avals)
    planned = self._plan(key, in_tree, avals)
    self._runtime.start(len(planned.plan.actors), self._num_devices)
    handle = self._handles.get(key)
    if handle is None:
      handle = self._runtime.load(
          planned.plan, functools.partial(self._on_progress, 'compiling programs')
      )
      self._handles[key] = handle
      if self._trace_steps:
        self._tracers[key] = self._tracer(planned)
    donated = self._donated(args, kwargs)
    inputs = _scatter(planned, _unshared(leaves, donated), self._runtime)
    given_up = [
        buffer
        for leaf, is_donated in zip(leaves, donated)
        if is_donated and isinstance(leaf, MpmdArray) and leaf.runtime is self._runtime
        for _, _, buffers in leaf.pieces
        for buffer in buffers
    ]
    outputs = self._tracers.get(key, self._runtime).run(handle, inputs, given_up)
    del inputs, given_up
    for leaf, given_up in zip(leaves, donated):
      if given_up and isinstance(leaf, MpmdArray):
        leaf.delete()
    return jax.tree_util.tree_unflatten(
        planned.out_tree, _gather(planned, outputs, self._runtime)
    )

  def _tracer(self, planned: PlannedStep) -> StepTracer:
    name = getattr(self._step, '__name__', 'step')
    if self._tracers:  # for arguments of other shapes
      name = f'{name}-{len(self._tracers) + 1}'
    return StepTracer(planned.plan, self._runtime, self._trace_steps, self._trace_dir, name)

  def plan(self, *args: Any, **kwargs: Any) -> PlannedStep:
    """Compiles and plans for arguments of these shapes, and starts nothing.

    The arguments may be arrays or `jax.ShapeDtypeStruct`s.
    """
    _, in_tree, avals = arguments.flatten(args, kwargs)
    return self._plan(arguments.key(in_tree, avals), in_tree, avals)

  def place(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Moves arguments to the actors that need them, without running the step.

    Args:
      *args: arguments as for a call; those that are `jax.ShapeDtypeStruct`s stay as they are.
      **kwargs: the same.

    Returns:
      `args` with their arrays as `MpmdArray`s, so that a call with them moves nothing. An array
      that no actor needs stays as it is.
    """
    leaves, in_tree, avals = arguments.flatten(args, kwargs)
    planned = self._plan(arguments.key(in_tree, avals), in_tree, avals)
    self._runtime.start(len(planned.plan.actors), self._num_devices)
    absent = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
    values = _scatter(planned, leaves, self._runtime, absent)
    held: dict[tuple[int, int], list[Buffer]] = {}
    for plan, mine in zip(planned.plan.actors, values):
      hosts = [i for i, x in enumerate(mine) if x is not None and not isinstance(x, Buffer)]
      buffers = self._runtime.put(plan.actor, [mine[i] for i in hosts])
      for i, buffer in zip(hosts, buffers):
        mine[i] = buffer
      for key, value in zip(plan.input_values, mine):
        if value is not None:
          held.setdefault(key, []).append(value)
    placed = list(leaves)
    for position, leaf in enumerate(planned.program.inputs):
      pieces = [
          (piece.start, planned.program.values[piece.value].shape, held.get((position, k), ()))
          for k, piece in enumerate(leaf.pieces)
      ]
      if pieces and all(buffers for _, _, buffers in pieces):
        placed[position] = MpmdArray(leaf.aval, pieces, self._runtime)
    return jax.tree_util.tree_unflatten(in_tree, placed)[0]

  def _plan(self, key: Any, in_tree: Any, avals: Sequence[Any]) -> PlannedStep:
    planned = self._planned.get(key)
    if planned is not None:
      return planned
    self._on_progress('tracing the step', 0, 1)
    args, kwargs = jax.tree_util.tree_unflatten(in_tree, list(avals))
    donated = self._donated(args, kwargs)
    in_specs = arguments.partition_specs(self._in_shardings, args, kwargs, self._mesh)
    traced = trace_step(self._step, in_tree, avals, donated, self._mesh)
    self._on_progress('planning', 0, 1)
    # First, so that a broken schedule isn't reported as a step that doesn't fit it. A step without
    # a gradient needs no backward tasks; the planner finds out where they are missing.
    lists = checked_tasks(self._schedule, num_microbatches_of(traced), need_backward=False)
    split_stages = {task.stage for tasks in lists for task in tasks if task.phase is Phase.W}
    names = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    ]
    placement = self._schedule.placement()
    compiled = compile_step(
        traced,
        placement=placement,
        num_actors=self._schedule.num_actors,
        in_names=names,
        donated=donated,
        next_value_of=arguments.next_values(args, traced),
        split_stages=split_stages,
        mesh=self._mesh,
        in_specs=in_specs,
    )
    plan = planning.lower(compiled.program, self._schedule)
    planning.verify(plan)
    planning.verify_values(plan, compiled.program, self._schedule)
    for note in compiled.notes:
      _log.warning('%s: %s', getattr(self._step, '__name__', 'step'), note)
    planned = PlannedStep(compiled.program, plan, compiled.notes, compiled.out_tree)
    self._planned[key] = planned
    return planned

  def _donated(self, args: Sequence[Any], kwargs: Any) -> list[bool]:
    if any(i >= len(args) for i in self._donate):
      raise ConfigError(
          f'mpmd_jit: donate_argnums={self._donate} names positions that a call with {len(args)}'
          ' positional arguments doesn\'t have; positions are counted from 0, and arguments passed'
          ' by keyword can\'t be donated.'
      )
    flags = []
    for i, arg in enumerate(args):
      flags += [i in self._donate] * len(jax.tree_util.tree_leaves(arg))
    return flags + [False] * len(jax.tree_util.tree_leaves(kwargs))


def _unshared(leaves: Sequence[Any], donated: Sequence[bool]) -> list[Any]:
  """The arguments, where one that is given up is read by nobody else.

  An MpmdArray that stands at several places, one of them donated, is fetched for all but one: a
  program may write over the memory of what it is given.
  """
  given_up = {id(x) for x, d in zip(leaves, donated) if d and isinstance(x, MpmdArray)}
  out, seen = [], set()
  for leaf in leaves:
    if id(leaf) in seen:
      _log.info('%r is passed twice and donated, so one copy of it is fetched', leaf)
      leaf = np.asarray(leaf)
    elif id(leaf) in given_up:
      seen.add(id(leaf))
    out.append(leaf)
  return out


def _scatter(
    planned: PlannedStep,
    leaves: Sequence[Any],
    runtime: Runtime,
    absent: Sequence[bool] | None = None,
) -> list[list[Any]]:
  """Per actor the values of its plan's inputs: buffers that are there, else host arrays.

  What is deferred is made. For an argument that is `absent` there is None.
  """
  hosts: dict[int, np.ndarray] = {}
  wanted: list[list[Any]] = [[] for _ in planned.plan.actors]

  def value(position: int, piece: int, actor: int, slot: int) -> Any:
    leaf = planned.program.inputs[position]
    array = leaves[position]
    start = leaf.pieces[piece].start
    shape = planned.program.values[leaf.pieces[piece].value].shape
    if absent is not None and absent[position]:
      return None
    if isinstance(array, MpmdArray) and array.runtime is runtime:
      buffer = array.buffer_on(actor, start, shape)
      if buffer is not None:
        return buffer
      if position not in hosts:
        _log.info('argument %s is fetched: actor %d needs another part of it', leaf.name, actor)
    if isinstance(array, DeferredArray) and array.dtype == leaf.aval.numpy_dtype:
      wanted[actor].append((planned.plan.actors[actor].slots[slot], array.piece(start, shape)))
      return _TO_MAKE
    if position not in hosts:
      hosts[position] = _host(array, leaf)
    return hosts[position][tuple(slice(a, a + n) for a, n in zip(start, shape))]

  values = [
      [value(*key, plan.actor, slot) for key, slot in zip(plan.input_values, plan.inputs)]
      for plan in planned.plan.actors
  ]
  if any(wanted):
    made = [iter(buffers) for buffers in runtime.make(wanted)]
    values = [
        [next(made[actor]) if x is _TO_MAKE else x for x in mine]
        for actor, mine in enumerate(values)
    ]
  return values


_TO_MAKE = object()


def _host(array: Any, leaf: Leaf) -> np.ndarray:
  return np.asarray(array, leaf.aval.numpy_dtype)


def _gather(
    planned: PlannedStep, outputs: Sequence[Sequence[Buffer]], runtime: Runtime
) -> list[MpmdArray]:
  """The step's flat results from the buffers that its actors hold."""
  held: dict[tuple[int, int], list[Buffer]] = {}
  for plan, buffers in zip(planned.plan.actors, outputs):
    for key, buffer in zip(plan.output_values, buffers):
      held.setdefault(key, []).append(buffer)
  arrays = []
  for position, leaf in enumerate(planned.program.outputs):
    pieces = [
        (piece.start, planned.program.values[piece.value].shape, held[position, k])
        for k, piece in enumerate(leaf.pieces)
    ]
    arrays.append(MpmdArray(leaf.aval, pieces, runtime))
  return arrays
