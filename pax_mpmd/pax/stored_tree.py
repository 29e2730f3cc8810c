"""What a checkpoint holds, from its metadata: names, shapes and dtypes of its arrays.

Nothing large is read. What shows without that, files that are missing or empty, is told by name;
Pax and TensorStore take some of it for zeros, or for a checkpoint that isn't there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import itertools
import json
import os
import re
from typing import Any

from etils import epath
import jax
from orbax.checkpoint import type_handlers
from paxml import checkpoint_managers
from paxml import checkpoint_metadata
from paxml import checkpoint_paths
import tensorstore as ts

from pax_mpmd import errors
from pax_mpmd.compile.program import dtype_named

__all__ = [
    'StoredLeaf',
    'StoredTree',
    'check_all',
    'explained',
    'read',
    'shortened',
    'unreadable',
]

_STATE = checkpoint_managers.STATE_ITEM_NAME
_METADATA = checkpoint_managers.METADATA_ITEM_NAME
_MANIFEST = 'manifest.ocdbt'


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
  """An array of a checkpoint.

  Attributes:
    name: as Pax writes it in that format.
    shape: on disk, with the padding of the mesh that wrote it.
    dtype: on disk.
    unpadded: its shape without padding, where the checkpoint says (it does for variables).
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  unpadded: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class StoredTree:
  """The arrays of a checkpoint.

  Attributes:
    folder: of the step.
    step: the step.
    ocdbt: whether all arrays are in one OCDBT database; else each has a folder.
    leaves: by name.
  """

  folder: epath.Path
  step: int
  ocdbt: bool
  leaves: Mapping[str, StoredLeaf]


def shortened(names: Iterable[str], limit: int = 3) -> str:
  """Names as messages show them: the first few, and how many more there are."""
  names = list(names)
  more = f' and {len(names) - limit} more' if len(names) > limit else ''
  return ', '.join(names[:limit]) + more


class _BrokenError(Exception):
  """What is wrong with a checkpoint, as part of a sentence."""


def read(folder: epath.PathLike) -> StoredTree:
  """Reads what the checkpoint in the folder of a step holds.

  Raises:
    CheckpointError: a file is missing, empty or contradicts another one.
  """
  try:
    return _read(epath.Path(folder))
  except _BrokenError as error:
    raise unreadable(folder, str(error)) from error


def _read(folder: epath.Path) -> StoredTree:
  step = checkpoint_paths.get_step_from_checkpoint_asset(folder)
  state, metadata = folder / _STATE, folder / _METADATA
  if not state.is_dir() and not metadata.is_dir() and any(folder.glob('mdl_vars.*')):
    state, variables = folder, {}  # as early versions of Pax laid it out
  elif not state.is_dir():
    raise _BrokenError(f'it has no folder {_STATE}/, which holds the arrays')
  else:
    variables = dict(_variables(folder))
  ocdbt = (state / _MANIFEST).exists()
  if not ocdbt and any((state / x).exists() for x in ('ocdbt.process_0', '_METADATA')):
    raise _BrokenError(f'{_STATE}/{_MANIFEST} is missing, the index of its OCDBT database')
  if ocdbt and not (state / 'checkpoint').exists():
    raise _BrokenError(f'{_STATE}/checkpoint is missing, the structure of its arrays')
  found = list(_ocdbt_leaves(state) if ocdbt else _zarr_leaves(folder, state))
  if not found:
    raise _BrokenError(f'its folder {_STATE}/ holds no arrays')
  leaves = {}
  for leaf in found:
    # Names are the same up to how optimizer states are numbered, which variables are not part of.
    shape, dtype = variables.pop(leaf.name, (None, leaf.dtype))
    if shape is not None and (
        dtype != leaf.dtype
        or len(shape) != len(leaf.shape)
        or any(n > m for n, m in zip(shape, leaf.shape))
    ):
      raise _BrokenError(
          f'{leaf.name} is {leaf.dtype}{list(leaf.shape)} in {_STATE}/ and'
          f' {dtype}{list(shape)} in {_METADATA}/',
      )
    leaves[leaf.name] = dataclasses.replace(leaf, unpadded=shape)
  if variables:
    raise _BrokenError(
        f'{len(variables)} arrays of {_METADATA}/ are missing from {_STATE}/:'
        f' {shortened(variables)}',
    )
  return StoredTree(folder, step, ocdbt, leaves)


def check_all(folder: epath.PathLike) -> None:
  """Checks all checkpoints of a run by their metadata, before Pax looks at any.

  Pax reads the metadata of one that it picks by chance, when it makes its checkpointer.

  Args:
    folder: of the checkpoints; it need not exist.

  Raises:
    CheckpointError: the newest is not complete, or the metadata of another one can't be read.
  """
  steps = _steps(epath.Path(folder))
  for _, path in steps[1:]:
    try:
      if (path / _METADATA).is_dir():
        dict(_variables(path))
    except _BrokenError as error:
      raise unreadable(path, str(error)) from error
  for _, path in steps[:1]:
    read(path)


def _steps(folder: epath.Path) -> list[tuple[int, epath.Path]]:
  """(step, folder) of the checkpoints there, the newest first; unfinished ones are left out."""
  if not folder.is_dir():
    return []
  found = [
      (checkpoint_paths.get_step_from_checkpoint_asset(path), path)
      for path in folder.iterdir()
      if re.fullmatch(f'{checkpoint_paths.CHECKPOINT_PREFIX}[0-9]+', path.name) and path.is_dir()
  ]
  return sorted(found, reverse=True)


def unreadable(folder: epath.PathLike, why: str) -> errors.CheckpointError:
  """The error for a checkpoint that can't be read.

  Args:
    folder: of the step.
    why: what is wrong, as part of a sentence.
  """
  folder = epath.Path(folder)
  step = checkpoint_paths.get_step_from_checkpoint_asset(folder)
  other = _newest_complete(folder.parent, without=step)
  then = 'starts from the beginning' if other is None else f'goes on from step {other}'
  return errors.CheckpointError(
      f"The checkpoint of step {step} can't be read: {why}. It is in {folder}. If there is a good"
      f' copy of it, put that there; else move the folder out of {folder.parent}: the same command'
      f' then {then}.'
  )


def explained(folder: epath.PathLike, error: BaseException) -> errors.CheckpointError:
  """The error for a checkpoint that turned out to be unreadable when it was read.

  Args:
    folder: of the step, or the one of its arrays.
    error: of Orbax, TensorStore or an actor.
  """
  folder = epath.Path(folder)
  return unreadable(folder.parent if folder.name == _STATE else folder, _reason(error))


def unwritable(folder: epath.PathLike, error: BaseException) -> errors.CheckpointError:
  """The error for a checkpoint that could not be written.

  Args:
    folder: of all checkpoints of the run.
    error: of Orbax, TensorStore or an actor.
  """
  newest = _newest_complete(epath.Path(folder))
  then = 'starts from the beginning' if newest is None else f'goes on from step {newest}'
  return errors.CheckpointError(
      f"A checkpoint can't be written to {folder}: {_reason(error)}. Those that were complete are"
      ' not touched, and the next start removes what this one has left. Make room, or see to what'
      f' is wrong there: the same command then {then}.'
  )


def _reason(error: BaseException) -> str:
  """What an error says, on one line, without TensorStore's own source locations and specs."""
  text = ' '.join(str(error).split()) or type(error).__name__
  return re.split(r' \[(?:source locations|tensorstore_spec)', text)[0].rstrip('.')


def _newest_complete(folder: epath.Path, without: int | None = None) -> int | None:
  """The newest step there, other than `without`, whose checkpoint seems complete."""
  for step, path in _steps(folder):
    if step != without:
      try:
        _read(path)
      except _BrokenError:
        continue
      return step
  return None


def _variables(folder: epath.Path) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
  """(name, (unpadded shape, dtype)) of the variables that Pax's own metadata lists."""
  path = folder / _METADATA / 'metadata'
  where = f'{_METADATA}/metadata'
  if path.is_dir() or not path.exists():
    raise _BrokenError(f'{where} is missing')
  metadata = _json(where, path.read_bytes())
  if not isinstance(metadata, dict) or 'version' not in metadata:
    raise _BrokenError(f'{where} has no version')
  tree = metadata.get(checkpoint_metadata.TRAIN_STATE_METADATA, {})
  if not isinstance(tree, dict):
    raise _BrokenError(f'{where} has no names of variables but {errors.shown(tree)}')
  flat = jax.tree_util.tree_flatten_with_path(
      tree, is_leaf=lambda x: isinstance(x, dict) and checkpoint_metadata.ARRAY_METADATA_TAG in x
  )[0]
  for keys, value in flat:
    if not isinstance(value, dict):
      raise _BrokenError(f'{where} has something else than arrays at {keys}')
    if checkpoint_metadata.UNPADDED_SHAPE in value:
      try:
        name = '.'.join(str(key.key) for key in keys)
        shape = _shape(value[checkpoint_metadata.UNPADDED_SHAPE])
        yield name, (shape, str(value[checkpoint_metadata.DTYPE]))
      except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _BrokenError(f'{where} doesn\'t describe an array at {keys}: {error}') from error


def _zarr_leaves(folder: epath.Path, state: epath.Path) -> Iterator[StoredLeaf]:
  """The arrays of a checkpoint in which each one has a folder."""
  key = _metadata_key()
  for path in sorted(state.iterdir()):
    if not path.is_dir() or path.name in (_STATE, _METADATA, checkpoint_paths.INPUT_ITEM_NAME):
      continue
    where = f'{_STATE}/{path.name}/{key}' if state != folder else f'{path.name}/{key}'
    if not (path / key).exists():
      raise _BrokenError(f'{where} is missing, which describes that array')
    yield _leaf(path.name, where, (path / key).read_bytes(), _sizes(path))


def _sizes(folder: epath.Path) -> dict[str, int | None]:
  """The files of a folder with their sizes in bytes; None where asking for each takes long."""
  if '://' in os.fspath(folder):
    return {path.name: None for path in folder.iterdir()}
  with os.scandir(folder) as entries:
    return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def _ocdbt_leaves(state: epath.Path) -> Iterator[StoredLeaf]:
  """The arrays of a checkpoint in one database."""
  key = _metadata_key()
  try:
    spec = type_handlers.get_tensorstore_spec(os.fspath(state), use_ocdbt=True)['kvstore']
    store = ts.KvStore.open(spec, context=type_handlers.get_ts_context(True)).result()
    sizes: dict[str, dict[str, int | None]] = {}
    for path in store.list().result():
      name, _, chunk = path.decode().rpartition('/')
      sizes.setdefault(name, {})[chunk] = None
    described = {
        name: store.read(f'{name}/{key}') for name, chunks in sizes.items() if key in chunks
    }
    texts = {name: future.result().value for name, future in described.items()}
  except ValueError as error:  # what TensorStore raises for nearly everything
    raise _BrokenError(f'its OCDBT database can\'t be opened: {_reason(error)}') from error
  for name in sorted(sizes):
    where = f'{name}/{key} in {_STATE}/{_MANIFEST}'
    if name not in texts:
      raise _BrokenError(f'{where} is missing, which describes that array')
    yield _leaf(name, where, texts[name], sizes[name])


def _leaf(
    name: str, where: str, text: bytes, sizes: Mapping[str, int | None]
) -> StoredLeaf:
  """An array from its metadata and the sizes in bytes (None: unknown) of its files."""
  described = _json(where, text)
  try:
    shape, chunks = _shape(described['shape']), _shape(described['chunks'])
    if len(shape) != len(chunks) or 0 in chunks:
      raise ValueError(f'its chunks are {list(chunks)} for a shape of {list(shape)}')
    dtype = _dtype(described['dtype'])
    separator = described.get('dimension_separator', '.')
    # Chunks that hold nothing but a fill value are not written; Pax's arrays have none.
    complete = described['fill_value'] is None and separator == '.'
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise _BrokenError(f'{where} doesn\'t describe an array: {error}') from error
  if complete:
    counts = [-(-n // chunk) for n, chunk in zip(shape, chunks)]
    names = [
        '.'.join(map(str, index)) or '0' for index in itertools.product(*map(range, counts))
    ]
    bad = [chunk for chunk in names if sizes.get(chunk, 0) == 0]
    if bad:
      what = 'missing' if not any(chunk in sizes for chunk in bad) else 'missing or empty'
      raise _BrokenError(
          f'{len(bad)} of {len(names)} files of {name} are {what}: {shortened(bad)}'
      )
  return StoredLeaf(name, shape, dtype)


def _shape(sizes: Any) -> tuple[int, ...]:
  """Sizes read from JSON, as a shape."""
  if not isinstance(sizes, list) or any(type(n) is not int or n < 0 for n in sizes):
    raise ValueError(f'{errors.shown(sizes)} is no shape')
  return tuple(sizes)


def _dtype(text: str) -> str:
  """The name of a dtype in zarr's notation, such as '<f4' or 'bfloat16'."""
  try:
    return dtype_named(text).name
  except TypeError:
    return str(text)


def _json(where: str, text: bytes) -> Any:
  try:
    return json.loads(text)
  except ValueError as error:
    raise _BrokenError(f'{where} is not JSON: {error}') from error


def _metadata_key() -> str:
  """The name of the file that describes an array; experiments can choose another one."""
  handler = type_handlers.get_type_handler(jax.Array)
  return getattr(handler, '_metadata_key', None) or '.zarray'
