"""How long it takes to compile, plan and verify large steps, and how that grows.

Plans the tests' transformer (tied embedding, rematerialized blocks, global-norm clipping, Adam)
for many stages and microbatches; nothing runs. All of it is one thread of Python, so times are the
CPU's, which say the same on a busy machine; the wall's is shown beside them.
`python -m integration.bench_size` takes about a minute and a half, `--quick` plans only the
largest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import time
from typing import Any
from unittest import mock

import numpy as np

import pax_mpmd as mpmd
from pax_mpmd import plan as planning
from pax_mpmd import schedules
from pax_mpmd.compile import step as compiling
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.runtime import step as stepping
from pax_mpmd.runtime.step import PlannedStep
from tests.core import transformer

ACTORS = 16
LIMIT_SECONDS = 30  # for 64 stages, 16 actors and 256 microbatches
_CASES = [(64, 32), (64, 64), (64, 128), (64, 256), (32, 256), (16, 256)]
_PASSES = {
    'trace': [(stepping, 'trace_step')],
    'cut': [(compiling, n) for n in ('flatten_branches', 'merge_repeats', 'unstack',
                                     'delay_shared_sums', 'partition', 'place')],
    'export': [(compiling, 'export')],
    'lower': [(stepping, 'checked_tasks'), (planning, 'lower')],
    'verify': [(planning, 'verify'), (planning, 'verify_values')],
}


@dataclasses.dataclass(frozen=True)
class Size:
  """What planning one step took and gave: CPU seconds, by part and in all, and counts."""

  seconds: dict[str, float]
  total_seconds: float
  wall_seconds: float
  tasks: int
  instructions: int
  messages: int
  programs: int
  programs_of_actor: int  # the most that one actor has


@contextlib.contextmanager
def _timed() -> Iterator[dict[str, float]]:
  """Adds up the CPU seconds that are spent in each of _PASSES."""
  spent = dict.fromkeys(_PASSES, 0.0)

  def wrap(part: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args, **kwargs):
      start = time.process_time()
      try:
        return fn(*args, **kwargs)
      finally:
        spent[part] += time.process_time() - start

    return run

  with contextlib.ExitStack() as stack:
    for part, functions in _PASSES.items():
      for module, name in functions:
        fn = getattr(module, name)
        stack.enter_context(mock.patch.object(module, name, wrap(part, fn)))
    yield spent


def plan(num_stages: int, num_microbatches: int, schedule: schedules.Schedule) -> PlannedStep:
  """Plans the transformer's training step."""
  fn = mpmd.mpmd_jit(transformer.train_step, schedule=schedule, runtime=mpmd.LocalRuntime(),
                     donate_argnums=0)
  return fn.plan(transformer.init(num_stages), transformer.batch(num_microbatches))


def measure(num_stages: int, num_microbatches: int) -> Size:
  """Plans for the interleaved schedule."""
  schedule = schedules.InterleavedOneFOneB(num_stages=num_stages, num_actors=ACTORS)
  with _timed() as seconds:
    start = time.process_time(), time.perf_counter()
    planned = plan(num_stages, num_microbatches, schedule)
    total, wall = time.process_time() - start[0], time.perf_counter() - start[1]
  lists = [actor.instructions for actor in planned.plan.actors]
  return Size(
      seconds=seconds,
      total_seconds=total,
      wall_seconds=wall,
      tasks=len(planned.program.tasks) * num_microbatches,
      instructions=sum(map(len, lists)),
      messages=sum(isinstance(i, Send) for x in lists for i in x),
      programs=len(planned.program.executables),
      programs_of_actor=max(len({i.executable for i in x if isinstance(i, Run)}) for x in lists),
  )


def main() -> None:
  """Runs the benchmark and prints a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='only the largest step')
  quick = parser.parse_args().quick
  cases = [max(_CASES)] if quick else _CASES
  measure(ACTORS, 16)  # imports and warms up
  heads = ['stages', 'microb.', 'tasks', 'instr.', 'messages', 'programs', '/actor']
  print(' '.join(f'{h:>8}' for h in [*heads, *_PASSES, 'total', 'wall', 'us/task']))
  sizes = {}
  for case in cases:
    sizes[case] = size = measure(*case)
    counts = [*case, size.tasks, size.instructions, size.messages, size.programs,
              size.programs_of_actor]
    times = [f'{t:.2f} s' for t in [*size.seconds.values(), size.total_seconds, size.wall_seconds]]
    times.append(f'{(size.seconds["lower"] + size.seconds["verify"]) / size.tasks * 1e6:.0f}')
    print(' '.join(f'{x:>8}' for x in [*counts, *times]), flush=True)
  if not quick:
    _print_fit('microbatches', {m: sizes[64, m] for s, m in cases if s == 64})
    _print_fit('stages', {s: sizes[s, 256] for s, m in cases if m == 256})
  largest = sizes[max(_CASES)]
  print(f'64 stages, 16 actors, 256 microbatches: {largest.total_seconds:.1f} s of the CPU'
        f' (the limit is {LIMIT_SECONDS} s), {largest.wall_seconds:.1f} s in all')
  raise SystemExit(largest.total_seconds > LIMIT_SECONDS)


def _print_fit(what: str, sizes: dict[int, Size]) -> None:
  """How the time grows: seconds = fixed + slope * n, and the exponent of n between the ends."""
  ns = sorted(sizes)
  for part in ('lower + verify', 'total'):
    times = [
        sizes[n].total_seconds if part == 'total'
        else sizes[n].seconds['lower'] + sizes[n].seconds['verify']
        for n in ns
    ]
    slope, fixed = np.polyfit(ns, times, 1)
    worst = max(abs(fixed + slope * n - t) / t for n, t in zip(ns, times))
    exponent = np.log(times[-1] / times[0]) / np.log(ns[-1] / ns[0])
    print(f'{part}: {fixed:.2f} s + {slope * 1e3:.1f} ms for each of the {what}, all within'
          f' {worst:.0%}; grows as their power {exponent:.2f}')


if __name__ == '__main__':
  main()
