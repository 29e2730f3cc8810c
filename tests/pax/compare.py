"""The oracle of Pax experiments: MPMD steps against those of Pax's own SPMD pipelining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tests.pax import tiny


def assert_equal_to_pax(
    spmd: tiny.Run,
    mpmd: tiny.Run,
    num_steps: int = 3,
    batch: Callable[[int], Any] = tiny.batch,
    rtol: float = 2e-5,
    state_tolerance: tuple[float, float] = (1e-4, 1e-5),
    summary_tolerance: tuple[float, float] = (1e-4, 1e-5),
    without_summaries: tuple[str, ...] = (),
    moves_visibly: bool = False,
) -> None:
  """Both runs have the same initial state, and do the same in every step.

  Compared are the loss, weighted scalars, per-example outputs, summaries (the gradient norm among
  them) and, leaf by leaf, the variables and optimizer slots.

  Args:
    spmd: the run by Pax.
    mpmd: the run by pax_mpmd.
    num_steps: how many train steps.
    batch: gives the batch of a step.
    rtol: relative tolerance of losses and scalars.
    state_tolerance: (relative, absolute), of variables and slots.
    summary_tolerance: (relative, absolute), of summaries.
    without_summaries: parts of names of summaries whose values are not compared.
    moves_visibly: whether variables have to move by much more than the tolerance.
  """
  shapes = [
      jax.tree_util.tree_map(
          lambda x: x.shape, run.partitioner.get_train_state_metadata().unpadded_global_shapes
      )
      for run in (spmd, mpmd)
  ]
  assert shapes[0] == shapes[1]
  assert_close(mpmd.initial, spmd.initial, 0, 0, 'initial state')
  states = [spmd.initial, mpmd.initial]
  for i in range(num_steps):
    inputs = batch(i)
    states[0], desired = spmd.step(states[0], inputs)
    states[1], actual = mpmd.step(states[1], inputs)
    step = f'step {i}: '
    assert_close(actual.loss, desired.loss, rtol, 0, step)
    assert_close(actual.weighted_scalars, desired.weighted_scalars, rtol, 1e-6, step)
    assert_close(actual.per_example_out, desired.per_example_out, rtol, 1e-6, step)
    assert sorted(actual.summary_tensors) == sorted(desired.summary_tensors), step
    assert any('grad_norm' in name for name in actual.summary_tensors), step
    summaries = [
        {k: x for k, x in out.summary_tensors.items() if not any(s in k for s in without_summaries)}
        for out in (actual, desired)
    ]
    assert_close(*summaries, *summary_tolerance, step)
    assert_close(states[1], states[0], *state_tolerance, step)
    if _rounded_otherwise(*states):
      # From here on the runs differ by a quantum of some momenta, times the learning rate.
      rtol, state_tolerance, summary_tolerance = 1e-3, (1e-3, 5e-4), (1e-3, 1e-3)
  moved = [
      np.max(np.abs(a.astype(np.float32) - b.astype(np.float32)), initial=0)
      for a, b in zip(*(jax.tree_util.tree_leaves(s.mdl_vars) for s in (spmd.initial, states[1])))
  ]
  assert max(moved) > (10 * state_tolerance[1] if moves_visibly else 0)


def _rounded_otherwise(a: Any, b: Any) -> bool:
  """Whether momenta that Adafactor keeps as int8 differ."""
  leaves = zip(jax.tree_util.tree_leaves(a), jax.tree_util.tree_leaves(b))
  return any(x.dtype == np.int8 and np.any(x != y) for x, y in leaves)


def assert_close(actual: Any, desired: Any, rtol: float, atol: float, what: str = '') -> None:
  """Equal structure, shapes and dtypes, and close values; names the leaf that differs."""
  flat_a = jax.tree_util.tree_flatten_with_path(actual)[0]
  flat_d = jax.tree_util.tree_flatten_with_path(desired)[0]
  assert [p for p, _ in flat_a] == [p for p, _ in flat_d], what
  for (path, a), (_, d) in zip(flat_a, flat_d):
    name = what + jax.tree_util.keystr(path)
    a, d = np.asarray(a), np.asarray(d)
    assert (a.shape, a.dtype) == (d.shape, d.dtype), name
    # A momentum that Adafactor keeps as int8 may be rounded to either side.
    close = dict(rtol=0, atol=1) if a.dtype == np.int8 else dict(rtol=rtol, atol=atol)
    np.testing.assert_allclose(
        a.astype(np.float64), d.astype(np.float64), **close, err_msg=name
    )
