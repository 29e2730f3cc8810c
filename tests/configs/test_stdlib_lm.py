"""The SeqIO task, what Pax's input makes of it, and the experiments' shape."""

from __future__ import annotations

import ast
from pathlib import Path

import fiddle as fdl
import numpy as np
from paxml import experiment_registry
from praxis import layers
from praxis import optimizers
from praxis import pax_fiddle
import pytest
import tensorflow as tf

from configs import stdlib_lm
from configs import stdlib_task


def make_input(is_training: bool):
  """Returns the input of the demo experiment, reading the real standard library."""
  train, test = stdlib_lm.StdlibLm().datasets()
  return pax_fiddle.instantiate(train if is_training else test)


@pytest.fixture(scope='module')
def batches(session_data_root: Path) -> list:
  """The first 20 training batches."""
  del session_data_root
  source = make_input(is_training=True)
  return [source.get_next_padded() for _ in range(20)]


def test_describing_the_inputs_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
  """An experiment can be imported and described without touching the data folder."""
  monkeypatch.setenv('PAX_MPMD_DATA_DIR', str(tmp_path / 'data'))
  assert len(stdlib_lm.StdlibLm().datasets()) == 2
  stdlib_lm.StdlibLm().task()
  assert not (tmp_path / 'data').exists()


def test_pieces_put_together_are_the_file():
  """No text is lost: pieces of half a row hold each byte of the source but the blank lines."""
  source = 'import os\n\n\n\ndef f():\n  return "ä"\n\nx = ' + '1 + ' * 100 + '1\n'
  files = tf.data.Dataset.from_tensors({'path': 'a.py', 'text': source})
  dataset = stdlib_task.split_at_blank_lines(files)
  dataset = dataset.map(
      lambda piece: {'targets': stdlib_task.VOCABULARY.encode_tf(piece['targets'])}
  )
  rows = [
      row['targets'].tolist()
      for row in stdlib_task.split_long_pieces(dataset, {'targets': 32}).as_numpy_iterator()
  ]

  assert all(0 < len(row) <= 16 for row in rows)
  text = bytes(token - 3 for row in rows for token in row).decode()
  assert [line for line in text.split('\n') if line] == [
      line for line in source.split('\n') if line
  ]


def test_rows_are_packed_the_way_the_model_expects(batches: list):
  """Labels follow ids within a segment, positions restart, weights cover what isn't padding."""
  for batch in batches:
    shape = (32, 128)
    assert batch.ids.shape == batch.labels.shape == batch.segment_pos.shape == shape
    assert 0 <= batch.ids.min() and batch.labels.max() < stdlib_lm.StdlibLm.VOCAB_SIZE
    np.testing.assert_array_equal(batch.weights, 1.0 - batch.paddings)
    np.testing.assert_array_equal(batch.weights, batch.segment_ids > 0)
    np.testing.assert_array_equal(batch.weights, batch.labels > 0)
    begins = batch.segment_pos[:, 1:] == 0
    inside = ~begins & (batch.segment_ids[:, 1:] > 0)
    np.testing.assert_array_equal(batch.ids[:, 1:][inside], batch.labels[:, :-1][inside])
    np.testing.assert_array_equal(
        np.diff(batch.segment_ids, axis=1)[inside], np.zeros(inside.sum())
    )
    assert not batch.ids[:, 1:][begins].any() and not batch.ids[:, 0].any()


def test_rows_hold_several_pieces_and_some_padding(batches: list):
  """Packing is exercised: most rows hold more than one segment, and rows aren't all full."""
  segments = np.concatenate([batch.segment_ids.max(axis=1) for batch in batches])
  weights = np.concatenate([batch.weights for batch in batches])
  assert segments.mean() > 1.5
  assert 0.7 < weights.mean() < 1.0


def test_training_rows_are_the_same_each_time(batches: list):
  """Two inputs with the same seed give the same batches, in an order that isn't the files'."""
  again = make_input(is_training=True)
  for batch in batches:
    np.testing.assert_array_equal(batch.ids, again.get_next_padded().ids)
  assert len({batch.ids.tobytes() for batch in batches}) == len(batches)


def test_a_restored_run_goes_on_in_the_data(session_data_root: Path, batches: list):
  """Told the step of the checkpoint, as Pax does it, the input begins after that many batches."""
  config = stdlib_lm.StdlibLm().datasets()[0]
  config.batch_size = batches[0].ids.shape[0]
  config.deterministic_input_start_index._latest_model_step = 1
  resumed = fdl.build(config)
  for batch in batches[1:]:
    np.testing.assert_array_equal(resumed.get_next().ids, batch.ids)


def test_evaluation_takes_the_same_rows_of_the_test_split(session_data_root: Path, batches: list):
  """After a reset, evaluation starts over; none of its full rows is one of training's."""
  del session_data_root
  source = make_input(is_training=False)
  count = stdlib_lm.StdlibLm.EVAL_BATCHES
  assert source.reset_for_eval and source.eval_loop_num_batches == count
  first = [source.get_next_padded().ids for _ in range(count)]
  source.reset()
  second = [source.get_next_padded().ids for _ in range(count)]
  np.testing.assert_array_equal(first, second)
  trained = {row.tobytes() for batch in batches for row in batch.ids}
  assert not trained & {row.tobytes() for batch in first for row in batch}


@pytest.mark.parametrize(('name', 'stages', 'repeat'), [('StdlibLm', 4, 1),
                                                        ('StdlibLmCircular', 4, 2)])
def test_experiments_are_pipelined_by_pax(name: str, stages: int, repeat: int):
  """They are registered, and use Pax's own pipeline, Adam, clipping and a tied embedding."""
  experiment = experiment_registry.get(f'configs.stdlib_lm.{name}')()
  task_p = experiment.task()
  lm_tpl = task_p.model.lm_tpl
  pipeline = lm_tpl.stacked_transformer_tpl

  assert fdl.get_callable(pipeline) is layers.PipelinedTransformer
  assert (pipeline.num_pipeline_stages, pipeline.circular_repeat) == (stages, repeat)
  assert pipeline.num_pipeline_microbatches == 8
  assert pipeline.pipeline_stage.num_layers * stages * repeat == 8
  assert lm_tpl.separate_embedding_tpl is None and lm_tpl.packed_input
  optimizer = task_p.train.learner.optimizer
  assert fdl.get_callable(optimizer) is optimizers.Adam
  assert optimizer.clip_gradient_norm_to_value == 1.0


def test_plain_experiments_know_nothing_of_pax_mpmd():
  """The point of the demo is a file that any Pax user could have written."""
  for module in (stdlib_lm, stdlib_task):
    imports = [
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    assert imports and not [name for name in imports if name.startswith('pax_mpmd')]
