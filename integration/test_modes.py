"""Modes of a Pax job against stock Pax: what the train loop is asked for, evaluation, decoding."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import json
from pathlib import Path
import shutil
from typing import Any

import numpy as np
import pytest

from integration import stock

EXPERIMENT = 'integration.experiments.TinyBusy'
STEPS = 6  # of 8: it stops early
FIDDLE = (
    f'--fdl_config={EXPERIMENT}', '--fdl.SCHEDULE="gpipe"', '--fdl.NUM_ACTORS=2',
    '--fdl.HIDDEN_DIMS=48',
)
# Written in the background, and nothing may be ignored.
FLAGS = ('--eval_on_test', '--jax_fully_async_checkpoint', '--async_timeout_secs=60')


def _train(folder: Path, mpmd: bool) -> stock.Run:
  if mpmd:
    return stock.run_pax(
        None, folder, '--mpmd', *FIDDLE, *FLAGS, module='pax_mpmd.main', timeout=600
    )
  # Stock Pax takes Fiddle flags in the same way; in the background it can't write on CPUs.
  return stock.run_pax(
      None, folder, *FIDDLE, '--eval_on_test', module='paxml.main', devices=2, timeout=600
  )


def _evaluate(trained: futures.Future[stock.Run], folder: Path, *args: str) -> stock.Run:
  checkpoints = trained.result().job_log_dir / 'checkpoints'
  shutil.copytree(checkpoints, folder / 'checkpoints')
  module = 'pax_mpmd.main' if '--mpmd' in args else 'paxml.main'
  devices = None if '--mpmd' in args else 2
  return stock.run_pax(
      None, folder, *FIDDLE, '--mode=eval', *args, module=module, devices=devices, timeout=600
  )


@pytest.fixture(scope='module')
def runs(
    submit: Callable[..., futures.Future], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, futures.Future[stock.Run]]:
  """Training by stock Pax and by MPMD, and jobs that evaluate their last checkpoints."""
  folders = {
      name: tmp_path_factory.mktemp(name.replace(' ', '_'))
      for name in ('stock', 'mpmd', 'stock of stock', 'mpmd of stock', 'mpmd of mpmd')
  }
  found = {name: submit(_train, folders[name], name == 'mpmd') for name in ('stock', 'mpmd')}
  for name, trained, args in (
      ('stock of stock', 'stock', ()),
      ('mpmd of stock', 'stock', ('--mpmd', '--mpmd_runtime=local')),
      ('mpmd of mpmd', 'mpmd', ('--mpmd',)),
  ):
    found[name] = submit(_evaluate, found[trained], folders[name], *args)
  return found


@pytest.fixture(scope='module')
def decoded(
    flat_runs,
    submit: Callable[..., futures.Future],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[list[dict[str, Any]]]:
  """What stock Pax decodes from checkpoints of step 3: by stock Pax, and by MPMD."""

  def decode(trained: futures.Future[stock.Run], folder: Path) -> list[dict[str, Any]]:
    checkpoints = trained.result().job_log_dir / 'checkpoints'
    stock.run_pax(
        'integration.experiments.TinyFlat', folder, '--mode=decode_once',
        f'--restore_checkpoint_dir={checkpoints}', '--restore_checkpoint_step=3',
        devices=1, timeout=600,
    )
    (file,) = (folder / 'decoder_out' / 'prompts').glob('*.jsonl')
    return [json.loads(line) for line in file.read_text().splitlines()]

  jobs = [submit(decode, run, tmp_path_factory.mktemp('decode')) for run in flat_runs]
  return [job.result() for job in jobs]


@pytest.mark.parametrize('kind', ['train', 'eval_train', 'eval_test_test'])
def test_summaries_of_training(kind: str, runs):
  """Accumulated summaries, of training and of evaluations with averaged variables, are Pax's."""
  folders = [runs[name].result().job_log_dir for name in ('stock', 'mpmd')]
  theirs, ours = [stock.scalars(folder, kind) for folder in folders]
  _assert_same_scalars(ours, theirs, steps=[2, 4, STEPS])


def test_early_stopping(runs):
  """The function is asked at the same steps, with the same metrics, and its answer counts."""
  asked = []
  for name in ('stock', 'mpmd'):
    lines = (runs[name].result().job_log_dir / 'asked.jsonl').read_text().splitlines()
    asked.append([json.loads(line) for line in lines])
  assert [line['step'] for line in asked[0]] == list(range(1, STEPS + 1))
  for theirs, ours in zip(*asked, strict=True):
    expected, metrics = theirs.pop('metrics'), ours.pop('metrics')
    assert ours == theirs and metrics.keys() == expected.keys()
    np.testing.assert_allclose(
        [metrics[k] for k in expected], list(expected.values()), rtol=2e-5, err_msg=str(ours)
    )
  assert f'early_stopping_fn ended training at step {STEPS} of 8' in runs['mpmd'].result().output


def test_checkpoints_of_training(runs):
  """State, moving averages and the position of the input are saved at the same steps, the same."""
  folders = [runs[name].result().job_log_dir for name in ('stock', 'mpmd')]
  assert stock.checkpoint_steps(folders[1]) == stock.checkpoint_steps(folders[0]) == [0, 4, STEPS]
  for step in (0, 4, STEPS):
    states = [
        (f / 'checkpoints' / f'checkpoint_{step:08d}' / 'train_input' / 'process_0-of-1')
        for f in folders
    ]
    assert states[1].read_bytes() == states[0].read_bytes() == str(step).encode()
  theirs, ours = [stock.checkpoint_arrays(f) for f in folders]
  assert ours.keys() == theirs.keys() and any('.ema.' in leaf for leaf in theirs)
  for leaf, expected in theirs.items():
    assert ours[leaf].dtype == expected.dtype and ours[leaf].shape == expected.shape, leaf
    error = np.max(np.abs(ours[leaf].astype(np.float64) - expected), initial=0.0)
    assert error <= 1e-4 * np.max(np.abs(expected), initial=0.0), (leaf, error)


@pytest.mark.parametrize('name', ['mpmd of stock', 'mpmd of mpmd'])
def test_evaluation(name: str, runs):
  """A job that only evaluates finds what stock Pax finds, in checkpoints of either, and ends."""
  folders = [runs[n].result().job_log_dir for n in ('stock of stock', name)]
  theirs, ours = [stock.scalars(f, 'eval_test_test') for f in folders]
  _assert_same_scalars(ours, theirs, steps=[STEPS])
  file = Path('eval_out') / 'test' / f'eval_out_{STEPS}_shard_0.jsonl'
  theirs, ours = [(f / file).read_text().splitlines() for f in folders]
  assert len(theirs) == 16
  for a, b in zip(ours, theirs, strict=True):
    a, b = json.loads(a), json.loads(b)
    assert a['labels'] == b['labels']
    np.testing.assert_allclose(a['scores'], b['scores'], rtol=1e-4)
  run = runs[name].result()
  assert f"step {STEPS}: loss on 'test'" in run.output and 'stopping the actors' in run.output
  assert run.seconds_after_last_words < stock.PROMPTLY_S


def test_decoding(decoded):
  """Stock Pax decodes a checkpoint that MPMD has written as it decodes its own."""
  theirs, ours = decoded
  assert len(theirs) == 4
  for a, b in zip(ours, theirs, strict=True):
    assert len(b['decoded_ids']) == 8 and a.keys() == b.keys()
    assert a['decoded'] == b['decoded']
    np.testing.assert_allclose(a['logprobs'], b['logprobs'], rtol=1e-3, atol=1e-4)


def _assert_same_scalars(ours: Any, theirs: Any, steps: list[int]) -> None:
  assert ours.keys() == theirs.keys() > {'loss'}
  assert sorted(theirs['loss']) == steps
  for tag in theirs.keys() - {'Steps/sec'}:
    np.testing.assert_allclose(
        [ours[tag][step] for step in sorted(theirs[tag])],
        [theirs[tag][step] for step in sorted(theirs[tag])],
        rtol=1e-4, atol=1e-7, err_msg=tag,
    )
