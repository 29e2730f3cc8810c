"""Initial states from other checkpoints (init_from_checkpoint_rules), against Pax's own."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from paxml import tasks_lib
from praxis import py_utils
import pytest

from pax_mpmd.runtime.arrays import MpmdArray
from pax_mpmd.runtime.deferred import DeferredArray
from tests.pax import compare
from tests.pax import interchange
from tests.pax import tiny

pytestmark = pytest.mark.timeout(900)


class Source(interchange.Pipelined):
  """Without a moving average: Pax can't train on from optimizer states with one."""

  def task(self):
    task_p = super().task()
    task_p.train.learner.optimizer.ema_decay = 0.0
    return task_p


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The run whose checkpoint of step 3 others start from."""
  folder = tmp_path_factory.mktemp('source')
  party = interchange.Party(Source, False)
  state = party.get_model_states(party.checkpointer(folder))
  for step in range(3):
    state, _ = party.train(state, tiny.batch(step))
  party.save(folder, 3, state)
  return folder


def _warm(source: Path, **options) -> type:
  class Warm(Source):
    """All weights but those of norms come from the other run."""

    def task(self):
      task_p = super().task()
      task_p.train.init_from_checkpoint_rules = {
          str(source / 'checkpoints'): tasks_lib.CheckpointLoadingRules(
              task_p=Source().task(),
              load_rules=[(r'(.*)', '{}')],
              ignore_rules=[r'.*ln/.*'],
              step=3,
              input_specs_provider_p=self.get_input_specs_provider_params(),
              **options,
          )
      }
      return task_p

  return Warm


@pytest.mark.parametrize('options', [{}, {'load_opt_states': True, 'load_step': True}], ids=str)
def test_starts_from_another_checkpoint(source: Path, tmp_path: Path, options, monkeypatch):
  """The state and the next step are those of Pax; the driver reads no array of the checkpoint."""
  # A flag of paxml.main, which nobody has parsed here.
  monkeypatch.setattr(py_utils, 'pmap_use_tensorstore', lambda: False)
  experiment = _warm(source, **options)
  pax = interchange.Party(experiment, False)
  mpmd = interchange.Party(experiment, True, schedule='1f1b')
  try:
    expected = pax.restored(tmp_path / 'pax')
    state = mpmd.restored(tmp_path / 'mpmd')
    leaves = jax.tree_util.tree_leaves(state)
    assert all(isinstance(x, (DeferredArray, MpmdArray)) or np.size(x) < 9 for x in leaves), leaves
    compare.assert_close(mpmd.host(state), mpmd.host(expected), 0, 0, 'initial')
    fresh = interchange.Party(Source, False).restored(tmp_path / 'fresh')
    changed = jax.tree_util.tree_map(
        lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), expected.mdl_vars, fresh.mdl_vars
    )
    assert any(jax.tree_util.tree_leaves(changed)) and not all(jax.tree_util.tree_leaves(changed))
    expected, _ = pax.train(expected, tiny.batch(4))
    state, _ = mpmd.train(state, tiny.batch(4))
    compare.assert_close(mpmd.host(state), pax.host(expected), 1e-4, 1e-5, 'after a step')
  finally:
    mpmd.close()
