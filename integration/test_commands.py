"""The commands and the code in the README, and what the command line says to what can't run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import dataclasses
import os
from pathlib import Path
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

from integration import live
from integration import stock
import pax_mpmd.main

README = (stock.REPOSITORY / 'README.md').read_text()
# The same experiments with a few steps.
_FULL, _SHORT = re.compile(r'configs\.stdlib_(flat|lm(_mpmd)?)\.'), 'integration.short.'


def blocks(language: str) -> list[str]:
  """The code blocks of the README in one language."""
  return re.findall(rf'^```{language}\n(.*?)^```$', README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
  """The commands of the README's shell blocks, without comments and prompts, each once."""
  text = ''.join(blocks('bash')).replace('\\\n', ' ')
  words = [shlex.split(line.removeprefix('$ '), comments=True) for line in text.splitlines()]
  return list(dict.fromkeys(shlex.join(line) for line in words if line))


MAKE = [command for command in commands() if command.startswith('make ')]
SET_UP = [c for c in commands() if ' -m venv ' in c or re.search(r'\bpip install\b', c)]
OTHERS = [command for command in commands() if command not in MAKE + SET_UP]

# What is wrong: experiment, more flags, and what the error has to say.
_TINY = 'integration.experiments.TinyPipelined'
MISTAKES = {
    'experiment': (
        'configs.stdlib_lm.StdlibLn', [],
        'ConfigError: --exp=configs.stdlib_lm.StdlibLn: .*configs.stdlib_lm.StdlibLm',
    ),
    'schedule': (_TINY, ['--mpmd_schedule=1f2b'], "ConfigError: .*'1f2b'.* gpipe, 1f1b"),
    'cycle': (_TINY, ['--mpmd_schedule={cycle}'], 'ScheduleError: (?s:.*)2F0'),
    'microbatches': (
        'integration.experiments.TwoKindsOfMicrobatches', [],
        'ConfigError: .*NUM_MICROBATCHES.*MICROBATCH_SIZE',
    ),
}


@dataclasses.dataclass(frozen=True)
class Ended:
  """A command that has ended, with its exit status and its output, both streams together."""

  status: int
  output: str


@pytest.fixture(scope='module')
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A copy of the repository, with its environment, to work in."""
  folder = tmp_path_factory.mktemp('checkout')
  listed = subprocess.run(
      ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
      cwd=stock.REPOSITORY, capture_output=True, text=True, check=True,
  )
  for name in filter(None, listed.stdout.split('\0')):
    if (stock.REPOSITORY / name).is_file():
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(stock.REPOSITORY / name, folder / name)
  (folder / '.venv').symlink_to(sys.prefix)
  # GPipe, but for actor 2: before its 2F0 it wants 2B1, which needs 3B1 and 3F1, for which actor 3
  # waits with 3F0, which needs 2F0.
  rows = [[f'{stage}{phase}{m}' for phase in 'FB' for m in range(8)] for stage in range(4)]
  rows[2] = ['2F1', '2B1', *(task for task in rows[2] if task not in ('2F1', '2B1'))]
  (folder / 'cycle.csv').write_text('\n'.join(','.join(row) for row in rows) + '\n')
  return folder


def _run(command: Sequence[str], cwd: Path, timeout: float = 600) -> Ended:
  env = stock.environment(extra={
      'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}',
      'PYTHONPATH': str(cwd),
      'JAX_DISABLE_MOST_OPTIMIZATIONS': '0',  # as for whoever types the command
  })
  with live.Live(command, env, cwd) as process:
    status = process.wait(timeout)
    return Ended(status, process.output)


@pytest.fixture(scope='module')
def ended(
    checkout: Path, submit: Callable[..., futures.Future], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, futures.Future]:
  """All that is run here, under way side by side."""
  runs = {}
  for command in OTHERS:
    short = _FULL.sub(_SHORT, command)
    runs[command] = submit(_run, ['bash', '-c', short], checkout)
  for block in blocks('python'):
    runs[block] = submit(_run, [sys.executable, '-c', block], checkout)
  for name, (experiment, flags, _) in MISTAKES.items():
    flags = [flag.format(cycle=checkout / 'cycle.csv') for flag in flags]
    command = [
        sys.executable, '-m', 'pax_mpmd.main', f'--exp={experiment}', '--mpmd',
        f'--job_log_dir={tmp_path_factory.mktemp(name)}', *flags,
    ]
    runs[name] = submit(_run, command, checkout)
  for name in ('StdlibLmMpmd', 'StdlibLmInterleaved'):
    folder = tmp_path_factory.mktemp(name)
    # One device, as with somebody who sets no flags of XLA.
    args = (f'{_SHORT}{name}', folder, '--eval_on_test')
    runs[name] = submit(stock.run_pax, *args, devices=1, timeout=600)
  return runs


def test_readme_has_commands_of_each_kind():
  """The blocks are found; an empty list would pass everything below."""
  assert 'make demo' in MAKE and 'make test' in MAKE
  assert any('--mpmd' in command for command in OTHERS)
  assert len(blocks('python')) >= 4


@pytest.mark.parametrize('command', MAKE)
def test_make(command: str):
  """The targets exist; what they do is tested where that is written, and by running the tests."""
  done = subprocess.run([*shlex.split(command), '--dry-run'], cwd=stock.REPOSITORY, check=False)
  assert done.returncode == 0


@pytest.mark.parametrize('command', SET_UP)
def test_set_up(command: str):
  """Set-up by hand is what `make env` does, which has been run where this runs."""
  done = subprocess.run(
      ['make', '--dry-run', '--always-make', 'PYTHON=python3.10', 'env'],
      cwd=stock.REPOSITORY, capture_output=True, text=True, check=True,
  )
  commands = done.stdout.replace(' --quiet', '').replace('--editable', '-e')
  assert command.replace('bin/pip ', 'bin/python -m pip ') in commands


@pytest.mark.parametrize('command', OTHERS)
def test_command(command: str, ended):
  """A command of the README does what it is for, and says nothing it shouldn't."""
  run = ended[command].result()
  assert run.status == 0, run.output
  assert 'Traceback' not in run.output
  if '--mpmd_dry_run' in command:
    assert re.search(r'\b0F0\b.*\b3F0\b', run.output, re.DOTALL)
    assert 'nothing was started' in run.output and 'Starting' not in run.output
  elif '--mpmd' in command:
    assert 'training loss: ' in run.output and 'step 4/4' in run.output


@pytest.mark.parametrize('block', blocks('python'), ids=range(len(blocks('python'))))
def test_python(block: str, ended):
  """A code block of the README runs as it stands."""
  run = ended[block].result()
  assert run.status == 0, run.output


def test_flags(checkout: Path):
  """Each flag that the README names exists, and the help has it too."""
  names = set(re.findall(r'--(mpmd\w*)', README))
  assert names
  assert names == set(re.findall(r'--(mpmd\w*)', pax_mpmd.main.__doc__))
  source = (checkout / 'pax_mpmd/pax/launch.py').read_text()
  assert names == set(re.findall(r"flags\.DEFINE_\w+\(\s*'(mpmd\w*)'", source))


@pytest.mark.parametrize('name', MISTAKES)
def test_mistake(name: str, ended):
  """What can't run is refused with one error and no traceback, before anything is begun."""
  run = ended[name].result()
  assert run.status == 1, run.output
  assert 'Traceback' not in run.output
  assert re.search(rf'^\[ *\d+s\] {MISTAKES[name][2]}', run.output, re.MULTILINE), run.output
  assert len(re.findall(r'\b\w*Error\b', run.output)) == 1, run.output
  assert not re.search('tracing|saving|Starting', run.output), run.output


@pytest.mark.parametrize('name', ['StdlibLmMpmd', 'StdlibLmInterleaved'])
def test_mixin_under_stock_pax(name: str, ended):
  """An experiment with the mixin runs on actors under `python -m paxml.main`, unchanged."""
  run = ended[name].result()
  assert 'on 4 actors' in run.output and 'stopping the actors' in run.output
  losses = stock.scalars(run.job_log_dir)['loss']
  assert sorted(losses) == [1, 2, 3, 4] and np.isfinite(list(losses.values())).all()
  assert losses[4] < losses[1]
  assert sorted(stock.scalars(run.job_log_dir, 'eval_test_stdlib')['loss'])[-1] == 4
  assert stock.checkpoint_steps(run.job_log_dir)[-1] == 4
