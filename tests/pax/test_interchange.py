"""Checkpoints of Pax and of MPMD are interchangeable; those that do not fit are refused."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from pathlib import Path
from typing import Any

from etils import epath
import jax
from jax import numpy as jnp
import numpy as np
from paxml import checkpoint_types
from paxml import eval_lib
import pytest

from pax_mpmd import errors
from pax_mpmd.pax import fits
from pax_mpmd.pax import stored_tree
from pax_mpmd.runtime import stored
from tests.pax import compare
from tests.pax import interchange

pytestmark = [
    # Pax's own reader leaves coroutines behind where it fails.
    pytest.mark.filterwarnings("ignore:coroutine 'async_deserialize' was never awaited"),
    # The first test trains all ways.
    pytest.mark.timeout(900),
]

_WAYS = list(interchange.WAYS)
_OCDBT = {'tensorstore_use_ocdbt': True}
_STEP = f'checkpoint_{interchange.STEPS:08d}'
_WEIGHT = 'mdl_vars.params.lm.softmax.logits_ffn.linear.w'


@pytest.fixture(scope='module')
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[interchange.Matrix]:
  """All ways of training, and what they have written."""
  result = interchange.Matrix(tmp_path_factory.mktemp('runs'))
  yield result
  result.close()


@pytest.mark.parametrize('reader', _WAYS)
@pytest.mark.parametrize('writer', _WAYS)
def test_goes_on_from_each_others_checkpoints(matrix, writer, reader):
  """The next step after restoring is the writer's own, or Pax can't restore it either."""
  same = interchange.WAYS[writer].experiment is interchange.WAYS[reader].experiment
  assert (matrix.cell(writer, reader) in ('equal', 'same bits')) == same


def test_what_is_saved_has_moved(matrix):
  """Every variable and optimizer slot that is saved differs from zero and from its start."""
  for key in ('pax', 'mpmd-circular', 'mpmd-flat'):
    written = matrix.written[key]
    assert written.state.step == interchange.STEPS
    leaves = jax.tree_util.tree_leaves(written.state)
    later = jax.tree_util.tree_leaves(written.next_state)
    assert len(leaves) > 60
    assert all(np.any(leaf) for leaf in leaves)
    assert all(np.any(a != b) for a, b in zip(leaves, later))


def test_the_docs_have_the_matrix(matrix):
  """docs/checkpoints.md has what `python -m tests.pax.interchange` prints."""
  start, end = interchange.marks()
  table, found, _ = interchange.DOCS.read_text().partition(start)[2].partition(end)
  assert found
  assert table == matrix.table()


def test_one_database_for_all_arrays(matrix, tmp_path):
  """OCDBT checkpoints are each other's too, and are refused without the flag that Pax asks for."""
  pax, mpmd = matrix.parties['pax-flat'], matrix.parties['mpmd-flat']
  written = matrix.written['pax-flat']
  pax.save(tmp_path / 'pax', 3, pax.restored(written.folder), **_OCDBT)
  state = mpmd.restored(tmp_path / 'pax', **_OCDBT)
  mpmd.save(tmp_path / 'mpmd', 3, state, **_OCDBT)
  compare.assert_close(
      pax.host(pax.restored(tmp_path / 'mpmd', **_OCDBT)), written.state, 0, 0
  )
  with pytest.raises(errors.ConfigError, match='Add --tensorstore_use_ocdbt'):
    mpmd.restored(tmp_path / 'mpmd')
  with pytest.raises(ValueError, match='tensorstore_use_ocdbt'):
    pax.restored(tmp_path / 'mpmd')


@pytest.mark.parametrize('in_background', [False, True])
def test_a_full_disk(matrix, tmp_path, monkeypatch, in_background):
  """One error says why, and where a run goes on; what was complete stays so.

  The disk is full when one actor writes one of its arrays. Later there is room again.
  """
  mpmd = matrix.parties['mpmd-flat']
  state = mpmd.restored(matrix.written['mpmd-flat'].folder)
  state = mpmd.partitioner.place(state)
  options = {'enable_async_checkpointing': in_background}
  mpmd.save(tmp_path, 3, state, **options)
  write = stored.StoredBox.write

  def write_until_full(self, array):
    if 'softmax' in self.name:
      raise ValueError('RESOURCE_EXHAUSTED: Failed to write: No space left on device')
    return write(self, array)

  monkeypatch.setattr(stored.StoredBox, 'write', write_until_full)
  with pytest.raises(errors.CheckpointError) as caught:
    mpmd.save(tmp_path, 4, state, **options)
  assert f'{tmp_path}/checkpoints: ' in str(caught.value)
  assert 'No space left on device' in str(caught.value)
  assert 'goes on from step 3' in str(caught.value)
  monkeypatch.undo()
  compare.assert_close(mpmd.host(state), mpmd.host(mpmd.restored(tmp_path)), 0, 0)
  mpmd.save(tmp_path, 5, state, **options)
  names = [path.name for path in (tmp_path / 'checkpoints').iterdir()]
  assert sorted(name[-2:] for name in names if 'tmp' not in name) == ['03', '05']


class _Wide(interchange.Flat):
  HIDDEN_DIMS = 64


class _WithoutAverage(interchange.Flat):

  def task(self) -> Any:
    task_p = super().task()
    task_p.train.learner.optimizer.ema_decay = 0.0
    return task_p


class _Bfloat16(interchange.Flat):

  def task(self) -> Any:
    task_p = super().task()
    task_p.model.dtype = jnp.bfloat16
    return task_p


@dataclasses.dataclass(frozen=True)
class _Unfit:
  """An experiment that a checkpoint of `interchange.Flat` doesn't fit.

  Attributes:
    experiment: the experiment.
    says: part of the message.
    pax: whether Pax refuses it too, in the default format.
  """

  experiment: type
  says: str
  pax: bool = True


@pytest.mark.parametrize(
    'case',
    [
        _Unfit(
            _Wide,
            r'\.ffn_layer1\.bias\.b is \[4, 32\] in the checkpoint and \[4, 64\] here, .* 9 more',
        ),
        _Unfit(
            _WithoutAverage,
            r'17 of its 71 arrays have no use in the experiment: .*ema.* 14 more',
            pax=False,
        ),
        _Unfit(_Bfloat16, r'is float32 in the checkpoint and bfloat16 here'),
    ],
    ids=lambda case: case.experiment.__name__,
)
def test_does_not_fit(matrix, case):
  """Other sizes, learners and dtypes are refused by name; Pax never refuses what we restore."""
  written = matrix.written['mpmd-flat']
  party = interchange.Party(case.experiment, False)
  with pytest.raises(errors.ConfigError, match=case.says) as caught:
    fits.check(*_stored_and_needed(written.folder, party))
  assert str(written.folder / 'checkpoints' / _STEP) in str(caught.value)
  assert 'another --job_log_dir' in str(caught.value)
  if case.pax:
    with pytest.raises(ValueError, match='PaxMetadata is not compatible'):
      party.restored(written.folder)
  else:
    party.restored(written.folder)


def _stored_and_needed(folder: Path, party: interchange.Party) -> tuple[Any, Any]:
  stored = stored_tree.read(folder / 'checkpoints' / _STEP)
  metadata = party.partitioner.get_train_state_metadata()
  return stored, fits.needed(
      metadata.padded_global_shapes, metadata.unpadded_global_shapes, stored.ocdbt
  )


def test_another_layout_is_told_by_the_fields(matrix):
  """Where the layers are kept otherwise the message says how, in the words of an experiment."""
  with pytest.raises(errors.ConfigError) as caught:
    matrix.parties['mpmd-flat'].restored(matrix.written['pax-circular'].folder)
  text = str(caught.value)
  assert 'Its layers are pipelined (NUM_STAGES = 2, CIRCULAR_REPEAT = 2)' in text
  assert 'repeated, not pipelined (USE_REPEATED_LAYER = True)' in text
  assert '49 of the 71 arrays that the experiment needs are not in it' in text


def test_slots_of_optimizers_fit_too(matrix):
  """A slot of another shape or kind is refused; of another precision, or padded, it is not."""
  stored, needed = _stored_and_needed(
      matrix.written['mpmd-flat'].folder, matrix.parties['mpmd-flat']
  )
  fits.check(stored, needed)
  slot = next(name for name in needed if '.m.' in name and name.endswith(_WEIGHT[9:]))
  leaf = stored.leaves[slot]

  def checked(slot_change: dict[str, Any], variable_change: dict[str, Any] | None = None) -> None:
    leaves = dict(stored.leaves)
    leaves[slot] = dataclasses.replace(leaf, **slot_change)
    leaves[_WEIGHT] = dataclasses.replace(leaves[_WEIGHT], **variable_change or {})
    fits.check(dataclasses.replace(stored, leaves=leaves), needed)

  checked({'dtype': 'bfloat16'})
  padded = {'shape': (16, 66)}
  checked(padded, padded)
  with pytest.raises(errors.ConfigError, match=r'is \[16, 66\] in the checkpoint and \[16, 64\]'):
    checked(padded)
  with pytest.raises(errors.ConfigError, match='is int8 in the checkpoint and float32 here'):
    checked({'dtype': 'int8'})
  evaluated = {name: x for name, x in needed.items() if not name.startswith('opt_states')}
  fits.check(stored, evaluated)


def test_evaluation_jobs_check_too(matrix):
  """A job that evaluates checkpoints refuses other sizes, which Pax there pads and truncates."""
  folder = matrix.written['mpmd-flat'].folder
  wide = interchange.Party(_Wide, False)
  with pytest.raises(errors.ConfigError, match='have another shape'), fits.evaluating():
    _evaluated(wide, folder)
  assert _first_weight(_evaluated(wide, folder)).shape == (4, 16, 64)
  flat = matrix.parties['pax-flat']
  with fits.evaluating():
    weight = _first_weight(_evaluated(flat, folder))
  # An evaluation uses the moving average, the last slot of the repeated layers.
  average = matrix.written['mpmd-flat'].state.opt_states[0]['p_4_i-1'][-1]['ema']
  np.testing.assert_array_equal(weight, _first_weight(average))


def _evaluated(party: interchange.Party, folder: Path) -> Any:
  """The state that a job of Pax evaluates."""
  checkpointer = eval_lib._SpmdEvalCheckpointer(
      party.task,
      epath.Path(folder),
      checkpoint_types.retrieve_checkpoint_type(False, party.task),
      epath.Path(folder) / 'checkpoints',
      interchange.STEPS,
      party.partitioner,
  )
  with party.partitioner.global_mesh:
    return checkpointer.get_model_states(jax.random.PRNGKey(0))[0].mdl_vars


def _first_weight(variables: Any) -> Any:
  layer = variables['params']['lm']['transformer']['repeat']['sub']['x_layers_0']
  return layer['ff_layer']['ffn_layer1']['linear']['w']


class _Frozen(interchange.Flat):
  """Variables that aren't trained, which have no slots."""

  def task(self) -> Any:
    task_p = super().task()
    task_p.train.learner.bprop_variable_exclusion = ['.*/ff_layer/.*']
    return task_p


@pytest.mark.parametrize('options', [{}, _OCDBT])
def test_slots_that_are_left_out(tmp_path, options):
  """Slots that Pax masks are neither in a checkpoint nor asked for, in both formats."""
  pax, mpmd = interchange.Party(_Frozen, False), interchange.Party(_Frozen, True)
  state = pax.restored(tmp_path / 'none')
  assert len(jax.tree_util.tree_leaves(state)) < 60
  pax.save(tmp_path / 'run', 3, state, **options)
  restored = mpmd.restored(tmp_path / 'run', **options)
  compare.assert_close(mpmd.host(restored), pax.host(state), 0, 0)


class _Padded(interchange.Pipelined):
  """A vocabulary that the devices of a stage don't divide."""

  NUM_LAYERS = 2
  NUM_STAGES = 2
  VOCAB_SIZE = 65
  ICI_MESH_SHAPE = [2, 1, 1, 2]


class _NotPadded(_Padded):
  ICI_MESH_SHAPE = [2, 1, 1, 1]


def test_padding_of_a_mesh_comes_and_goes(tmp_path):
  """What Pax pads for one mesh is restored for another one, and back."""
  padded, plain = interchange.Party(_Padded, False), interchange.Party(_NotPadded, True)
  state = padded.restored(tmp_path / 'none')
  padded.save(tmp_path / 'padded', 3, state)
  expected = padded.host(state).mdl_vars['params']['lm']['softmax']['logits_ffn']['linear']['w']
  assert expected.shape == (16, 66)
  got = plain.host(plain.restored(tmp_path / 'padded'))
  weight = got.mdl_vars['params']['lm']['softmax']['logits_ffn']['linear']['w']
  np.testing.assert_array_equal(weight, expected[:, :65])
  fits.check(*_stored_and_needed(tmp_path / 'padded', plain))
