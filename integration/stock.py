"""Runs Pax command lines in a process of their own and reads what they leave behind.

The files are read without the model: scalars from the TensorBoard event files, arrays straight
from the checkpoint's own layout.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import os
from pathlib import Path
import sys

import numpy as np

from integration import live

__all__ = ['checkpoint_arrays', 'checkpoint_steps', 'environment', 'Run', 'run_pax', 'scalars']

REPOSITORY = Path(__file__).resolve().parent.parent

# How long a process may take to end after its last words, on a machine that is busy.
PROMPTLY_S = 15


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished command line.

  Attributes:
    job_log_dir: where it left its checkpoints and summaries.
    output: what it printed, both streams together.
    seconds: how long it took.
    seconds_after_last_words: from its last line of output to its end.
  """

  job_log_dir: Path
  output: str
  seconds: float
  seconds_after_last_words: float


def environment(
    devices: int | None = None, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
  """Returns the environment of a run on CPUs.

  XLA compiles with few optimizations: compiling takes most of the time of such short runs.

  Args:
    devices: how many host devices JAX makes of the CPU; None leaves that to the program.
    extra: variables to add.
  """
  env = dict(os.environ)
  env.update(
      JAX_PLATFORMS='cpu',
      JAX_DISABLE_MOST_OPTIMIZATIONS='1',
      TF_CPP_MIN_LOG_LEVEL='2',
      PYTHONUNBUFFERED='1',
  )
  env.pop('XLA_FLAGS', None)
  if devices is not None:
    env['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={devices}'
  env.update(extra or {})
  return env


def run_pax(
    experiment: str | None,
    job_log_dir: Path,
    *args: str,
    module: str = 'paxml.main',
    devices: int | None = None,
    extra_env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> Run:
  """Runs `python -m module --exp=experiment --job_log_dir=... args` to its end.

  Args:
    experiment: the full name of a registered experiment; None where other flags give it.
    job_log_dir: where the run keeps its files.
    *args: more flags.
    module: `paxml.main` or `pax_mpmd.main`.
    devices: host devices for JAX; None means 4 for `paxml.main`, whose mesh has to fit, and none
      set for others.
    extra_env: environment variables to add.
    timeout: seconds after which the run, with all that it started, is killed.

  Raises:
    AssertionError: it failed or took too long; the message ends with what it printed last.
  """
  if devices is None and module == 'paxml.main':
    devices = 4
  names = [] if experiment is None else [f'--exp={experiment}']
  command = [sys.executable, '-m', module, *names, f'--job_log_dir={job_log_dir}', *args]
  with live.Live(command, environment(devices, extra_env), REPOSITORY) as process:
    status = process.wait(timeout)
    if status:
      raise AssertionError(process.failure(f'ended with {status}'))
    return Run(
        Path(job_log_dir), process.output, process.seconds, process.seconds_after_last_words
    )


def scalars(job_log_dir: Path, kind: str = 'train') -> dict[str, dict[int, float]]:
  """Reads the scalar summaries of a run, as {tag: {step: value}}.

  Args:
    job_log_dir: the run's folder.
    kind: a folder below `summaries`: 'train', or 'eval_test_' and the name of a test input.
  """
  import tensorflow as tf

  result: dict[str, dict[int, float]] = {}
  files = sorted((Path(job_log_dir) / 'summaries' / kind).glob('events.out.tfevents.*'))
  for file in files:
    for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
      event = tf.compat.v1.Event.FromString(record)
      for value in event.summary.value:
        number = _scalar(tf, value)
        if number is not None:
          result.setdefault(value.tag, {})[event.step] = number
  return result


def checkpoint_steps(job_log_dir: Path) -> list[int]:
  """Returns the steps of the finished checkpoints of a run, in order."""
  folder = Path(job_log_dir) / 'checkpoints'
  names = [path.name for path in folder.glob('checkpoint_*') if path.name[11:].isdigit()]
  return sorted(int(name.removeprefix('checkpoint_')) for name in names)


def checkpoint_arrays(job_log_dir: Path, step: int | None = None) -> dict[str, np.ndarray]:
  """Reads the arrays of a checkpoint by their name on disk, such as `mdl_vars.params.lm...`.

  Args:
    job_log_dir: the run's folder.
    step: which checkpoint; the latest if None.

  Raises:
    FileNotFoundError: there is no such checkpoint.
  """
  import tensorstore as ts

  if step is None:
    steps = checkpoint_steps(job_log_dir)
    if not steps:
      raise FileNotFoundError(f'{job_log_dir} holds no finished checkpoint')
    step = steps[-1]
  folder = Path(job_log_dir) / 'checkpoints' / f'checkpoint_{step:08d}' / 'state'
  if not folder.is_dir():
    raise FileNotFoundError(f'no checkpoint of step {step}: {folder} is not a folder')
  arrays = {}
  for metadata in sorted(folder.rglob('.zarray')):
    name = metadata.parent.relative_to(folder).as_posix()
    spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{metadata.parent}/'}}
    arrays[name] = np.asarray(ts.open(spec, open=True).result().read().result())
  return arrays


def _scalar(tf, value) -> float | None:
  """Returns the number in a summary value, None where it holds something else."""
  if value.WhichOneof('value') == 'simple_value':
    return float(value.simple_value)
  if value.WhichOneof('value') == 'tensor' and value.metadata.plugin_data.plugin_name == 'scalars':
    return float(tf.make_ndarray(value.tensor))
  return None

