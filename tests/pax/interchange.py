"""Checkpoints that one way of training writes and another reads: `python -m tests.pax.interchange`.

Ways are Pax's own (pipelined, with circular repeats, not pipelined) and pax_mpmd's, with several
numbers of actors. Each goes through Pax's checkpointer as `paxml.main` makes it, and through
pax_mpmd's as its executor does.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from pathlib import Path
import sys
import tempfile
from typing import Any

from etils import epath
import jax
import numpy as np
from paxml import checkpoint_creators
from paxml import checkpoint_types
from paxml import trainer_lib
from paxml.tasks.lm.params import lm_cloud

from pax_mpmd import errors
from pax_mpmd.pax import checkpoint
from tests.pax import compare
from tests.pax import tables
from tests.pax import tiny


class _Small:
  """Sizes and learner of all experiments here: moments, a moving average, weights that move."""

  NUM_LAYERS = 4
  MODEL_DIMS = 16
  HIDDEN_DIMS = 32
  NUM_HEADS = 2
  DIMS_PER_HEAD = 8
  NUM_MICROBATCHES = 4

  def task(self) -> Any:
    task_p = super().task()
    optimizer = task_p.train.learner.optimizer
    optimizer.learning_rate = 0.01
    optimizer.clip_gradient_norm_to_value = 0.5
    optimizer.ema_decay = 0.9
    schedule = optimizer.lr_schedule
    schedule.warmup_steps, schedule.decay_start, schedule.decay_end = 1, 2, 100
    return task_p


class Pipelined(_Small, tiny.TinyLm):
  """4 stages of a layer."""


class Circular(_Small, tiny.TinyLm):
  """The same layers, two on each of 2 ranks."""

  NUM_STAGES = 2
  CIRCULAR_REPEAT = 2
  ICI_MESH_SHAPE = [2, 1, 1, 1]


class Flat(_Small, lm_cloud.LmCloudSpmd):
  """The same layers without a pipeline; stages and microbatches are read only where it is cut."""

  VOCAB_SIZE = tiny.VOCAB
  MAX_SEQ_LEN = tiny.LENGTH
  FPROP_DTYPE = tiny.TinyLm.FPROP_DTYPE
  ICI_MESH_SHAPE = [1, 1, 1]
  NUM_STAGES = 2


class Party(tiny.Run):
  """A way of training, with its checkpoints."""

  def __init__(self, experiment: type, mpmd: bool, **options: Any):
    super().__init__(experiment, mpmd, initial=(), **options)
    self.mpmd = mpmd
    self._step_fn = self.partitioner.partition(
        trainer_lib.train_step_single_learner, self._specs, False
    )[0]

  def checkpointer(self, folder: Path, **options: Any) -> Any:
    """The training checkpointer of a run in that folder; the only place that knows ours."""
    inner = checkpoint_creators._create_checkpointer(
        self.task,
        epath.Path(folder),
        checkpoint_types.retrieve_checkpoint_type(False, self.task),
        todelete_subdir=None,
        **{'enable_async_checkpointing': False, **options},
    )
    if not self.mpmd:
      return inner
    partitioner = self.partitioner
    return checkpoint.PiecewiseCheckpointer(inner, partitioner.place)

  def restored(self, folder: Path, **options: Any) -> Any:
    """The state that a run in that folder starts with."""
    return self.get_model_states(self.checkpointer(folder, **options))

  def get_model_states(self, checkpointer: Any) -> Any:
    """The state that a run with that checkpointer starts with."""
    with self.partitioner.global_mesh:
      state, _, _, _ = checkpointer.get_model_states(
          self.partitioner, self.partitioner.get_train_state_metadata(), jax.random.PRNGKey(1234)
      )
    return state

  def save(self, folder: Path, step: int, state: Any, **options: Any) -> None:
    """Saves a state as a run in that folder does when it ends."""
    metadata = self.partitioner.get_train_state_metadata()
    with self.partitioner.global_mesh:
      checkpointer = self.checkpointer(folder, **options)
      checkpointer.save_final(
          step,
          partitioned_train_state=state,
          train_state_unpadded_shape_dtype_struct=metadata.unpadded_global_shapes,
          train_state_pspecs=metadata.partition_specs,
      )
      checkpointer.wait_until_finished()

  def train(self, state: Any, inputs: Any) -> tuple[Any, Any]:
    """One train step; the arrays stay where they are."""
    static = trainer_lib.BaseStepFnStaticArgs(unpadded_global_batch_size=None)
    with self.partitioner.global_mesh:
      return self._step_fn(state, jax.random.PRNGKey(7), inputs, static)

  def host(self, tree: Any) -> Any:
    """Arrays of this run, wherever they are, as numpy arrays."""
    if self.mpmd:
      tree = self.partitioner.fetch(tree)
    return jax.tree_util.tree_map(np.asarray, tree)


@dataclasses.dataclass(frozen=True)
class Way:
  """A way of training.

  Attributes:
    name: in the docs.
    experiment: what is trained; ways of one experiment read each other's checkpoints.
    schedule: of MPMD; None: by Pax itself.
    actors: how many; None: one for each pipeline rank.
  """

  name: str
  experiment: type
  schedule: str | None = None
  actors: int | None = None

  def party(self) -> Party:
    """One that trains so."""
    if self.schedule is None:
      return Party(self.experiment, False)
    return Party(self.experiment, True, schedule=self.schedule, actors=self.actors)


WAYS = {
    'pax': Way('Pax, pipelined', Pipelined),
    'mpmd-4': Way('MPMD, 4 actors', Pipelined, '1f1b'),
    'mpmd-2': Way('MPMD, 2 actors', Pipelined, 'interleaved_1f1b', 2),
    'pax-circular': Way('Pax, circular', Circular),
    'mpmd-circular': Way('MPMD, circular', Circular, 'interleaved_1f1b'),
    'pax-flat': Way('Pax, not pipelined', Flat),
    'mpmd-flat': Way('MPMD, not pipelined: cut', Flat, '1f1b'),
}
STEPS = 3
DOCS = tables.DOCS.with_name('checkpoints.md')
COMMAND = 'generated by python -m tests.pax.interchange --write'


@dataclasses.dataclass(frozen=True)
class Written:
  """A checkpoint, and what its writer does next.

  Attributes:
    folder: of the run.
    state: what was saved, as numpy arrays.
    next_state: the state after one more step.
    output: of that step.
  """

  folder: Path
  state: Any
  next_state: Any
  output: Any


class Matrix:
  """Every way of training reads the checkpoints of every way."""

  def __init__(self, folder: Path):
    """Constructor.

    Args:
      folder: where the runs are.
    """
    self._folder = folder
    self._cells: dict[tuple[str, str], str] = {}

  @functools.cached_property
  def parties(self) -> dict[str, Party]:
    """By the names of `WAYS`."""
    return {key: way.party() for key, way in WAYS.items()}

  @functools.cached_property
  def written(self) -> dict[str, Written]:
    """What each has written after `STEPS` steps of its own.

    Pax's runs start from their own initial state, which those of MPMD with the same experiment
    restore.
    """
    initial: dict[type, Path] = {}
    result = {}
    for key, party in self.parties.items():
      experiment = WAYS[key].experiment
      state = party.restored(initial.get(experiment, self._folder / key))
      if experiment not in initial:
        initial[experiment] = self._folder / f'{key}-initial'
        party.save(initial[experiment], 0, state)
      for step in range(STEPS):
        state, _ = party.train(state, tiny.batch(step))
      party.save(self._folder / key, STEPS, state)
      saved = party.host(state)
      next_state, output = party.train(state, tiny.batch(STEPS))
      result[key] = Written(
          self._folder / key, saved, party.host(next_state), party.host(_compared(output))
      )
    return result

  def cell(self, writer: str, reader: str) -> str:
    """What became of it when `reader` read the checkpoint of `writer`.

    Where both train the same experiment, every array that is restored has the bits that were saved,
    and the next step is the writer's: bit for bit if the same programs run, else within the
    tolerances of `compare.assert_equal_to_pax`. Else Pax must fail, or MPMD refuse.

    Raises:
      AssertionError: it is not so.
    """
    key = writer, reader
    if key not in self._cells:
      same = WAYS[writer].experiment is WAYS[reader].experiment
      self._cells[key] = self._equal(*key) if same else self._refused(*key)
    return self._cells[key]

  def _equal(self, writer: str, reader: str) -> str:
    party, written = self.parties[reader], self.written[writer]
    state = party.restored(written.folder)
    state, output = party.train(state, tiny.batch(STEPS))
    next_state, output = party.host(state), party.host(_compared(output))
    what = f'{reader} goes on from {writer}: '
    # MPMD adds in the same order whatever the number of actors.
    exact = writer == reader or all(WAYS[key].schedule for key in (writer, reader))
    scalars, rest = ((0, 0), (0, 0)) if exact else ((2e-5, 0), (1e-4, 1e-5))
    compare.assert_close(output['loss'], written.output['loss'], *scalars, what)
    compare.assert_close(output, written.output, *rest, what)
    compare.assert_close(next_state, written.next_state, *rest, what)
    compare.assert_close(party.host(party.restored(written.folder)), written.state, 0, 0, what)
    return 'same bits' if exact else 'equal'

  def _refused(self, writer: str, reader: str) -> str:
    party = self.parties[reader]
    expected = errors.ConfigError if party.mpmd else FileNotFoundError
    try:
      party.restored(self.written[writer].folder)
    except expected as error:
      name = type(error).__name__
    else:
      raise AssertionError(f'{reader} restores what {writer} has written.')
    # Where it fails, Pax' reader leaves coroutines behind, in cycles. Python warns of each when it
    # is freed, which fails at some of the places a collection could come by itself.
    gc.collect()
    return name

  def table(self) -> str:
    """A row for each writer, a column for each reader."""
    rows = [('written by', *(f'read by {way.name}' for way in WAYS.values()))]
    rows += [('---',) * (1 + len(WAYS))]
    rows += [(WAYS[key].name, *(self.cell(key, reader) for reader in WAYS)) for key in WAYS]
    return ''.join(f'| {" | ".join(row)} |\n' for row in rows)

  def close(self) -> None:
    """Stops local actors."""
    for party in self.parties.values():
      party.close()


def _compared(output: Any) -> Any:
  """The loss, and gradient norms, of a step's output."""
  norms = {k: x for k, x in output.summary_tensors.items() if 'grad_norm' in k}
  assert norms
  return {'loss': output.loss, 'norms': norms, 'scalars': output.weighted_scalars}


def marks() -> tuple[str, str]:
  """The lines around the table in the docs."""
  return f'<!-- {COMMAND} -->\n', '<!-- end -->'


def main() -> None:
  """Prints the table, or writes it into the docs."""
  from tests import conftest  # noqa: F401

  # That has made the devices which tests have.
  jax.config.update('jax_disable_most_optimizations', True)
  with tempfile.TemporaryDirectory() as folder:
    matrix = Matrix(Path(folder))
    try:
      table = matrix.table()
    finally:
      matrix.close()
  print(table)
  if '--write' in sys.argv:
    start, end = marks()
    before, _, rest = DOCS.read_text().partition(start)
    DOCS.write_text(before + start + table + end + rest.partition(end)[2])


if __name__ == '__main__':
  main()
