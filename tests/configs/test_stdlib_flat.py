"""The experiments that aren't pipelined: flags alone cut them into stages."""

from __future__ import annotations

from paxml import experiment_registry
import pytest

from configs import stdlib_flat
from configs import stdlib_own
from pax_mpmd.pax import experiments
from pax_mpmd.pax import stacks


@pytest.mark.parametrize(
    ('module', 'name', 'layers'),
    [
        (stdlib_flat, 'StdlibLmFlat', '10 layers in stages of 3, 3, 2, 2'),
        (stdlib_own, 'StdlibConvolutions', None),
    ],
)
def test_flags_cut_it(module, name: str, layers: str | None):
  """In four stages and eight microbatches: the layers dealt out, or by the model's own marks."""
  experiment = experiment_registry.get(f'{module.__name__}.{name}')
  experiment = experiments.mpmd_experiment(experiment, num_stages=4, num_microbatches=8)()
  pipeline = experiment.mpmd_pipeline()
  assert (pipeline.num_stages, pipeline.own_yields) == (4, layers is None)
  assert stacks.describe(experiment.task()) == layers
