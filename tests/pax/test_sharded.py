"""Several devices in a stage, against Pax's own pipelining on the same mesh."""

from __future__ import annotations

from jax import numpy as jnp
from paxml.tasks.lm.params import lm_cloud
import pytest

from tests.pax import compare
from tests.pax import tiny


class Replicas(tiny.TinyLm):
  """Two stages of 2 devices that share the rows; a vocabulary that nothing divides."""

  NUM_LAYERS = 2
  NUM_STAGES = 2
  NUM_MICROBATCHES = 4
  VOCAB_SIZE = 65
  ICI_MESH_SHAPE = [2, 1, 2, 1]


class TensorParallel(Replicas):
  """Two stages of 2 devices that share the weights, two on each rank; Pax pads the vocabulary."""

  NUM_LAYERS = 4
  CIRCULAR_REPEAT = 2
  ICI_MESH_SHAPE = [2, 1, 1, 2]


class Slices(Replicas):
  """The stages on two slices, experts inside, each shared by the devices of a slice."""

  ICI_MESH_SHAPE = [1, 2, 1, 1]
  DCN_MESH_SHAPE = [2, 1, 1, 1]


class BothAxes(Replicas):
  """Two stages of 4 devices: rows and weights are both split."""

  VOCAB_SIZE = 66
  ICI_MESH_SHAPE = [2, 1, 2, 2]


class OneDevice(BothAxes):
  """The same with one device a stage."""

  ICI_MESH_SHAPE = [2, 1, 1, 1]


class Unpipelined(lm_cloud.LmCloudSpmd):
  """Repeated layers, cut here only; each stage has the whole of the experiment's mesh."""

  NUM_LAYERS = 2
  MODEL_DIMS = 16
  HIDDEN_DIMS = 32
  NUM_HEADS = 2
  DIMS_PER_HEAD = 8
  VOCAB_SIZE = 66
  MAX_SEQ_LEN = tiny.LENGTH
  FPROP_DTYPE = jnp.float32
  ICI_MESH_SHAPE = [1, 2, 1]


class Cut(Unpipelined):
  """The same in two stages of as many devices."""

  NUM_STAGES = 2
  NUM_MICROBATCHES = 4


def compared(experiment: type, schedule: str, oracle: type | None = None, **options) -> None:
  """Runs two steps of the experiment and of Pax's own and compares them."""
  spmd = tiny.Run(oracle or experiment, mpmd=False)
  mpmd = tiny.Run(experiment, mpmd=True, schedule=schedule, initial=spmd.initial)
  try:
    compare.assert_equal_to_pax(spmd, mpmd, num_steps=2, **options)
  finally:
    mpmd.close()


@pytest.mark.parametrize(
    'experiment, schedule',
    [(Replicas, 'zb_h1'), (TensorParallel, 'interleaved_1f1b'), (Slices, 'gpipe')],
)
def test_equal_to_pax(experiment, schedule):
  """Steps are those of Pax's pipelining on the same mesh."""
  compared(experiment, schedule)


def test_rows_and_weights_split():
  """With both axes the steps are those of one device a stage.

  Pax's own pipelining gives another loss there, by the fault of XLA that `compile/mend.py` avoids.
  """
  compared(BothAxes, '1f1b', oracle=OneDevice)


def test_not_pipelined():
  """An experiment that Pax doesn't pipeline keeps its mesh, within each stage."""
  statistics = ('xformer_input_mean', 'xformer_input_std', 'xformer_input_abs_max')
  compared(Cut, '1f1b', oracle=Unpipelined, without_summaries=statistics)
