"""Step times of several ways to run the same steps, which take turns.

Each side is a process of its own that keeps its state, and is idle while another runs, so that a
machine whose speed drifts slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

__all__ = ['Measured', 'Side', 'measure', 'ratios', 'serve', 'side']

Step = Callable[[], Callable[[], Any]]
# The arguments of the Python that calls `serve`, and variables of its environment.
Side = tuple[Sequence[str], Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Measured:
  """What one side took.

  Attributes:
    seconds: per step, one number for each turn.
    first_step: seconds from the start of the process to the end of its first step.
    loss: of the last step.
  """

  seconds: tuple[float, ...]
  first_step: float
  loss: float


def side(module: str, name: str, model: Any, devices: int) -> Side:
  """A side of a module that calls `serve`.

  Args:
    module: its name.
    name: of the side, its first argument.
    model: a dataclass, its second argument as JSON.
    devices: host devices of its JAX.
  """
  env = {'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'}
  return ['-m', module, name, json.dumps(dataclasses.asdict(model))], env


def measure(sides: Mapping[str, Side], rounds: int, steps: int) -> dict[str, Measured]:
  """Runs all sides in turns.

  Args:
    sides: by name.
    rounds: how many turns each has.
    steps: how many steps a turn has.
  """
  processes: dict[str, subprocess.Popen] = {}
  first: dict[str, float] = {}
  seconds: dict[str, list[float]] = {name: [] for name in sides}
  losses: dict[str, float] = {}
  try:
    for name, (command, env) in sides.items():
      processes[name] = subprocess.Popen(
          [sys.executable, *command],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=sys.stderr if os.environ.get('BENCH_VERBOSE') else subprocess.DEVNULL,
          text=True,
          env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3', **env},
      )
      # One after the other, so that none compiles on another's time.
      first[name] = _ask(processes[name], 'ready')['seconds']
      print(f'  {name}: first step after {first[name]:.1f} s', flush=True)
    for turn in range(rounds):
      for name, process in processes.items():
        reply = _ask(process, f'run {steps}')
        seconds[name].append(reply['seconds'] / steps)
        losses[name] = reply['loss']
      print(
          f'  round {turn}: ' + ', '.join(f'{n} {s[-1]:.3f} s/step' for n, s in seconds.items()),
          flush=True,
      )
  finally:
    for process in processes.values():
      process.stdin.close()
      process.wait(60)
  return {
      name: Measured(tuple(seconds[name]), first[name], losses.get(name, float('nan')))
      for name in sides
  }


def ratios(measured: Mapping[str, Measured], slow: str, fast: str) -> dict[str, float]:
  """Time of `slow` over that of `fast`, turn by turn: median, least and greatest."""
  values = [s / f for s, f in zip(measured[slow].seconds, measured[fast].seconds)]
  return {'median': statistics.median(values), 'min': min(values), 'max': max(values)}


def _ask(process: subprocess.Popen, question: str) -> dict:
  process.stdin.write(question + '\n')
  process.stdin.flush()
  for line in process.stdout:
    if line.startswith('{'):
      return json.loads(line)
  raise SystemExit(
      'one side ended early; run again with BENCH_VERBOSE=1 to see its messages:'
      f' {" ".join(process.args)}'
  )


def serve(build: Callable[[], tuple[Step, Callable[[], None]]]) -> None:
  """One side: answers 'ready' and 'run N' on stdin with a JSON line each, until it is closed.

  Args:
    build: gives the step and what to call at the end. Calling the step starts one and returns what
      fetches its loss.
  """
  begin = time.monotonic()
  step, close = build()
  float(step()())
  first = time.monotonic() - begin
  for line in sys.stdin:
    words = line.split()
    if words[0] == 'ready':
      print(json.dumps({'seconds': first}), flush=True)
      continue
    start = time.monotonic()
    for _ in range(int(words[1])):
      loss = step()
    value = float(loss())
    print(json.dumps({'seconds': time.monotonic() - start, 'loss': value}), flush=True)
  close()
