"""The limit of a step on this machine: its task programs back to back, on all cores.

No schedule, no waits, no messages: a process for each core, pinned to it, runs the programs of a
plan one after the other, all processes at the same time. The time of a step can't be less than the
sum over all programs divided by the number of cores.

`python -m integration.bench.limit SIDE JSON` measures a step of pax_step ('mpmd') or core_step
('ray').
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import dataclasses
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

__all__ = ['Limit', 'measure']


@dataclasses.dataclass(frozen=True)
class Limit:
  """What the programs of a step take.

  Attributes:
    seconds: of a step, if all cores were busy all the time.
    by_kind: seconds on one core of all forward tasks ('F'), backward tasks, epilogue, ...
  """

  seconds: float
  by_kind: dict[str, float]


class _Planned(Exception):
  """The plan is there."""


def _plan_of(build: Callable[[Any], Any]) -> Any:
  """The plan of the step that `build` makes."""
  import pax_mpmd as mpmd

  class PlansOnly(mpmd.LocalRuntime):
    """Takes a plan and goes no further."""

    def load(self, plan, on_progress=None):
      found.append(plan)
      raise _Planned

  found: list[Any] = []
  with PlansOnly() as runtime:
    step, _ = build(runtime)
    try:
      step()
    except _Planned:
      pass
  return found[0]


def measure(build: Callable[[Any], Any], rounds: int = 5) -> Limit:
  """Measures the limit of a step.

  Args:
    build: gives, for a runtime, what `alternating.serve` takes.
    rounds: how often each program is run; medians count.
  """
  from pax_mpmd.runtime.ray_session import worker_environment

  plan = _plan_of(build)
  cores = sorted(os.sched_getaffinity(0))
  with tempfile.NamedTemporaryFile(suffix='.plan') as file:
    pickle.dump(plan, file)
    file.flush()
    children = [
        subprocess.Popen(
            [sys.executable, '-m', __spec__.name, 'child', file.name, str(i), str(rounds)],
            env={**os.environ, **worker_environment(None, None)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(len(cores))
    ]
    try:
      for child in children:
        child.stdout.readline()  # compiled
      for child in children:
        child.stdin.write('go\n')
        child.stdin.flush()
      replies = [json.loads(child.stdout.readline()) for child in children]
    finally:
      for child in children:
        child.stdin.close()
        child.wait(60)
  by_kind: collections.Counter = collections.Counter()
  for reply in replies:
    by_kind.update(reply)
  return Limit(sum(by_kind.values()) / len(cores), dict(by_kind))


def _child(path: str, index: int, rounds: int) -> None:
  """Runs every n-th actor's programs on one of n cores."""
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, {cores[index]})
  import numpy as np

  from pax_mpmd.plan.instructions import Run
  from pax_mpmd.runtime import xla
  from pax_mpmd.runtime.devices import ActorDevices
  from pax_mpmd.runtime.executables import ExecutableCache
  from pax_mpmd.runtime.interpreter import actor_executables

  with open(path, 'rb') as file:
    plan = pickle.load(file)
  actors = range(index, len(plan.actors), len(cores))
  runs = [i for a in actors for i in plan.actors[a].instructions if isinstance(i, Run)]
  executables = {k: e for a in actors for k, e in actor_executables(plan, a).items()}
  device = xla.local_devices()[0]
  programs = ExecutableCache(ActorDevices([device])).compile_all(executables)

  random = np.random.default_rng(0)

  def array(aval: Any) -> Any:
    dtype = aval.numpy_dtype
    if np.issubdtype(dtype, np.integer) or aval.dtype == 'bool':
      return xla.to_device(np.ones(aval.shape, dtype), device)
    # Like weights and activations; equal numbers would be computed faster.
    return xla.to_device((random.normal(size=aval.shape) * 0.05).astype(dtype), device)

  inputs = {key: [array(aval) for aval in e.inputs] for key, e in executables.items()}

  def run_once(run: Run) -> float:
    executable, program = executables[run.executable], programs[run.executable]
    args = list(inputs[run.executable])
    for position in program.donated:
      args[position] = array(executable.inputs[position])
    start = time.perf_counter()
    results = program.execute(args)
    for result in results[:1]:
      xla.block(result)
    return time.perf_counter() - start

  for run in {run.executable: run for run in runs}.values():
    run_once(run)
  print('ready', flush=True)
  sys.stdin.readline()
  seconds = [[run_once(run) for run in runs] for _ in range(rounds)]
  total: collections.Counter = collections.Counter()
  for run, *times in zip(runs, *seconds):
    kind = run.label.strip('0123456789')[:1] if run.stage is not None else run.label
    total[kind] += statistics.median(times)
  print(json.dumps(total), flush=True)
  sys.stdin.readline()  # until the others have ended too, so that no core is free


def main() -> None:
  """Prints the limit of one step as JSON."""
  name, text = sys.argv[1:3]
  from integration.bench import core_step
  from integration.bench import pax_step

  module, model = (pax_step, pax_step.Model) if name == 'mpmd' else (core_step, core_step.Gpt)
  limit = measure(lambda runtime: module.build(name, model(**json.loads(text)), runtime))
  print(json.dumps(dataclasses.asdict(limit)), flush=True)


if __name__ == '__main__':
  if sys.argv[1] == 'child':
    _child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
  else:
    main()
