"""Random models under random placements and schedules. See `random_models.py` for many more."""

from __future__ import annotations

import pytest

from tests.core import random_models
from tests.core.random_steps import draw

SEEDS = 24


@pytest.mark.parametrize('seed', range(SEEDS), ids='seed{}'.format)
def test_random_model(seed):
  """Two steps agree with `jax.jit`, and schedules of one order agree to the last bit."""
  model = draw(seed)
  phases = random_models.PHASES[seed % len(random_models.PHASES)]
  print(f'{model}; {phases}')  # shown if the test fails
  random_models.check(model, phases)
