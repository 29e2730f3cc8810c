"""`mpmd_jit`: from a step function to a callable that runs it on actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import logging
import math
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
from pax_mpmd.runtime.arrays import MpmdArray
from pax_mpmd.runtime.base import Runtime
from pax_mpmd.runtime.buffers import Buffer
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

  Returns:
    A function of the same arguments. Its array results are `MpmdArray`s, whose data stays on the
    actors until somebody reads it.

  Raises:
    ConfigError: `schedule` isn't a Schedule, or `donate_argnums` isn't made of positions, or
      `in_shardings` is given without `mesh`. When called: an argument isn't an array of numbers,
      or `in_shardings` doesn't fit the arguments.
    ScheduleError: when called: the schedule isn't valid for the number of microbatches.
    PartitionError: when called: the step can't be cut.
  """
  return MpmdFunction(step, schedule, runtime, donate_argnums, mesh, in_shardings, on_progress)


class MpmdFunction:
  """What `mpmd_jit` returns."""

  def __init__(self, step, schedule, runtime, donate_argnums, mesh, in_shardings, on_progress):
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

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    leaves, in_tree, avals = _flatten(args, kwargs)
    key = _key(in_tree, avals)
    planned = self._plan(key, in_tree, avals)
    self._runtime.start(len(planned.plan.actors), self._num_devices)
    handle = self._handles.get(key)
    if handle is None:
      handle = self._runtime.load(
          planned.plan, functools.partial(self._on_progress, 'compiling programs')
      )
      self._handles[key] = handle
    donated = self._donated(args, kwargs)
    inputs = _scatter(planned, _unshared(leaves, donated), self._runtime)
    outputs = self._runtime.run(handle, inputs)
    del inputs
    for leaf, given_up in zip(leaves, donated):
      if given_up and isinstance(leaf, MpmdArray):
        leaf.delete()
    return jax.tree_util.tree_unflatten(
        planned.out_tree, _gather(planned, outputs, self._runtime)
    )

  def plan(self, *args: Any, **kwargs: Any) -> PlannedStep:
    """Compiles and plans for arguments of these shapes, and starts nothing.

    The arguments may be arrays or `jax.ShapeDtypeStruct`s.
    """
    _, in_tree, avals = _flatten(args, kwargs)
    return self._plan(_key(in_tree, avals), in_tree, avals)

  def _plan(self, key: Any, in_tree: Any, avals: Sequence[Any]) -> PlannedStep:
    planned = self._planned.get(key)
    if planned is not None:
      return planned
    self._on_progress('tracing the step', 0, 1)
    args, kwargs = jax.tree_util.tree_unflatten(in_tree, list(avals))
    donated = self._donated(args, kwargs)
    in_specs = _partition_specs(self._in_shardings, args, kwargs, self._mesh)
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
        next_value_of=_next_values(args, traced),
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


def _partition_specs(
    in_shardings: Any, args: Sequence[Any], kwargs: Any, mesh: jax.sharding.Mesh | None
) -> list[Any]:
  """Per flat argument its PartitionSpec, or None; checked against the mesh."""
  specs: list[Any] = []
  if in_shardings is None:
    in_shardings = (None,) * len(args)
  if not isinstance(in_shardings, (tuple, list)) or len(in_shardings) != len(args):
    raise ConfigError(
        f'mpmd_jit: in_shardings={shown(in_shardings)} must be a tuple with one entry for each of'
        f' the {len(args)} positional arguments.'
    )

  def is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (jax.sharding.PartitionSpec, jax.sharding.NamedSharding))

  def spread(spec: Any, part: Any) -> None:
    if not is_spec(spec):
      raise ConfigError(
          f'mpmd_jit: in_shardings has {shown(spec)}; its leaves must be PartitionSpecs,'
          ' NamedShardings or None.'
      )
    if mesh is not None and isinstance(spec, jax.sharding.NamedSharding):
      if mesh_sizes(spec.mesh) != mesh_sizes(mesh):
        raise ConfigError(
            f'mpmd_jit: in_shardings has {shown(spec)}, on a mesh of {mesh_sizes(spec.mesh)};'
            f' the argument `mesh` has {mesh_sizes(mesh)}. Use that mesh, or PartitionSpecs.'
        )
    spec = getattr(spec, 'spec', spec)
    leaves = jax.tree_util.tree_leaves(part)
    if mesh is not None and spec is not None:
      _check_spec(spec, leaves, mesh)
    specs.extend([spec] * len(leaves))

  for i, (sharding, arg) in enumerate(zip(in_shardings, args)):
    try:
      jax.tree_util.tree_map(spread, sharding, arg, is_leaf=is_spec)
    except ValueError as error:
      raise ConfigError(
          f'mpmd_jit: in_shardings[{i}] is not a prefix of the tree of argument {i}: {error}'
      ) from error
  return specs + [None] * len(jax.tree_util.tree_leaves(kwargs))


def _check_spec(spec: Any, leaves: Sequence[Any], mesh: jax.sharding.Mesh) -> None:
  axes = [
      axis
      for entry in spec
      for axis in (entry if isinstance(entry, (tuple, list)) else (entry,))
      if axis is not None
  ]
  unknown = [axis for axis in axes if axis not in mesh.axis_names]
  rank = min((np.ndim(leaf) for leaf in leaves), default=len(spec))
  what = ''
  if unknown:
    what = f'{unknown[0]!r} is no axis of the mesh, whose axes are {tuple(mesh.axis_names)}'
  elif len(set(axes)) < len(axes):
    what = 'an axis stands in it twice'
  elif len(spec) > rank:
    what = f'it has {len(spec)} entries for an array of {rank} dimensions'
  if what:
    raise ConfigError(f'mpmd_jit: in_shardings has {spec}: {what}.')


def _flatten(args: Any, kwargs: Any) -> tuple[list[Any], Any, list[jax.ShapeDtypeStruct]]:
  leaves, in_tree = jax.tree_util.tree_flatten((args, kwargs))
  arrays, avals = [], []
  for position, leaf in enumerate(leaves):
    if not hasattr(leaf, 'shape') or not hasattr(leaf, 'dtype'):
      leaf = np.asarray(leaf)
    problem = _problem(leaf)
    if problem:
      path = jax.tree_util.tree_flatten_with_path((args, kwargs))[0][position][0]
      raise ConfigError(
          f'mpmd_jit: argument {jax.tree_util.keystr(path)} of the step (of (args, kwargs)) is'
          f' {_described(leaves[position])}, {problem}'
      )
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    arrays.append(leaf)
    avals.append(jax.ShapeDtypeStruct(tuple(leaf.shape), dtype))
  return arrays, in_tree, avals


def _described(value: Any) -> str:
  """An argument, for messages: arrays by shape and dtype."""
  if hasattr(value, 'shape') and hasattr(value, 'dtype'):
    return f'{value.dtype}{list(value.shape)}'
  return shown(value)


def _problem(array: Any) -> str:
  """What is wrong with an argument, or nothing."""
  if isinstance(array, jax.core.Tracer):
    return (
        'a traced array: the function is called inside jax.jit, jax.grad, jax.vmap or the like. It'
        ' runs on other processes or threads and compiles the step by itself, so call it as it is,'
        ' and put what you would wrap around it into the step.'
    )
  if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
    return (
        'typed random keys, which can be used within a step but not be passed in or out. Pass'
        ' jax.random.key_data(key), and in the step use jax.random.wrap_key_data(data).'
    )
  if array.dtype == object or array.dtype.kind in 'USMm':
    return (
        'not an array of numbers or booleans. Let the step close over it, for example by'
        ' functools.partial, if it is the same in every call.'
    )
  return ''


def _key(in_tree: Any, avals: Sequence[Any]) -> Any:
  return in_tree, tuple((a.shape, str(a.dtype)) for a in avals)


def _next_values(args: Sequence[Any], traced: Any) -> dict[int, int]:
  """Pairs results with the arguments they replace: equal trees of equal arrays, in order."""
  out_avals = [(tuple(v.aval.shape), v.aval.dtype) for v in traced.jaxpr.outvars]
  outs = jax.tree_util.tree_unflatten(traced.out_tree, list(range(len(out_avals))))
  candidates = [outs, *outs] if isinstance(outs, (tuple, list)) else [outs]
  pairs: dict[int, int] = {}
  position = 0
  for arg in args:
    arg_leaves, arg_tree = jax.tree_util.tree_flatten(arg)
    for candidate in candidates:
      out_leaves, out_tree = jax.tree_util.tree_flatten(candidate)
      if out_tree != arg_tree or not out_leaves or out_leaves[0] in pairs:
        continue
      if all(
          out_avals[o] == (tuple(a.shape), a.dtype) for o, a in zip(out_leaves, arg_leaves)
      ):
        pairs.update((o, position + k) for k, o in enumerate(out_leaves))
        break
    position += len(arg_leaves)
  return pairs


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
    planned: PlannedStep, leaves: Sequence[Any], runtime: Runtime
) -> list[list[np.ndarray | Buffer]]:
  """Per actor the values of its plan's inputs: buffers that are there, else host arrays."""
  hosts: dict[int, np.ndarray] = {}

  def value(position: int, piece: int, actor: int) -> np.ndarray | Buffer:
    leaf = planned.program.inputs[position]
    array = leaves[position]
    start = leaf.pieces[piece].start
    shape = planned.program.values[leaf.pieces[piece].value].shape
    if isinstance(array, MpmdArray) and array.runtime is runtime:
      buffer = array.buffer_on(actor, start, shape)
      if buffer is not None:
        return buffer
      if position not in hosts:
        _log.info('argument %s is fetched: actor %d needs another part of it', leaf.name, actor)
    if position not in hosts:
      hosts[position] = _host(array, leaf)
    return hosts[position][tuple(slice(a, a + n) for a, n in zip(start, shape))]

  return [
      [value(position, piece, plan.actor) for position, piece in plan.input_values]
      for plan in planned.plan.actors
  ]


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
