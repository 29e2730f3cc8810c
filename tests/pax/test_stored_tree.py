"""Checkpoints that can't be read: what is broken is told, and how to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import json
from pathlib import Path
import shutil
from typing import Any

import jax
import numpy as np
import pytest

from pax_mpmd import errors
from pax_mpmd import schedules
from pax_mpmd.pax import backend as backend_lib
from pax_mpmd.pax import stored_tree
from tests.pax import interchange

_OCDBT = {'tensorstore_use_ocdbt': True}
_WEIGHT = 'mdl_vars.params.lm.softmax.logits_ffn.linear.w'
_STACKED = 'mdl_vars.params.lm.transformer.repeat.sub.x_layers_0.ff_layer.ffn_layer1.linear.w'


@dataclasses.dataclass(frozen=True)
class _Runs:
  """Runs with checkpoints of steps 2 and 3, by format, and those who read them."""

  folders: dict[str, Path]
  pax: interchange.Party
  mpmd: interchange.Party


@pytest.fixture(scope='module')
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Runs]:
  """What Pax has written in both formats."""
  pax = interchange.Party(interchange.Flat, False)
  mpmd = interchange.Party(interchange.Flat, True, schedule='1f1b')
  folder = tmp_path_factory.mktemp('runs')
  state = pax.restored(folder / 'none')
  state = state.replace(step=state.step + 3)
  for name, options in (('zarr', {}), ('ocdbt', _OCDBT)):
    for step in (2, 3):
      pax.save(folder / name, step, state, **options)
  yield _Runs({name: folder / name for name in ('zarr', 'ocdbt')}, pax, mpmd)
  mpmd.close()


def _cut(path: Path) -> None:
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _emptied(folder: Path) -> None:
  shutil.rmtree(folder)
  folder.mkdir()


def _largest(folder: Path) -> Path:
  return max((path for path in folder.iterdir()), key=lambda path: path.stat().st_size)


def _contradicting(folder: Path) -> None:
  path = folder / 'state' / _WEIGHT / '.zarray'
  described = json.loads(path.read_text())
  path.write_text(json.dumps(described | {'dtype': '<f2'}))


def _other_metadata(folder: Path) -> None:
  path = folder / 'metadata' / 'metadata'
  path.write_text('[]')


def _edited(folder: Path, change: Callable[[dict], None]) -> None:
  """Changes what the metadata says of its first variable."""
  path = folder / 'metadata' / 'metadata'
  metadata = json.loads(path.read_text())
  leaf = metadata['train_state_metadata']
  while '_array_metadata_tag' not in leaf:
    leaf = leaf[sorted(leaf)[0]]
  change(leaf)
  path.write_text(json.dumps(metadata))


def _chunks(sizes: Any) -> Callable[[Path], None]:
  def change(folder: Path) -> None:
    path = folder / 'state' / _WEIGHT / '.zarray'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'chunks': sizes}))

  return change


_BROKEN: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    'no file of an array': (
        'zarr',
        lambda at: (at / 'state' / _WEIGHT / '0.0').unlink(),
        f'1 of 1 files of {_WEIGHT} are missing: 0.0',
    ),
    'an empty file': (
        'zarr',
        lambda at: (at / 'state' / _STACKED / '0.0.0').write_bytes(b''),
        f'1 of 1 files of {_STACKED} are missing or empty: 0.0.0',
    ),
    'no description of an array': (
        'zarr',
        lambda at: (at / 'state' / _WEIGHT / '.zarray').unlink(),
        f'state/{_WEIGHT}/.zarray is missing',
    ),
    'a broken description': (
        'zarr',
        lambda at: _cut(at / 'state' / _WEIGHT / '.zarray'),
        f'state/{_WEIGHT}/.zarray is not JSON',
    ),
    'a description of something else': (
        'zarr',
        lambda at: (at / 'state' / _WEIGHT / '.zarray').write_text('[1]'),
        "doesn't describe an array",
    ),
    'a contradiction': ('zarr', _contradicting, r'is float16\[16, 64\] in state/ and float32'),
    'no array': (
        'zarr',
        lambda at: shutil.rmtree(at / 'state' / _WEIGHT),
        f'1 arrays of metadata/ are missing from state/: {_WEIGHT}',
    ),
    'no arrays': ('zarr', lambda at: shutil.rmtree(at / 'state'), 'it has no folder state/'),
    'an empty folder of arrays': (
        'zarr', lambda at: _emptied(at / 'state'), 'its folder state/ holds no arrays'
    ),
    'no metadata': (
        'zarr', lambda at: shutil.rmtree(at / 'metadata'), 'metadata/metadata is missing'
    ),
    'other metadata': ('zarr', _other_metadata, 'metadata/metadata has no version'),
    'a shape that is none': (
        'zarr',
        lambda at: _edited(at, lambda leaf: leaf.update(unpadded_shape=3)),
        "metadata/metadata doesn't describe an array at .*3 is no shape",
    ),
    'no dtype': (
        'zarr',
        lambda at: _edited(at, lambda leaf: leaf.pop('dtype')),
        "metadata/metadata doesn't describe an array at .*'dtype'",
    ),
    'chunks of nothing': ('zarr', _chunks([0, 8]), r"describe an array: its chunks are \[0, 8\]"),
    'chunks that are none': ('zarr', _chunks('x'), "describe an array: 'x' is no shape"),
    'nothing at all': ('zarr', _emptied, 'it has no folder state/'),
    'no manifest': (
        'ocdbt', lambda at: (at / 'state' / 'manifest.ocdbt').unlink(), 'manifest.ocdbt is missing'
    ),
    'a cut manifest': (
        'ocdbt', lambda at: _cut(at / 'state' / 'manifest.ocdbt'), 'Error decoding manifest'
    ),
    'a cut index': (
        'ocdbt', lambda at: _cut(_largest(at / 'state' / 'd')), "OCDBT database can't be opened"
    ),
    'no structure': (
        'ocdbt', lambda at: (at / 'state' / 'checkpoint').unlink(), 'state/checkpoint is missing'
    ),
}


@pytest.mark.parametrize('what', list(_BROKEN))
def test_broken_metadata_and_missing_files(runs, tmp_path, what):
  """What is missing or broken is named before an array is read, with the step to go on from."""
  form, break_it, says = _BROKEN[what]
  shutil.copytree(runs.folders[form], tmp_path, dirs_exist_ok=True)
  options = _OCDBT if form == 'ocdbt' else {}
  folder = tmp_path / 'checkpoints' / 'checkpoint_00000003'
  checkpointer = runs.mpmd.checkpointer(tmp_path, **options)  # Pax's own can fail here, see below
  break_it(folder)
  with pytest.raises(errors.CheckpointError, match=says) as caught:
    runs.mpmd.get_model_states(checkpointer)
  text = str(caught.value)
  assert text.startswith("The checkpoint of step 3 can't be read: ")
  assert '\n' not in text
  assert f'It is in {folder}.' in text
  assert 'then goes on from step 2' in text
  with pytest.raises(errors.CheckpointError, match=says):
    stored_tree.check_all(folder.parent)
  shutil.move(folder, tmp_path / 'away')
  stored_tree.check_all(folder.parent)
  assert runs.mpmd.checkpointer(tmp_path, **options).step_to_restore == 2


def test_pax_itself_reads_a_missing_file_as_zeros(runs, tmp_path):
  """Why missing files are looked for: Pax goes on with a weight of zeros, or from a new start."""
  shutil.copytree(runs.folders['zarr'], tmp_path, dirs_exist_ok=True)
  folder = tmp_path / 'checkpoints' / 'checkpoint_00000003'
  (folder / 'state' / _WEIGHT / '0.0').unlink()
  state = runs.pax.restored(tmp_path)
  assert not np.any(state.mdl_vars['params']['lm']['softmax']['logits_ffn']['linear']['w'])
  assert state.step == 3
  shutil.rmtree(folder / 'state')
  assert runs.pax.restored(tmp_path).step == 0


def test_metadata_of_an_older_checkpoint(runs, tmp_path):
  """Pax reads the metadata of any step when it starts; the one that is broken is named."""
  shutil.copytree(runs.folders['zarr'], tmp_path, dirs_exist_ok=True)
  checkpoints = tmp_path / 'checkpoints'
  (checkpoints / 'checkpoint_00000002' / 'metadata' / 'metadata').write_text('')
  with pytest.raises(errors.CheckpointError, match=r'step 2 .* is not JSON') as e:
    stored_tree.check_all(checkpoints)
  assert 'then goes on from step 3' in str(e.value)
  stored_tree.check_all(tmp_path / 'nothing here')


@pytest.mark.parametrize('damage', [_cut, lambda path: path.write_bytes(b'garbage' * 9)])
@pytest.mark.parametrize('form', ['zarr', 'ocdbt'])
def test_broken_contents(runs, tmp_path, form, damage):
  """What shows only when an array is read is told in the same way, with the file."""
  shutil.copytree(runs.folders[form], tmp_path, dirs_exist_ok=True)
  folder = tmp_path / 'checkpoints' / 'checkpoint_00000003'
  options = _OCDBT if form == 'ocdbt' else {}
  for path in (
      [folder / 'state' / _WEIGHT / '0.0']
      if form == 'zarr'
      else (folder / 'state' / 'ocdbt.process_0' / 'd').iterdir()
  ):
    damage(path)
  state = runs.mpmd.restored(tmp_path, **options)
  backend = backend_lib.Backend(schedules.GPipe(num_stages=1), 'local')
  with pytest.raises(errors.CheckpointError) as caught:
    backend.place(_Reads(), state)
  text = str(caught.value)
  assert text.startswith("The checkpoint of step 3 can't be read: ")
  assert 'source locations' not in text and '\n' not in text
  assert f'It is in {folder}.' in text
  if form == 'zarr':
    assert f'{_WEIGHT}/0.0' in text


class _Reads:
  """A step that reads all of its state, as actors do."""

  def place(self, state: Any) -> Any:
    return (jax.tree_util.tree_map(
        lambda x: x.piece((0,) * len(x.shape), x.shape).make(None, None), state
    ),)


def test_what_is_left_of_a_save_that_was_killed(runs, tmp_path):
  """A half-written folder beside the checkpoints is neither read nor in the way."""
  shutil.copytree(runs.folders['zarr'], tmp_path, dirs_exist_ok=True)
  checkpoints = tmp_path / 'checkpoints'
  half = checkpoints / 'checkpoint_00000007.orbax-checkpoint-tmp-1700000000'
  shutil.copytree(checkpoints / 'checkpoint_00000003', half)
  shutil.rmtree(half / 'metadata')
  stored_tree.check_all(checkpoints)
  checkpointer = runs.mpmd.checkpointer(tmp_path)
  assert checkpointer.step_to_restore == 3
  assert not half.exists()  # Pax clears it away
  runs.mpmd.get_model_states(checkpointer)
