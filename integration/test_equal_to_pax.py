"""Experiments trained through MPMD against the same ones trained by stock Pax."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import json
from pathlib import Path
import re

import numpy as np
import pytest

from integration import stock

STEPS = list(range(1, 11))
# How fast it was, which isn't the same twice.
SPEED_TAGS = {'Steps/sec'}

# name: experiment, schedule, runtime; the schedule is the default where it is None.
MPMD_RUNS = {
    'gpipe-ray': ('TinyPipelined', 'gpipe', 'ray'),
    '1f1b-ray': ('TinyPipelined', '1f1b', 'ray'),
    'zb_h1-ray': ('TinyPipelined', 'zb_h1', 'ray'),
    'gpipe-local': ('TinyPipelined', 'gpipe', 'local'),
    '1f1b-local': ('TinyPipelined', '1f1b', 'local'),
    'interleaved-ray': ('TinyCircular', None, 'ray'),
    'interleaved-local': ('TinyCircular', 'interleaved_1f1b', 'local'),
}
# Those that write a trace beside.
TRACED = ('zb_h1-ray', 'gpipe-local')
each_run = pytest.mark.parametrize('name', MPMD_RUNS)


@pytest.fixture(scope='module')
def run(
    submit: Callable[..., futures.Future],
    stock_run: futures.Future[stock.Run],
    undisturbed: futures.Future[stock.Run],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], stock.Run]:
  """A function that waits for a run by name: one of MPMD_RUNS or an experiment by stock Pax."""
  runs = {'TinyPipelined': stock_run, '1f1b-ray': undisturbed}

  def start(name: str, experiment: str, *args: str, **kwargs) -> None:
    folder: Path = tmp_path_factory.mktemp(name)
    experiment = f'integration.experiments.{experiment}'
    runs[name] = submit(stock.run_pax, experiment, folder, *args, timeout=600, **kwargs)

  for name, (experiment, schedule, runtime) in MPMD_RUNS.items():
    if experiment not in runs:
      start(experiment, experiment, devices=8)
    if name in runs:
      continue
    args = ['--mpmd', f'--mpmd_runtime={runtime}']
    if schedule:
      args.append(f'--mpmd_schedule={schedule}')
    if name in TRACED:
      args.append('--mpmd_trace_steps=2')
    start(name, experiment, *args, module='pax_mpmd.main')
  return lambda name: runs[name].result()


@pytest.fixture
def stock_of(run: Callable[[str], stock.Run]) -> Callable[[str], stock.Run]:
  """A function that waits for the stock run of the experiment of an MPMD run."""
  return lambda name: run(MPMD_RUNS[name][0])


@each_run
def test_scalars(name: str, run, stock_of):
  """Each scalar of each step is Pax's: losses, weighted scalars, norms, summaries of layers."""
  theirs = stock.scalars(stock_of(name).job_log_dir)
  ours = stock.scalars(run(name).job_log_dir)
  assert ours.keys() == theirs.keys()
  for tag in ('loss', 'Metrics/total_loss', 'Metrics/total_loss-weight',
              'learning/raw_grad_norm_scalar'):
    assert sorted(ours[tag]) == STEPS, tag
  # Clipping is at work in each step, so the norm decides how large the step is.
  assert all(scale < 0.99 for scale in theirs['learning/grad_scale_scalar'].values())
  for tag in theirs.keys() - SPEED_TAGS:
    assert ours[tag].keys() == theirs[tag].keys(), tag
    steps = sorted(theirs[tag])
    np.testing.assert_allclose(
        [ours[tag][step] for step in steps],
        [theirs[tag][step] for step in steps],
        rtol=2e-5,
        err_msg=tag,
    )


@each_run
def test_checkpoint(name: str, run, stock_of):
  """The final parameters and the Adam moments are Pax's, in the same files."""
  theirs, ours = stock_of(name).job_log_dir, run(name).job_log_dir
  assert stock.checkpoint_steps(ours) == stock.checkpoint_steps(theirs) == [0, 10]
  theirs, ours = stock.checkpoint_arrays(theirs), stock.checkpoint_arrays(ours)
  assert ours.keys() == theirs.keys()
  moments = [leaf for leaf in theirs if re.match(r'opt_states.*\.[mv]\.', leaf)]
  assert moments and all(np.any(theirs[leaf]) for leaf in moments)
  for leaf, expected in theirs.items():
    assert ours[leaf].dtype == expected.dtype and ours[leaf].shape == expected.shape, leaf
    error = np.max(np.abs(ours[leaf].astype(np.float64) - expected), initial=0.0)
    assert error <= 1e-4 * np.max(np.abs(expected), initial=0.0), (leaf, error)


@each_run
def test_same_files(name: str, run, stock_of):
  """The first checkpoint is Pax's bit for bit, and the summaries lie in the same folders."""
  theirs, ours = stock_of(name).job_log_dir, run(name).job_log_dir
  arrays = stock.checkpoint_arrays(ours, 0)
  for leaf, expected in stock.checkpoint_arrays(theirs, 0).items():
    np.testing.assert_array_equal(arrays[leaf], expected, err_msg=leaf)
    assert arrays[leaf].dtype == expected.dtype
  folders = [sorted(p.name for p in (d / 'summaries').iterdir()) for d in (theirs, ours)]
  assert folders[0] == folders[1]


@pytest.mark.parametrize('name', TRACED)
def test_trace(name: str, run):
  """`--mpmd_trace_steps` writes the train step's trace, picture and table, and says so."""
  done = run(name)
  folder = done.job_log_dir / 'mpmd_trace'
  assert f'trace of 2 steps: {folder / "train_step.json"}' in done.output
  trace = json.loads((folder / 'train_step.json').read_text())
  tasks = [e for e in trace['traceEvents'] if e['ph'] == 'X' and 'stage' in e['args']]
  stages = {e['args']['stage'] for e in tasks}
  assert stages == set(range(4))
  # Two measured steps and the plan have the same tasks.
  assert len(tasks) % 3 == 0 and len(tasks) >= 3 * 4 * 2
  assert (folder / 'train_step.svg').read_text().startswith('<svg')
  assert 'critical path' in (folder / 'train_step.txt').read_text()


@pytest.mark.parametrize('runtime', ['ray', 'local'])
def test_schedules_agree_bit_for_bit(runtime: str, run):
  """Schedules that add each gradient in the same order end in the same bits.

  The runtimes don't: threads of one process share XLA's thread pool, which splits sums otherwise.
  """
  expected = stock.checkpoint_arrays(run(f'1f1b-{runtime}').job_log_dir)
  arrays = stock.checkpoint_arrays(run(f'gpipe-{runtime}').job_log_dir)
  assert arrays.keys() == expected.keys()
  for leaf in expected:
    np.testing.assert_array_equal(arrays[leaf], expected[leaf], err_msg=leaf)


@each_run
def test_ends_promptly(name: str, run):
  """Once a run has said its last words, its process is gone within seconds."""
  assert run(name).seconds_after_last_words < stock.PROMPTLY_S
