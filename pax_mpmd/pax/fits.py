"""Whether a checkpoint fits an experiment: the same arrays, of the same shapes and dtypes.

Pax pads and truncates what has another shape, and ignores arrays that it has no use for; then it
compares the variables' shapes, and nothing of the optimizer's. Here every array must fit, before
any is read. What a mesh does to shapes, padding sizes that it doesn't divide, is allowed for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import functools
import re
from typing import Any
from unittest import mock

import jax
from jax import numpy as jnp
from paxml import checkpoint_paths
from paxml import checkpoints
from paxml import eval_lib

from pax_mpmd import errors
from pax_mpmd.compile.program import dtype_named
from pax_mpmd.pax import stored_tree

__all__ = ['Needed', 'check', 'evaluating', 'needed', 'restoring']

_VARIABLES = 'mdl_vars.'
_SLOTS = 'opt_states'


@dataclasses.dataclass(frozen=True)
class Needed:
  """An array that an experiment restores.

  Attributes:
    shape: without padding.
    padded: as it is padded for the experiment's mesh.
    dtype: its dtype.
  """

  shape: tuple[int, ...]
  padded: tuple[int, ...]
  dtype: str


def needed(padded: Any, unpadded: Any, ocdbt: bool) -> dict[str, Needed]:
  """The arrays of a train state by the names that Pax gives them in a checkpoint.

  Args:
    padded: the train state's `jax.ShapeDtypeStruct`s as padded for the mesh.
    unpadded: the same without padding.
    ocdbt: whether the checkpoint is in the OCDBT format, which numbers optimizer states otherwise.
  """
  shapes, names, _ = checkpoints._tensorstore_prepare(padded)  # pylint: disable=protected-access
  plain = checkpoints._tensorstore_prepare(unpadded)[0]  # pylint: disable=protected-access
  if ocdbt:
    flat = jax.tree_util.tree_flatten_with_path(padded)[0]
    names = ['.'.join(_key(key) for key in path) for path, _ in flat]
  return {
      name: Needed(tuple(x.shape), tuple(y.shape), jnp.dtype(x.dtype).name)
      for name, x, y in zip(names, plain, shapes, strict=True)
  }


def _key(key: Any) -> str:
  for attribute in ('key', 'idx', 'name'):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  raise AssertionError(key)


def check(stored: stored_tree.StoredTree, wanted: Mapping[str, Needed]) -> None:
  """Checks that a checkpoint has what an experiment needs, and nothing else.

  A floating-point optimizer slot may have another precision, as in Pax, where it is cast; the
  variables may not. An experiment without optimizer states, as that of an evaluation, needs none.

  Raises:
    ConfigError: it doesn't; names the arrays.
  """
  has = dict(stored.leaves)
  if not any(name.startswith(_SLOTS) for name in wanted):
    has = {name: leaf for name, leaf in has.items() if not name.startswith(_SLOTS)}
  theirs, ours = _layout(has), _layout(wanted)
  # Another layout has other names all over.
  few = functools.partial(stored_tree.shortened, limit=3 if theirs == ours else 1)
  missing = [name for name in wanted if name not in has]
  unused = [name for name in has if name not in wanted]
  paddings = _paddings(has.values())
  shapes, dtypes = [], []
  for name, need in wanted.items():
    leaf = has.get(name)
    if leaf is None:
      continue
    if not _same_shape(leaf, need, paddings):
      got = leaf.shape if leaf.unpadded is None else leaf.unpadded
      shapes.append(f'{name} is {list(got)} in the checkpoint and {list(need.shape)} here')
    elif not _same_kind(name, leaf.dtype, need.dtype):
      dtypes.append(f'{name} is {leaf.dtype} in the checkpoint and {need.dtype} here')
  problems = []
  if missing:
    problems.append(
        f'{len(missing)} of the {len(wanted)} arrays that the experiment needs are not in it:'
        f' {few(missing)}'
    )
  if unused:
    problems.append(
        f'{len(unused)} of its {len(has)} arrays have no use in the experiment:'
        f' {few(unused)}'
    )
  if shapes:
    problems.append(f'{len(shapes)} have another shape: {few(shapes)}')
  if dtypes:
    problems.append(f'{len(dtypes)} have another dtype: {few(dtypes)}')
  if problems:
    raise errors.ConfigError(
        f'The checkpoint of step {stored.step} doesn\'t fit the experiment: {"; ".join(problems)}.'
        f' It is in {stored.folder}. {_advice(theirs, ours)}'
    )


def _paddings(leaves: Any) -> dict[int, set[int]]:
  """{size: what it has become on disk} of all dimensions of variables."""
  result: dict[int, set[int]] = {}
  for leaf in leaves:
    for size, there in zip(leaf.unpadded or (), leaf.shape):
      result.setdefault(size, {size}).add(there)
  return result


def _same_shape(
    leaf: stored_tree.StoredLeaf, need: Needed, paddings: Mapping[int, set[int]]
) -> bool:
  if leaf.unpadded is not None:
    return leaf.unpadded == need.shape
  # Of optimizer slots the checkpoint doesn't tell; they are padded as their variables are.
  return len(leaf.shape) == len(need.shape) and all(
      there in (size, padded) or there in paddings.get(size, ())
      for there, size, padded in zip(leaf.shape, need.shape, need.padded)
  )


def _same_kind(name: str, there: str, here: str) -> bool:
  if there == here:
    return True
  if name.startswith(_VARIABLES):
    return False
  try:
    kinds = [dtype_named(x) for x in (there, here)]
  except TypeError:
    return False
  return all(jnp.issubdtype(kind, jnp.floating) for kind in kinds)


def _advice(theirs: str, ours: str) -> str:
  other = 'or give another --job_log_dir to start from the beginning'
  if theirs == ours:
    return (
        'Train with the sizes, dtypes and learner (MODEL_DIMS, VOCAB_SIZE, NUM_LAYERS, the'
        f' optimizer) that the checkpoint was written with, {other}. If the experiment has not'
        ' changed since, files of the checkpoint are missing: move its folder away, and the same'
        ' command goes on from the one before.'
    )
  return (
      f'Its layers are {theirs}; those of the experiment are {ours}, which Pax keeps in other'
      f' arrays. Train with the settings that the checkpoint was written with, {other}.'
  )


def _layout(names: Mapping[str, Any]) -> str:
  """In which arrays Pax keeps the layers, in the words of an experiment's fields."""
  variables = [name for name in names if name.startswith(_VARIABLES)]
  if any('.pipeline.' in name for name in variables):
    # The learner's group of stacked variables is named by their leading axes.
    for name in names:
      group = re.search(r'\bp#([0-9]+)(?:\.([0-9]+))?[#.]', name)
      if name.startswith(_SLOTS) and group:
        first, second = group.groups()
        if second is None:
          return f'pipelined (NUM_STAGES = {first})'
        return f'pipelined (NUM_STAGES = {second}, CIRCULAR_REPEAT = {first})'
    return 'pipelined'
  if any('.repeat.' in name for name in variables):
    return 'repeated, not pipelined (USE_REPEATED_LAYER = True)'
  if any(re.search(r'\.x_layers_[0-9]+\.', name) for name in variables):
    return 'one by one, not pipelined (USE_REPEATED_LAYER = False)'
  return "the model's own"


@contextlib.contextmanager
def restoring(checkpointer: Any, metadata: Any) -> Iterator[None]:
  """Checks the checkpoint that a run goes on from; inside, what can't be read is told as that.

  Args:
    checkpointer: Pax's training checkpointer.
    metadata: the partitioner's `TrainStateMetadata`.

  Raises:
    ConfigError: the checkpoint doesn't fit the experiment.
    CheckpointError: it can't be read.
  """
  step = checkpointer.step_to_restore
  if step is None:
    yield
    return
  manager = checkpointer.checkpoint_manager
  folder = checkpoint_paths.make_checkpoint_step_dir(
      manager.directory, step, checkpoint_type=checkpointer.checkpoint_type
  )
  with _reading(
      folder,
      metadata,
      ocdbt=getattr(manager, '_tensorstore_use_ocdbt', True),
      transforms=getattr(checkpointer, '_restore_transformations', None),
  ):
    yield


@contextlib.contextmanager
def evaluating() -> Iterator[None]:
  """Inside, the checkpoints that Pax's evaluation jobs restore are checked in the same way."""
  restore = eval_lib._SpmdEvalCheckpointer._restore  # pylint: disable=protected-access

  def checked(self: Any, step: int | None, metadata: Any) -> Any:
    if step is None:
      return restore(self, step, metadata)  # Pax says that there is none
    folder = checkpoint_paths.make_checkpoint_step_dir(
        self.restore_checkpoint_dir, step, checkpoint_type=self.checkpoint_type
    )
    with _reading(
        folder,
        metadata,
        ocdbt=self._tensorstore_use_ocdbt,
        transforms=self._restore_transformations,
    ):
      return restore(self, step, metadata)

  with mock.patch.object(eval_lib._SpmdEvalCheckpointer, '_restore', checked):
    yield


@contextlib.contextmanager
def _reading(folder: Any, metadata: Any, ocdbt: bool, transforms: Any) -> Iterator[None]:
  """Checks a checkpoint; inside, what can't be read is told as that.

  Args:
    folder: of the step.
    metadata: the partitioner's `TrainStateMetadata`.
    ocdbt: whether the flag for the OCDBT format is given.
    transforms: where the experiment transforms what it restores, only whether the checkpoint is
      complete can be checked.
  """
  stored = stored_tree.read(folder)
  if stored.ocdbt and not ocdbt:
    raise errors.ConfigError(
        f'The checkpoint of step {stored.step} is in the OCDBT format: {folder}. Add'
        ' --tensorstore_use_ocdbt, as when it was written.'
    )
  if not transforms:
    check(
        stored,
        needed(metadata.padded_global_shapes, metadata.unpadded_global_shapes, stored.ocdbt),
    )
  try:
    yield
  except errors.MpmdError as error:
    if not isinstance(error, errors.CheckpointError):
      raise
    raise stored_tree.explained(folder, error) from error
  except Exception as error:  # Orbax and TensorStore raise what they like
    raise stored_tree.explained(folder, error) from error
