"""The experiments that carry their own schedule."""

from __future__ import annotations

from paxml import experiment_registry
import pytest

from configs import stdlib_lm
from configs import stdlib_lm_mpmd  # registers the experiments
from pax_mpmd import schedules


@pytest.mark.parametrize(
    ('name', 'schedule', 'stages', 'base'),
    [
        ('StdlibLmMpmd', schedules.OneFOneB, 4, stdlib_lm.StdlibLm),
        ('StdlibLmInterleaved', schedules.InterleavedOneFOneB, 8, stdlib_lm.StdlibLmCircular),
    ],
)
def test_schedule_fits_the_pipeline(name: str, schedule: type, stages: int, base: type):
  """The schedule of the config is built for the experiment's stages, on 4 actors, and is valid."""
  experiment = experiment_registry.get(f'{stdlib_lm_mpmd.__name__}.{name}')()
  assert isinstance(experiment, base)
  built = experiment.mpmd_backend().schedule
  assert type(built) is schedule
  assert (built.num_stages, built.num_actors) == (stages, 4)
  schedules.validate(built, base.NUM_MICROBATCHES)
