"""All benchmarks: `python -m integration.bench [--only NAME ...] [--rounds N] [--json FILE]`.

Figures are ratios of sides that take turns, with the same model, batch, microbatches,
rematerialisation and cores. Takes about 20 minutes on two cores; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
from pathlib import Path
import platform
import statistics
import subprocess
import sys
from typing import Any

from integration.bench import alternating
from integration.bench import core_step
from integration.bench import pax_step

_PAX = pax_step.Model()


def _against(names: tuple[str, str], model: Any, module: Any, options: Any) -> dict[str, Any]:
  sides = {name: module.side(name, model) for name in names}
  measured = alternating.measure(sides, options.rounds, options.steps)
  losses = [m.loss for m in measured.values()]
  return {
      'sides': {name: dataclasses.asdict(m) for name, m in measured.items()},
      'ratio': alternating.ratios(measured, *names),
      'loss_difference': max(losses) - min(losses),
  }


def _pax(slow: str, **changes: Any):
  model = dataclasses.replace(_PAX, **changes)
  return lambda options: _against((slow, 'mpmd'), model, pax_step, options)


def _core(slow: str, fast: str):
  return lambda options: _against((slow, fast), core_step.Gpt(), core_step, options)


def _of_limit(name: str, model: Any, module: Any):
  """How near a side comes to the limit of its step on this machine."""

  def run(options: Any) -> dict[str, Any]:
    measured = alternating.measure({name: module.side(name, model)}, options.rounds, options.steps)
    seconds = statistics.median(measured[name].seconds)
    lines = _output('integration.bench.limit', name, json.dumps(dataclasses.asdict(model)))
    limit = json.loads(lines[-1])  # others print too
    kinds = ', '.join(f'{kind} {s:.3f}' for kind, s in limit['by_kind'].items())
    return {
        'limit': limit,
        'seconds': seconds,
        'reached': limit['seconds'] / seconds,
        'lines': [
            f'limit {1 / limit["seconds"]:.3f} steps/s (seconds on one core: {kinds})',
            f'{name} {1 / seconds:.3f} steps/s, {limit["seconds"] / seconds:.2f} of it',
        ],
    }

  return run


def _output(module: str, *args: str) -> list[str]:
  done = subprocess.run(
      [sys.executable, '-m', module, *args], stdout=subprocess.PIPE, text=True, check=True,
      stderr=sys.stderr if os.environ.get('BENCH_VERBOSE') else subprocess.DEVNULL,
      env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'},
  )
  return done.stdout.splitlines()


def _lines_of(module: str):
  return lambda options: {'lines': _output(module)}


BENCHMARKS = {
    'spmd, M = 4': _pax('spmd', microbatches=4),
    'spmd, M = 8': _pax('spmd', microbatches=8),
    'circular spmd, M = 8': _pax('spmd', microbatches=8, circular_repeat=2),
    'data parallel, not pipelined': _pax('data', microbatches=8),
    'limit, M = 8': _of_limit('mpmd', _PAX, pax_step),
    'jax.jit on one device / local': _core('plain', 'local'),
    'jax.jit on one device / ray': _core('plain', 'ray'),
    'jax.jit, 2-way data parallel / ray': _core('data', 'ray'),
    'limit of jax.jit on one device': _of_limit('ray', core_step.Gpt(), core_step),
    'control': _lines_of('integration.bench.control'),
    'channel': _lines_of('integration.bench_channel'),
}


def main() -> None:
  """Runs the benchmarks and prints a line for each."""
  parser = argparse.ArgumentParser('python -m integration.bench', description=__doc__)
  parser.add_argument('--only', nargs='*', choices=list(BENCHMARKS), metavar='NAME')
  parser.add_argument('--rounds', type=int, default=5, help='turns of each side')
  parser.add_argument('--steps', type=int, default=4, help='steps in a turn')
  parser.add_argument('--json', default=None, help='also write the figures to this file')
  options = parser.parse_args()
  results: dict[str, Any] = {'machine': machine(), 'benchmarks': {}}
  print(results['machine'])
  for name, run in BENCHMARKS.items():
    if options.only and name not in options.only:
      continue
    print(f'{name}:', flush=True)
    result = results['benchmarks'][name] = run(options)
    for line in _summary(result):
      print(f'  {line}', flush=True)
    if options.json:
      Path(options.json).write_text(json.dumps(results, indent=1))


def machine() -> str:
  """What the figures are of."""
  import jax

  model = platform.processor() or platform.machine()
  for line in Path('/proc/cpuinfo').read_text().splitlines():
    if line.startswith('model name'):
      model = line.partition(':')[2].strip()
      break
  cores = len(os.sched_getaffinity(0))
  return f'{datetime.date.today()}, {cores} cores of {model}, jax {jax.__version__}'


def _summary(result: dict[str, Any]) -> list[str]:
  if 'lines' in result:
    return result['lines']
  lines = [
      f'{name}: {1 / statistics.median(side["seconds"]):.3f} steps/s,'
      f' first step after {side["first_step"]:.1f} s'
      for name, side in result['sides'].items()
  ]
  r = result['ratio']
  lines.append(
      f'ratio of step times: {r["median"]:.2f} ({r["min"]:.2f} to {r["max"]:.2f});'
      f' losses differ by {result["loss_difference"]:.1e}'
  )
  return lines


if __name__ == '__main__':
  main()
