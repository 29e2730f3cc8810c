"""The oracle of the compiler's tests: `mpmd_jit(step)` gives what `jax.jit(step)` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import pax_mpmd as mpmd

# Two float32 programs of the same sums in another order.
RTOL, ATOL = 2e-5, 1e-6


def assert_trees_close(
    actual: Any, desired: Any, rtol: float = RTOL, atol: float = ATOL, what: str = ''
) -> None:
  """Both trees have the same structure, shapes and dtypes, and close values."""
  actual, desired = mpmd.device_get(actual), mpmd.device_get(desired)
  flat_a, tree_a = jax.tree_util.tree_flatten_with_path(actual)
  flat_d, tree_d = jax.tree_util.tree_flatten_with_path(desired)
  assert tree_a == tree_d
  for (path, a), (_, d) in zip(flat_a, flat_d):
    name = what + jax.tree_util.keystr(path)
    a, d = np.asarray(a), np.asarray(d)
    assert (a.shape, a.dtype) == (d.shape, d.dtype), name
    if a.dtype.kind not in 'fc' or (rtol == 0 and atol == 0):
      np.testing.assert_array_equal(a, d, err_msg=name)
    else:
      np.testing.assert_allclose(a, d, rtol=rtol, atol=atol, err_msg=name)


def assert_trees_equal(actual: Any, desired: Any, what: str = '') -> None:
  """Both trees are equal to the last bit."""
  assert_trees_close(actual, desired, rtol=0, atol=0, what=what)


def run(fn: Callable[..., Any], args: tuple[Any, ...], num_calls: int = 1) -> list[Any]:
  """Calls `fn` `num_calls` times; returns what it gave, as numpy arrays.

  From the second call on, the first result takes the place of the first argument.
  """
  results = []
  for _ in range(num_calls):
    out = fn(*args)
    results.append(mpmd.device_get(out))
    if num_calls > 1:
      args = (out[0], *args[1:])
  return results


def check(
    step: Callable[..., Any],
    *args: Any,
    schedule: str | mpmd.schedules.Schedule = '1f1b',
    num_stages: int = 3,
    num_actors: int | None = None,
    runtime: Any = None,
    num_calls: int = 1,
    rtol: float = RTOL,
    atol: float = ATOL,
    **options: Any,
) -> Any:
  """Runs `step` by `jax.jit` and by `mpmd_jit` and compares the results of every call.

  Args:
    step: the step.
    *args: its arguments.
    schedule: a schedule or the name of one.
    num_stages: for a schedule by name.
    num_actors: for a schedule by name.
    runtime: by default a LocalRuntime, closed at the end.
    num_calls: how often to call; see `run`.
    rtol: relative tolerance.
    atol: absolute tolerance.
    **options: of `mpmd_jit`.

  Returns:
    The `PlannedStep` of the first call.
  """
  if isinstance(schedule, str):
    schedule = mpmd.schedules.get(schedule, num_stages=num_stages, num_actors=num_actors)
  desired = run(jax.jit(step), args, num_calls)
  own = mpmd.LocalRuntime() if runtime is None else runtime
  try:
    fn = mpmd.mpmd_jit(step, schedule=schedule, runtime=own, **options)
    actual = run(fn, args, num_calls)
    for i, (a, d) in enumerate(zip(actual, desired)):
      assert_trees_close(a, d, rtol, atol, what=f'call {i}: ')
    return fn.plan(*args)
  finally:
    if runtime is None:
      own.close()
