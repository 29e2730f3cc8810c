"""The demo's closing words, and how it ends on Ctrl-C."""

from __future__ import annotations

import os
from pathlib import Path
import signal
import subprocess
import sys

import pytest
import tensorflow as tf

from configs import demo

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
  """A run's folder: losses of two kinds, two finished checkpoints and one being written."""
  for kind, losses in (('train', {5: 5.5, 10: 3.25}), ('eval_test_stdlib', {10: 3.5})):
    with tf.summary.create_file_writer(str(tmp_path / 'summaries' / kind)).as_default():
      for step, loss in losses.items():
        tf.summary.scalar('loss', loss, step=step)
        tf.summary.scalar('lr', 0.1, step=step)
        tf.summary.text('note', 'no number', step=step)
  for name in ('checkpoint_00000000', 'checkpoint_00000010',
               'checkpoint_00000020.orbax-checkpoint-tmp-1700000000'):
    (tmp_path / 'checkpoints' / name).mkdir(parents=True)
  return tmp_path


def test_names_another_schedule_after_a_finished_run():
  """The next command runs the same experiment, into another folder, under another schedule."""
  text = '\n'.join(demo.summary(Path('runs/x'), 'configs.x.Y', finished=True))
  assert '--exp=configs.x.Y' in text and '--mpmd_schedule=gpipe' in text
  assert 'runs/x' not in text


def test_sums_up_a_stopped_run(run_folder: Path):
  """Losses at both ends, the last whole checkpoint, the summaries and the command to go on."""
  text = '\n'.join(demo.summary(run_folder, 'configs.x.Y', finished=False))
  assert 'training loss: 5.500 at step 5 -> 3.250 at step 10' in text
  assert 'test loss:     3.500 at step 10 -> 3.500 at step 10' in text
  assert f'{run_folder}/checkpoints/checkpoint_00000010' in text and '00000020' not in text
  assert f'--logdir {run_folder}/summaries' in text
  assert 'go on from that checkpoint' in text and f'--job_log_dir={run_folder} ' in text
  assert '--mpmd_schedule' not in text


def test_sums_up_a_run_that_left_nothing(tmp_path: Path):
  """A run that failed early has no numbers and no files to point at."""
  assert demo.summary(tmp_path, 'configs.x.Y', finished=False) == [
      'no step was summarised, so there is no loss to tell'
  ]


def test_ctrl_c_lets_training_end_itself(tmp_path: Path):
  """Training gets the interrupt once, finishes its work, and the closing words come after it."""
  (tmp_path / 'slow_training.py').write_text(
      'import sys, time\n'
      'try:\n'
      '  print("training", flush=True)\n'
      '  time.sleep(60)\n'
      'except KeyboardInterrupt:\n'
      '  time.sleep(0.5)\n'
      '  print("saved", flush=True)\n'
      '  sys.exit(130)\n'
  )
  process = subprocess.Popen(
      [sys.executable, '-m', 'configs.demo', '--module=slow_training',
       f'--job_log_dir={tmp_path}'],
      cwd=REPOSITORY,
      env={**os.environ, 'PYTHONPATH': f'{REPOSITORY}:{tmp_path}', 'PYTHONUNBUFFERED': '1'},
      stdout=subprocess.PIPE,
      text=True,
      start_new_session=True,
  )
  while process.stdout.readline() != 'training\n':
    assert process.poll() is None
  os.killpg(process.pid, signal.SIGINT)  # As the terminal does: to the whole group.
  output, _ = process.communicate(timeout=30)

  assert process.returncode == 130
  assert output.index('saved') < output.index('[demo] stopped by Ctrl-C')
