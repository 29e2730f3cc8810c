"""Time from a device array in one process to a device array in another, over shared memory.

Sends arrays to and fro between two processes and prints half a round trip, and the overhead of
the interpreter per instruction. `python -m integration.bench_channel`; takes a few seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import uuid

import numpy as np

_SIZES = {'4 kB': 4 << 10, '64 kB': 64 << 10, '1 MB': 1 << 20, '8 MB': 8 << 20, '32 MB': 32 << 20}
_REPEATS = 60


def _bounce(actor: int, run_id: str, barrier, results) -> None:
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = '--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1'
  from pax_mpmd.compile.program import Aval
  from pax_mpmd.runtime import shm_channel
  from pax_mpmd.runtime import xla
  from pax_mpmd.runtime.devices import ActorDevices

  device = xla.local_devices()[0]
  measured = {}
  transports = []
  for name, nbytes in _SIZES.items():
    # A channel of its own, as a plan with messages of this size would have.
    devices = ActorDevices([device])
    transport = shm_channel.ShmTransport(f'{run_id}/{nbytes}', actor, b'secret', devices)
    transports.append(transport)
    barrier.wait()  # both listen now
    out = transport.outgoing(1 - actor, nbytes)
    back = transport.incoming(1 - actor)
    # The first time round the ring, its memory is new.
    num_first = max(_REPEATS // 4, shm_channel._MIN_RING // nbytes + 1)
    aval = Aval((nbytes // 4,), 'float32')
    array = xla.to_device(np.ones(aval.shape, aval.dtype), device)
    times = []
    for _ in range(num_first + _REPEATS):
      start = time.perf_counter()
      if actor == 0:
        out.send([array], name)
      (array,) = back.post([aval], name).wait()
      if actor == 1:
        out.send([array], name)
      times.append((time.perf_counter() - start) / 2)
    measured[name] = times[num_first:]
  if actor == 0:
    results.put(measured)
  barrier.wait()  # whoever leaves first closes the channel


def _instruction_overhead() -> float:
  """Seconds per Run of a program that does next to nothing."""
  os.environ['JAX_PLATFORMS'] = 'cpu'
  from pax_mpmd.compile.program import Aval
  from pax_mpmd.runtime.local import LocalRuntime
  from tests.runtime import plans

  scalar = Aval((), 'float32')
  add = plans.executable(lambda x, y: (x + y, y), [scalar, scalar], donated=(0,))
  count = 2000

  def write(a):
    a.input('x0', scalar).input('y0', scalar)
    for i in range(count):
      a.run(add, f'x{i} y{i}', f'x{i + 1} y{i + 1}', '0F0', 0)
    return [f'x{count}']

  with LocalRuntime() as runtime:
    runtime.start(1)
    handle = runtime.load(plans.build(1, write))
    times = []
    for _ in range(5):
      start = time.perf_counter()
      runtime.wait(runtime.run(handle, [[np.float32(0), np.float32(1)]])[0])
      times.append(time.perf_counter() - start)
  return min(times) / count


def main() -> None:
  """Runs the benchmark and prints a table."""
  context = multiprocessing.get_context('spawn')
  run_id = uuid.uuid4().hex
  results = context.SimpleQueue()
  args = (run_id, context.Barrier(2, timeout=60), results)
  processes = [context.Process(target=_bounce, args=(a, *args)) for a in (0, 1)]
  for process in processes:
    process.start()
  measured = results.get()
  for process in processes:
    process.join()
  print(f'{"message":>8} {"median":>10} {"10%":>10} {"90%":>10} {"GB/s":>6}')
  for name, times in measured.items():
    low, *_, high = statistics.quantiles(times, n=10)
    median = statistics.median(times)
    row = ' '.join(f'{t * 1e6:7.0f} us' for t in (median, low, high))
    print(f'{name:>8} {row} {_SIZES[name] / median / 1e9:6.2f}')
  print(f'{_instruction_overhead() * 1e6:.1f} us per instruction')


if __name__ == '__main__':
  main()
