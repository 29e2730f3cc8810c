"""What a cut loop means, by running it; for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.partition import CutLoop
from pax_mpmd.compile.program import OperandKind


def evaluate_loop(cut: CutLoop, operands: Sequence[Any]) -> list[Any]:
  """Runs the tasks on the values of `cut.operands`; returns the loop's results.

  Each microbatch's tasks run in `CutLoop.in_order`.
  """
  import jax.numpy as jnp

  num = cut.num_microbatches
  sums = [np.zeros(a.shape, a.dtype) for a in cut.out_avals[: cut.num_summed]]
  rows: list[list[Any]] = [[] for _ in cut.out_avals[cut.num_summed :]]
  for m in range(num):
    edges: dict[int, Any] = {}
    for task in cut.in_order():
      args = []
      for op in task.inputs:
        if op.kind is OperandKind.EDGE:
          args.append(edges[op.id])
        else:
          args.append(operands[op.id][m] if cut.is_batch[op.id] else operands[op.id])
      for op, x in zip(task.outputs, jc.eval_jaxpr(task.jaxpr, (), *args)):
        if op.kind is OperandKind.EDGE:
          edges[op.id] = x
        elif op.id < cut.num_summed:
          sums[op.id] = sums[op.id] + x
        else:
          rows[op.id - cut.num_summed].append(x)
  return [*sums, *(jnp.stack(r) for r in rows)]
