"""What `make demo` runs: trains an experiment through pax_mpmd, then says what came of it.

Training is the command line that it prints, in a process of its own. Where that doesn't come to its
end, what it has reached is read from its files: TensorBoard summaries and checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

DEFAULT_EXPERIMENT = 'configs.stdlib_lm.StdlibLm'


def main(argv: Sequence[str] | None = None) -> int:
  """Trains and sums up; returns the exit status."""
  parser = argparse.ArgumentParser(prog='python -m configs.demo', description=__doc__)
  parser.add_argument('--exp', default=DEFAULT_EXPERIMENT, help='the experiment to train')
  parser.add_argument('--job_log_dir', help='where to write; a new folder in runs/ by default')
  parser.add_argument('--module', default='pax_mpmd.main', help=argparse.SUPPRESS)
  args, flags = parser.parse_known_args(argv)
  folder = args.job_log_dir or time.strftime('runs/demo-%Y%m%d-%H%M%S')
  command = [args.module, f'--exp={args.exp}', f'--job_log_dir={folder}', '--eval_on_test', *flags]
  if args.module == 'pax_mpmd.main':
    command.append('--mpmd')

  print(f'[demo] {" ".join(["python", "-m", *command])}', flush=True)
  start = time.monotonic()
  status = _train([sys.executable, '-m', *command])
  print(f'\n[demo] {_ended(status)} after {time.monotonic() - start:.0f} s', flush=True)
  for line in summary(Path(folder), args.exp, finished=status == 0):
    print(f'[demo] {line}')
  return status


def summary(folder: Path, experiment: str, finished: bool) -> list[str]:
  """Returns the closing words on a run.

  A run that came to its end has itself said what the loss was and where its files are; of one that
  didn't, its files tell.

  Args:
    folder: its job_log_dir.
    experiment: its full name.
    finished: whether it came to its last step.
  """
  if finished:
    return [
        'next, try the same model under another schedule with',
        f'  .venv/bin/pax-mpmd --exp={experiment} --job_log_dir=runs/gpipe --eval_on_test --mpmd'
        ' --mpmd_schedule=gpipe',
    ]
  train, test = _losses(folder, 'train'), _losses(folder, 'eval_test')
  again = f'.venv/bin/pax-mpmd --exp={experiment} --job_log_dir={folder} --eval_on_test --mpmd'
  # While one is being written, its name has a suffix.
  found = (folder / 'checkpoints').glob('checkpoint_*')
  checkpoints = sorted(path for path in found if path.name.removeprefix('checkpoint_').isdigit())
  lines = []
  if train:
    (first, before), (last, after) = min(train.items()), max(train.items())
    lines.append(f'training loss: {before:.3f} at step {first} -> {after:.3f} at step {last}')
  else:
    lines.append('no step was summarised, so there is no loss to tell')
  if test:
    (first, before), (last, after) = min(test.items()), max(test.items())
    lines.append(f'test loss:     {before:.3f} at step {first} -> {after:.3f} at step {last}')
  if checkpoints:
    lines.append(f'checkpoint:    {checkpoints[-1]}')
  if (folder / 'summaries').is_dir():
    lines.append(f'TensorBoard:   .venv/bin/tensorboard --logdir {folder}/summaries')
  if checkpoints:
    lines += ['go on from that checkpoint with', f'  {again}']
  return lines


def _train(command: Sequence[str]) -> int:
  """Runs a command that gets Ctrl-C from the terminal itself, and waits until it has ended."""
  env = dict(os.environ)
  env.setdefault('JAX_PLATFORMS', 'cpu')
  env.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  env['PYTHONUNBUFFERED'] = '1'
  # The child must come to its own clean end, so Ctrl-C must not take this process from under it.
  signal.signal(signal.SIGINT, lambda *_: None)
  process = subprocess.Popen(command, env=env)
  signal.signal(signal.SIGTERM, lambda *_: process.terminate())
  status = process.wait()
  return 128 - status if status < 0 else status


def _ended(status: int) -> str:
  if status == 0:
    return 'done'
  if status == 128 + signal.SIGINT:
    return 'stopped by Ctrl-C'
  return f'failed (exit status {status}; the reason is above)'


def _losses(folder: Path, kind: str) -> dict[int, float]:
  """Returns {step: loss} from the event files of one kind, {} where there are none."""
  files = sorted(folder.glob(f'summaries/{kind}*/**/events.out.tfevents.*'))
  if not files:
    return {}
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  import tensorflow as tf

  losses = {}
  for file in files:
    for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
      event = tf.compat.v1.Event.FromString(record)
      for value in event.summary.value:
        if value.tag == 'loss':
          losses[event.step] = float(tf.make_ndarray(value.tensor))
  return losses


if __name__ == '__main__':
  sys.exit(main())
