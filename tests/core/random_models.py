"""Checks random models (`random_steps.py`) under random placements and schedules.

  python -m tests.core.random_models --seeds 100:400 [--phases FIW] [--shrink]

checks many seeds and prints the model of each that fails; with --shrink the smallest model found
that still fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import dataclasses
import functools
import time
import traceback
from typing import Any
from unittest import mock

import jax
from jax._src import compiler
import numpy as np

import pax_mpmd as mpmd
from pax_mpmd import schedules
from tests import oracle
from tests.core.random_steps import batch
from tests.core.random_steps import draw
from tests.core.random_steps import init
from tests.core.random_steps import make_step
from tests.core.random_steps import Model
from tests.core.replan import with_program
from tests.schedules.random_schedules import ascending
from tests.schedules.random_schedules import random_schedule

PHASES = ('FB', 'FIW', 'mixed', 'each')

# How far results may be apart, in responses to a change of the arguments by one rounding error.
_RESPONSES = 64
# A model is no test if its results may be further apart than that, relative to the largest number.
_SENSITIVE = 0.05
_EPSILON = float(np.finfo(np.float32).eps)


class TooSensitive(AssertionError):
  """The model can't tell a wrong result from a rounding error."""


def _nudged(tree: Any, seed: int) -> Any:
  """Every finite float moved by one rounding error, up or down."""
  rng = np.random.default_rng(seed)

  def nudge(x):
    x = np.asarray(x)
    if x.dtype != np.float32:
      return x
    moved = np.nextafter(x, np.where(rng.random(x.shape) < 0.5, np.inf, -np.inf).astype(x.dtype))
    return np.where(np.isfinite(x), moved, x)

  return jax.tree_util.tree_map(nudge, tree)


def assert_close(actual: Any, fn: Any, args: Any, what: str) -> None:
  """`actual` is what `fn(*args)` gives, but for rounding.

  How much rounding may matter is measured, since it depends on the model (a gradient may be the
  difference of large numbers, or be divided by its own norm): `fn` is called with all its float
  arguments moved by one rounding error, and the tolerance of each number is 64 times its largest
  response, with at least 64 rounding errors of the largest number of its array. 64 is the error
  of some hundred roundings of random sign in a chain, a few times over.
  """
  desired = jax.device_get(fn(*args))
  others = [jax.device_get(fn(*_nudged(args, seed))) for seed in range(3)]
  flat_a, tree_a = jax.tree_util.tree_flatten_with_path(mpmd.device_get(actual))
  flat_d, tree_d = jax.tree_util.tree_flatten_with_path(desired)
  assert tree_a == tree_d
  flat_others = [jax.tree_util.tree_leaves(o) for o in others]
  for i, ((path, a), (_, d)) in enumerate(zip(flat_a, flat_d)):
    name = what + jax.tree_util.keystr(path)
    a, d = np.asarray(a), np.asarray(d)
    assert (a.shape, a.dtype) == (d.shape, d.dtype), name
    if a.dtype.kind != 'f':
      np.testing.assert_array_equal(a, d, err_msg=name)
      continue
    np.testing.assert_array_equal(np.isnan(a), np.isnan(d), err_msg=name)
    np.testing.assert_array_equal(np.isinf(a), np.isinf(d), err_msg=name)
    finite = np.isfinite(d)
    a, d = a[finite].astype(np.float64), d[finite].astype(np.float64)
    if not d.size:
      continue
    with np.errstate(invalid='ignore'):
      response = np.max([np.abs(np.asarray(o[i])[finite] - d) for o in flat_others], axis=0)
    response = np.nan_to_num(response, nan=0.0, posinf=0.0)
    allowed = _RESPONSES * np.maximum(response, _EPSILON * np.abs(d).max())
    if allowed.max() > _SENSITIVE * max(np.abs(d).max(), 1e-30):
      raise TooSensitive(f'{name}: the model is too sensitive to rounding to tell anything')
    worst = np.argmax(np.abs(a - d) / np.maximum(allowed, 1e-30))
    assert (np.abs(a - d) <= allowed).all(), (
        f'{name}: {a[worst]} instead of {d[worst]}, off by {abs(a - d)[worst]:.2e} where'
        f' {allowed[worst]:.2e} is rounding'
    )


def _fast_compiler() -> Any:
  """A context in which LLVM optimizes little: most of the time goes into compiling."""
  options = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
  plain = compiler.get_compile_options

  def fast(*args, **kwargs):
    return plain(*args, **{**kwargs, 'env_options_overrides': options})

  return mock.patch.object(compiler, 'get_compile_options', fast)


def check(model: Model, phases: str = 'FB') -> None:
  """Two calls by a random schedule agree with `jax.jit`; schedules of one order agree in each bit.

  The first call's results are compared with `jax.jit`'s; the second call gets them as they lie on
  the actors, and `jax.jit` gets the same values. So the two differ by one step's rounding only.
  The step is also run by two schedules with the same placement in which each stage goes through
  the microbatches in order: their results are equal to the last bit.
  """
  if model.forward_only:
    phases = 'F'
  num_stages, num_microbatches = len(model.stages), model.num_microbatches
  wild = random_schedule(model.seed, num_stages, model.num_actors, num_microbatches, phases)
  args = (init(model), batch(model))
  step = make_step(model)
  jitted = jax.jit(step)
  with _fast_compiler(), mpmd.LocalRuntime(devices=jax.devices()[:1]) as runtime:
    jit = functools.partial(
        mpmd.mpmd_jit, step, runtime=runtime, donate_argnums=(0,) if model.donate else ()
    )
    first = jit(schedule=wild)
    planned = first.plan(*args)
    state, out = first(*args)
    now = mpmd.device_get(state)
    assert_close((now, out), jitted, args, 'call 1: ')
    second = batch(dataclasses.replace(model, seed=model.seed + 1000, poison=False))
    result = first(state, second)
    assert_close(result, jitted, (now, second), 'call 2: ')
    if phases == 'each':  # B and I, W add differently
      return
    ordered = ascending(wild, num_microbatches)
    others = _phase_by_phase(ordered, num_microbatches)
    a, b = (
        with_program(jit(schedule=schedule), planned, args)(now, second)
        for schedule in (ordered, others)
    )
    oracle.assert_trees_equal(a, b, what='ordered: ')
    if wild.tasks(num_microbatches) == ordered.tasks(num_microbatches):
      oracle.assert_trees_equal(a, result, what='again: ')


def check_sharded(model: Model, phases: str) -> None:
  """One call on actors of 2 x 2 devices agrees with `jax.jit` on one.

  Which axes split which dimensions of the arguments is drawn, too; random keys stay whole.
  """
  phases = 'F' if model.forward_only else phases
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ('data', 'mdl'))
  schedule = random_schedule(
      model.seed, len(model.stages), model.num_actors, model.num_microbatches, phases
  )
  args = (init(model), batch(model))
  rng = np.random.default_rng(model.seed)
  step = make_step(model)
  with _fast_compiler(), mpmd.LocalRuntime() as runtime:
    fn = mpmd.mpmd_jit(
        step,
        schedule=schedule,
        runtime=runtime,
        mesh=mesh,
        in_shardings=jax.tree_util.tree_map(lambda x: _random_spec(np.asarray(x), rng), args),
        donate_argnums=(0,) if model.donate else (),
    )
    assert_close(fn(*args), jax.jit(step), args, 'sharded: ')


def _random_spec(x: np.ndarray, rng: np.random.Generator) -> jax.sharding.PartitionSpec:
  spec: list[str | None] = [None] * x.ndim
  for axis in rng.permutation(['data', 'mdl']).tolist() if x.dtype != np.uint32 else ():
    free = [i for i, size in enumerate(x.shape) if size % 2 == 0 and spec[i] is None]
    if free and rng.random() < 0.7:
      spec[rng.choice(free)] = axis
  return jax.sharding.PartitionSpec(*spec)


def _phase_by_phase(schedule: schedules.Schedule, num_microbatches: int) -> schedules.Schedule:
  """GPipe's order for any placement: all forwards, then all backwards, stage by stage."""
  lists = schedule.tasks(num_microbatches)

  def order(task):
    forward = task.phase is schedules.Phase.F
    late = task.phase is schedules.Phase.W
    return not forward, late, task.stage if forward else -task.stage, task.microbatch

  return schedules.FromTable([sorted(tasks, key=order) for tasks in lists])


# -- many seeds, and smaller models that fail alike ------------------------------------------------


def failure(model: Model, phases: str) -> str | None:
  """What `check` says against the model; None if nothing."""
  try:
    check(model, phases)
  except Exception:  # whatever it is, that is what is looked for
    return traceback.format_exc()
  return None


def _without(items: tuple, i: int) -> tuple:
  return (*items[:i], *items[i + 1 :])


def _smaller(model: Model) -> Iterator[Model]:
  """Models with something left out; the largest parts first."""
  replace = dataclasses.replace
  num_stages = len(model.stages)
  for s in range(num_stages if num_stages > 1 else 0):
    keep = [k for k in range(num_stages) if k != s]
    new = {old: i for i, old in enumerate(keep)}
    yield replace(
        model,
        stages=_without(model.stages, s),
        skips=tuple((new[a], new[b], t) for a, b, t in model.skips if s not in (a, b)),
        yields=_without(model.yields, min(s, num_stages - 2)) if model.yields else (),
        around=_without(model.around, s) if model.around else (),
        metrics=tuple((new[a], n, k) for a, n, k in model.metrics if a != s),
        num_actors=min(model.num_actors, num_stages - 1),
    )
  for s, stage in enumerate(model.stages):
    for i in range(len(stage)):
      stages = (*model.stages[:s], _without(stage, i), *model.stages[s + 1 :])
      yield replace(model, stages=stages)
  for field in dataclasses.fields(Model)[2:]:
    value = getattr(model, field.name)
    if field.name in ('yields', 'around'):
      for i, extra in enumerate(value):
        if extra:
          yield replace(model, **{field.name: (*value[:i], '', *value[i + 1 :])})
    elif isinstance(value, tuple):
      for i in range(len(value)):
        yield replace(model, **{field.name: _without(value, i)})
    elif type(value) is int and value > 1:
      yield replace(model, **{field.name: value - 1})
    elif type(value) is not int and value != field.default:
      yield replace(model, **{field.name: field.default})
  for s, stage in enumerate(model.stages):
    for i, layer in enumerate(stage):
      simpler = [replace(layer, wraps=_without(layer.wraps, k)) for k in range(len(layer.wraps))]
      simpler += [replace(layer, use='plain'), replace(layer, weight='own')]
      simpler += [replace(layer, kind=kind) for kind in ('linear', 'dense')]
      for new in simpler:
        if new != layer and not (layer.kind == 'linear' and new.kind == 'dense'):
          new_stage = (*stage[:i], new, *stage[i + 1 :])
          yield replace(model, stages=(*model.stages[:s], new_stage, *model.stages[s + 1 :]))


def shrink(model: Model, phases: str, tries: int = 300) -> Model:
  """A small model that fails with the same kind of error."""

  def kind(text: str | None) -> str:
    return text.strip().splitlines()[-1].split(':')[0] if text else ''

  wanted = kind(failure(model, phases))
  again = True
  while again and tries > 0:
    again = False
    for candidate in _smaller(model):
      tries -= 1
      if tries < 0:
        break
      if kind(failure(candidate, phases)) == wanted:
        model, again = candidate, True
        break
  return model


def main() -> None:
  """Checks the seeds given on the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--seeds', default='0:100', help='first:last, the last one not included')
  parser.add_argument('--phases', default=','.join(PHASES), help='by seed in turn, as FB,FIW,mixed')
  parser.add_argument('--shrink', action='store_true', help='look for smaller models that fail')
  options = parser.parse_args()
  first, last = map(int, options.seeds.split(':'))
  choices = options.phases.split(',')
  failed = []
  start = time.monotonic()
  for seed in range(first, last):
    model, phases = draw(seed), choices[seed % len(choices)]
    text = failure(model, phases)
    if text and TooSensitive.__name__ in text:
      print(f'too sensitive to rounding, so not checked: {model}', flush=True)
    elif text:
      failed.append(seed)
      print(f'FAILED ({phases}) {model}\n{text}', flush=True)
      if options.shrink:
        small = shrink(model, phases)
        print(f'SMALLEST {small}\n{small!r}\n{failure(small, phases)}', flush=True)
    if seed % 25 == 24:
      print(f'{seed + 1 - first} models, {len(failed)} failed', flush=True)
      jax.clear_caches()  # hundreds of models would fill the memory
  seconds = (time.monotonic() - start) / max(last - first, 1)
  print(f'{last - first} models, {seconds:.1f} s each; failed: {failed or "none"}')
  raise SystemExit(bool(failed))


if __name__ == '__main__':
  main()
