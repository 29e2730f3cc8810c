"""Step times of Pax's SPMD pipelining and of MPMD pipelining, side by side.

Both sides train the same experiment on the same batches with the same microbatches,
rematerialisation and cores. Each side is a process of its own that keeps its state; they take
turns, one idle while the other runs, so that a machine whose speed drifts slows both.

  python -m integration.bench_vs_spmd [--microbatches 8] [--rounds 5] [--steps 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time


def main() -> None:
  """Parses the flags and runs the comparison, or one side of it."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n', maxsplit=1)[0])
  parser.add_argument('--microbatches', type=int, default=8)
  parser.add_argument('--layers', type=int, default=8)
  parser.add_argument('--width', type=int, default=256)
  parser.add_argument('--length', type=int, default=128)
  parser.add_argument('--vocab', type=int, default=4096)
  parser.add_argument('--batch', type=int, default=16)
  parser.add_argument('--circular_repeat', type=int, default=1)
  parser.add_argument('--stages', type=int, default=4)
  parser.add_argument('--schedule', default=None, help='default: 1f1b, interleaved if circular')
  parser.add_argument('--rounds', type=int, default=5, help='turns of each side')
  parser.add_argument('--steps', type=int, default=4, help='steps in a turn')
  parser.add_argument('--json', default=None, help='also write the figures to this file')
  parser.add_argument('--side', choices=('spmd', 'mpmd'), help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.side:
    _serve(args)
  else:
    _compare(args)


def _compare(args: argparse.Namespace) -> None:
  sides = {}
  for side in ('spmd', 'mpmd'):
    env = dict(os.environ, JAX_PLATFORMS='cpu', TF_CPP_MIN_LOG_LEVEL='3')
    env['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={args.stages}'
    sides[side] = subprocess.Popen(
        [sys.executable, '-m', 'integration.bench_vs_spmd', *sys.argv[1:], '--side', side],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=sys.stderr if os.environ.get('BENCH_VERBOSE') else subprocess.DEVNULL,
        text=True,
        env=env,
    )
    # One after the other, so that neither compiles on the other's time.
    started = _ask(sides[side], 'ready')
    print(f'{side}: ready, first step after {started["seconds"]:.1f} s', flush=True)
  times: dict[str, list[float]] = {'spmd': [], 'mpmd': []}
  losses = {}
  try:
    for turn in range(args.rounds):
      for side in ('spmd', 'mpmd'):
        reply = _ask(sides[side], f'run {args.steps}')
        times[side].append(reply['seconds'] / args.steps)
        losses[side] = reply['loss']
      s, m = times['spmd'][-1], times['mpmd'][-1]
      line = f'round {turn}: spmd {s:.3f} s/step, mpmd {m:.3f} s/step, ratio {s / m:.2f}'
      print(line, flush=True)
  finally:
    for process in sides.values():
      process.stdin.close()
      process.wait(60)
  ratios = [s / m for s, m in zip(times['spmd'], times['mpmd'])]
  print(
      f'\n{args.stages} stages, {args.layers} layers, width {args.width}, length {args.length},'
      f' vocabulary {args.vocab}, batch {args.batch}, {args.microbatches} microbatches,'
      f' circular_repeat {args.circular_repeat}; {os.cpu_count()} cores, {platform.machine()}'
  )
  for side in times:
    t = times[side]
    print(
        f'{side}: median {statistics.median(t):.3f} s/step (min {min(t):.3f}, max {max(t):.3f}),'
        f' {1 / statistics.median(t):.2f} steps/s, last loss {losses[side]:.5f}'
    )
  print(
      f'spmd time / mpmd time: median {statistics.median(ratios):.2f}'
      f' (min {min(ratios):.2f}, max {max(ratios):.2f})'
  )
  if args.json:
    with open(args.json, 'w', encoding='utf-8') as f:
      json.dump({'args': vars(args), 'times': times, 'ratios': ratios}, f, indent=1)


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


def _serve(args: argparse.Namespace) -> None:
  """One side: answers 'ready' and 'run N' on stdin with a JSON line each."""
  begin = time.monotonic()
  step, close = _build(args)
  step()
  seconds = time.monotonic() - begin
  for line in sys.stdin:
    words = line.split()
    if words[0] == 'ready':
      print(json.dumps({'seconds': seconds}), flush=True)
      continue
    start = time.monotonic()
    for _ in range(int(words[1])):
      loss = step()
    loss = float(loss())
    print(json.dumps({'seconds': time.monotonic() - start, 'loss': loss}), flush=True)
  close()


def _build(args: argparse.Namespace):
  """The side's step: calling it starts a step and returns what fetches its loss."""
  import jax
  from jax import numpy as jnp
  import numpy as np
  from paxml import partitioning
  from paxml import trainer_lib
  from paxml.tasks.lm.params import lm_cloud
  from praxis import base_hyperparams
  from praxis import py_utils

  from pax_mpmd import schedules
  from pax_mpmd.pax import backend as backend_lib
  from pax_mpmd.pax import partitioner as partitioner_lib
  from pax_mpmd.pax import transform
  from pax_mpmd.runtime.ray_runtime import RayRuntime

  class Experiment(lm_cloud.LmCloudSpmdPipeline):
    NUM_LAYERS = args.layers
    NUM_STAGES = args.stages
    CIRCULAR_REPEAT = args.circular_repeat
    NUM_MICROBATCHES = args.microbatches
    MICROBATCH_SIZE = None
    MODEL_DIMS = args.width
    HIDDEN_DIMS = args.width * 4
    NUM_HEADS = 4
    DIMS_PER_HEAD = args.width // 4
    VOCAB_SIZE = args.vocab
    MAX_SEQ_LEN = args.length
    FPROP_DTYPE = jnp.float32
    ICI_MESH_SHAPE = [args.stages, 1, 1, 1]

  def batch(seed: int):
    rng = np.random.RandomState(seed)
    shape = (args.batch, args.length)
    ids, labels = rng.randint(1, args.vocab, size=(2, *shape)).astype(np.int32)
    return py_utils.NestedMap(
        ids=ids,
        labels=labels,
        paddings=np.zeros(shape, np.float32),
        weights=np.ones(shape, np.float32),
        segment_ids=np.ones(shape, np.int32),
        segment_pos=np.tile(np.arange(args.length, dtype=np.int32), (args.batch, 1)),
    )

  batches = [batch(i) for i in range(8)]
  specs = jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches[0])
  task_p = Experiment().task()
  task_p.train.variable_norm_summary = False
  close = lambda: None
  if args.side == 'mpmd':
    task_p, pipeline = transform.mpmd_task(task_p)
    task = base_hyperparams.instantiate(task_p)
    name = args.schedule or ('interleaved_1f1b' if args.circular_repeat > 1 else '1f1b')
    backend = backend_lib.Backend(
        schedules.get(name, args.stages * args.circular_repeat, args.stages), RayRuntime()
    )
    close = backend.close
    partitioner = partitioner_lib.MpmdPartitioner(task, pipeline, backend)
  else:
    task = base_hyperparams.instantiate(task_p)
    mesh = np.asarray(jax.devices()[: args.stages]).reshape(Experiment.ICI_MESH_SHAPE)
    partitioner = partitioning.PjitPartitioner(False, True, task, device_mesh=mesh)
  key = jax.random.PRNGKey(1234)
  partitioner.setup(task, key, train_inputs_shape_dtype=specs)
  with partitioner.global_mesh:
    key, state, _ = partitioner.initialize_prng_key_and_train_state(key, None, None)
  fn, _ = partitioner.partition(trainer_lib.train_step_single_learner, specs, False)
  static = trainer_lib.BaseStepFnStaticArgs(unpadded_global_batch_size=args.batch)
  box = {'state': state, 'count': 0}
  key = np.asarray(key)

  def step():
    inputs = batches[box['count'] % len(batches)]
    box['count'] += 1
    box['state'], out = fn(box['state'], key, inputs, static)
    return lambda: np.asarray(out.loss)

  return step, close


if __name__ == '__main__':
  main()
