"""The helper that the comparisons with Pax rest on."""

from __future__ import annotations

import os
from pathlib import Path
import time

import numpy as np
import pytest
import tensorflow as tf
import tensorstore as ts

from integration import stock


@pytest.fixture
def module(tmp_path: Path):
  """Returns a function that runs Python code as the module of a command line."""

  def run(code: str, timeout: float = 60, **extra_env: str) -> stock.Run:
    (tmp_path / 'made_up_main.py').write_text(code)
    env = {'PYTHONPATH': f'{stock.REPOSITORY}:{tmp_path}', **extra_env}
    return stock.run_pax(
        'a.b', tmp_path, '--more', module='made_up_main', extra_env=env, timeout=timeout
    )

  return run


def test_runs_a_command_line(module, tmp_path: Path):
  """The module gets the flags and the environment, and its output comes back."""
  run = module('import os, sys; print(sys.argv[1:], os.environ["JAX_PLATFORMS"], os.environ["X"])',
               X='y')
  assert run.output == f"['--exp=a.b', '--job_log_dir={tmp_path}', '--more'] cpu y\n"
  assert run.job_log_dir == tmp_path


def test_failure_shows_what_was_printed_last(module):
  """A failing run raises with its exit status and the end of its output."""
  with pytest.raises(AssertionError, match=r'(?s)ended with 3: .*made_up_main.*the reason'):
    module('import sys; print("the reason"); sys.exit(3)')


def test_timeout_ends_the_whole_family(module, tmp_path: Path):
  """A run that takes too long is killed together with the processes that it started."""
  code = (
      'import pathlib, subprocess, sys, time\n'
      'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])\n'
      f'pathlib.Path({str(tmp_path)!r}, "pid").write_text(str(child.pid))\n'
      'print("started", flush=True)\n'
      'time.sleep(60)\n'
  )
  with pytest.raises(AssertionError, match=r'(?s)took over 3 s: .*started'):
    module(code, timeout=3)
  pid = int((tmp_path / 'pid').read_text())
  deadline = time.monotonic() + 5
  while _runs(pid) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not _runs(pid)


def test_reads_scalars_of_each_kind(tmp_path: Path):
  """Both forms in which TensorBoard keeps a scalar are read, and nothing else."""
  with tf.summary.create_file_writer(str(tmp_path / 'summaries' / 'train')).as_default():
    for step in (1, 2):
      tf.summary.scalar('loss', 0.5 * step, step=step)
      tf.summary.histogram('weights', [1.0, 2.0], step=step)
  with tf.compat.v1.Graph().as_default():
    old = tf.compat.v1.summary.FileWriter(str(tmp_path / 'summaries' / 'eval_test_x'))
    value = tf.compat.v1.Summary.Value(tag='loss', simple_value=3.0)
    old.add_summary(tf.compat.v1.Summary(value=[value]), 7)
    old.close()

  assert stock.scalars(tmp_path) == {'loss': {1: 0.5, 2: 1.0}}
  assert stock.scalars(tmp_path, 'eval_test_x') == {'loss': {7: 3.0}}


def test_reads_the_arrays_of_the_latest_checkpoint(tmp_path: Path):
  """Arrays come back by name; folders that are still being written don't count."""
  arrays = {'mdl_vars.params.w': np.arange(6, dtype=np.float32).reshape(2, 3),
            'step': np.asarray(10, np.uint32)}
  for folder, scale in (('checkpoint_00000005', 0), ('checkpoint_00000010', 1),
                        ('checkpoint_00000015.orbax-checkpoint-tmp-17', 2)):
    for name, array in arrays.items():
      path = tmp_path / 'checkpoints' / folder / 'state' / name
      spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{path}/'}}
      store = ts.open(spec, create=True, dtype=array.dtype.name, shape=array.shape).result()
      store.write(array * array.dtype.type(scale)).result()

  assert stock.checkpoint_steps(tmp_path) == [5, 10]
  read = stock.checkpoint_arrays(tmp_path)
  assert read.keys() == arrays.keys()
  for name, array in arrays.items():
    np.testing.assert_array_equal(read[name], array)
    assert read[name].dtype == array.dtype
  assert not stock.checkpoint_arrays(tmp_path, 5)['mdl_vars.params.w'].any()
  with pytest.raises(FileNotFoundError, match='no checkpoint of step 15'):
    stock.checkpoint_arrays(tmp_path, 15)


def _runs(pid: int) -> bool:
  """Whether a process is there and not just waiting to be reaped."""
  try:
    os.kill(pid, 0)
    return Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'
  except (ProcessLookupError, FileNotFoundError):
    return False
