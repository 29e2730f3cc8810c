"""What running a plan costs by itself: stages that compute nothing, on actors of their own.

`python -m integration.bench.control` prints microseconds per instruction, and what the driver does
for a step.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

__all__ = ['measure']


def measure(num_actors: int = 2, num_microbatches: int = 64, num_steps: int = 30) -> dict:
  """Runs it on this process's Ray.

  Returns:
    'instruction_us': the step's time over the instructions of the actor that has most;
    'instructions': of that actor; 'driver_us': median processor time of a call that starts a step
    (it may also wait, for the step before the last);
    'ahead': how many of the steps were sent before the one before them had ended.
  """
  import jax
  import numpy as np

  import pax_mpmd as mpmd

  def loss_fn(weight, x):
    for i in range(num_actors):
      x = x * weight[i]
      if i < num_actors - 1:
        x = mpmd.pipeline_yield(x)
    return x.sum()

  def train_step(weight, batch):
    def grads_fn(x):
      loss, grads = jax.value_and_grad(loss_fn)(weight, x)
      return grads, loss

    grads, losses = mpmd.accumulate_grads(grads_fn, batch)
    return [w - 0 * g for w, g in zip(weight, grads)], losses.sum()

  weight = [np.float32(1)] * num_actors
  batch = np.ones((num_microbatches, 4), np.float32)
  with mpmd.RayRuntime() as runtime:
    step = mpmd.mpmd_jit(
        train_step,
        schedule=mpmd.schedules.OneFOneB(num_stages=num_actors),
        runtime=runtime,
        donate_argnums=0,
    )
    plan = step.plan(weight, batch).plan
    for _ in range(5):
      weight, loss = step(weight, batch)
    np.asarray(loss)
    calls, losses, ahead = [], [], 0
    begin = time.perf_counter()
    for _ in range(num_steps):
      start = time.thread_time()
      weight, loss = step(weight, batch)
      calls.append(time.thread_time() - start)
      ahead += bool(losses) and not losses[-1].pieces[0][2][0].ready.done()
      losses.append(loss)
    np.asarray(loss)
    seconds = (time.perf_counter() - begin) / num_steps
  most = max(len(actor.instructions) for actor in plan.actors)
  return {
      'instruction_us': seconds / most * 1e6,
      'instructions': most,
      'step_ms': seconds * 1e3,
      'driver_us': statistics.median(calls) * 1e6,
      'ahead': ahead / (num_steps - 1),
  }


if __name__ == '__main__':
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  for actors in map(int, sys.argv[1:] or ['2', '4']):
    print(json.dumps({'actors': actors, **measure(actors)}), flush=True)
