"""Configurations that can't run are refused before anything is traced, and the others are kept."""

from __future__ import annotations

import jax
from paxml.tasks.lm.params import lm_cloud
from praxis import base_hyperparams
import pytest

from pax_mpmd import errors
from pax_mpmd import schedules
from pax_mpmd.pax import layer
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import mixin
from pax_mpmd.pax import transform
from tests.pax import tiny


class _Mpmd(mixin.MpmdPipelineMixin, tiny.TinyLm):
  """The tiny model with the mixin."""


_REFUSED = [
    (dict(MICROBATCH_SIZE=2), ['NUM_MICROBATCHES=8', 'MICROBATCH_SIZE=2']),
    (dict(NUM_MICROBATCHES=None), ['NUM_MICROBATCHES=None', 'MICROBATCH_SIZE=None']),
    (dict(NUM_MICROBATCHES=0), ['NUM_MICROBATCHES', 'got 0']),
    (dict(NUM_LAYERS=10), ['NUM_LAYERS=10', 'NUM_STAGES=4', '[1, 2, 5, 10]']),
    (dict(NUM_STAGES=None), ['NUM_STAGES', 'None']),
    (dict(ICI_MESH_SHAPE=[2, 1, 1, 1]), ['ICI_MESH_SHAPE', 'NUM_STAGES=4', '[4, 1, 1, 1]']),
    (dict(ICI_MESH_SHAPE=None), ['ICI_MESH_SHAPE', '[4, 1, 1, 1]']),
]


@pytest.mark.parametrize('fields, words', _REFUSED, ids=[str(f) for f, _ in _REFUSED])
def test_refused(fields, words):
  """The error names the field, the value and what would work."""
  experiment = type('Broken', (_Mpmd,), fields)
  with pytest.raises(errors.ConfigError) as info:
    experiment().task()
  for word in words:
    assert word in str(info.value)


def test_an_experiment_without_a_pipeline_is_refused():
  """A model that isn't pipelined is refused with what to derive it from."""
  experiment = type('Flat', (mixin.MpmdPipelineMixin, lm_cloud.LmCloudSpmdTest), {})
  with pytest.raises(errors.ConfigError, match='TransformerLmSpmdPipelineAdafactor'):
    experiment().task()


def test_a_batch_that_does_not_split_is_refused():
  """The numbers of microbatches that would do are listed."""
  with pytest.raises(errors.ConfigError, match=r'NUM_MICROBATCHES=8.*\[1, 2, 3, 4, 6, 12\]'):
    microbatches.Microbatching(num_microbatches=8).count(12)
  assert microbatches.Microbatching(microbatch_size=4).count(12) == 3


def test_a_schedule_that_can_not_run_the_microbatches_is_refused_before_tracing():
  """The partitioner's set-up, which comes before everything slow, checks batch and schedule."""
  table = schedules.FromTable([['0F0', '0B0'], ['1F0', '1B0'], ['2F0', '2B0'], ['3F0', '3B0']])
  experiment = type('TableLm', (_Mpmd,), dict(SCHEDULE=table))()
  partitioner = experiment.partitioner()
  task = base_hyperparams.instantiate(experiment.task())
  with pytest.raises(errors.ScheduleError):
    partitioner.setup(task, jax.random.PRNGKey(0), train_inputs_shape_dtype=tiny.specs())
  experiment = type('OddLm', (_Mpmd,), dict(NUM_MICROBATCHES=5))()
  with pytest.raises(errors.ConfigError, match='NUM_MICROBATCHES=5'):
    experiment.partitioner().setup(
        task, jax.random.PRNGKey(0), train_inputs_shape_dtype=tiny.specs()
    )


def test_only_the_class_of_the_layer_changes():
  """Every field of the pipeline layer is kept, in place of Pax's class there is ours."""
  before = tiny.TinyLm().task().model.lm_tpl.stacked_transformer_tpl
  after = _Mpmd().task().model.lm_tpl.stacked_transformer_tpl
  assert after.cls is layer.MpmdPipelinedTransformer
  assert set(before.__arguments__) == set(after.__arguments__)
  assert all(getattr(before, k) == getattr(after, k) for k in before.__arguments__)


def test_the_transformation_is_idempotent():
  """Applying it to its own result changes nothing."""
  task, first = transform.mpmd_task(tiny.TinyLm().task())
  again, second = transform.mpmd_task(task.clone())
  assert task == again
  assert first == second
