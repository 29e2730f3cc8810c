"""Random models under random placements and schedules. See `random_models.py` for many more."""

from __future__ import annotations

import pytest

from tests.core import random_models
from tests.core.random_steps import draw
from tests.core.random_steps import Layer
from tests.core.random_steps import Model

SEEDS = 24


@pytest.mark.parametrize('seed', range(SEEDS), ids='seed{}'.format)
def test_random_model(seed):
  """Two steps agree with `jax.jit`, and schedules of one order agree to the last bit."""
  model = draw(seed)
  phases = random_models.PHASES[seed % len(random_models.PHASES)]
  print(f'{model}; {phases}')  # shown if the test fails
  random_models.check(model, phases)


# The smallest of those that failed when they were found.
FOUND = {
    # One stage and no gradient: what is only summed went to a backward task that nobody runs.
    'summed_in_one_stage': Model(
        231, stages=((Layer('linear'),),), metrics=((0, 'count', True),), forward_only=True
    ),
    'after_the_yield_of_one_stage': Model(104, stages=((),), last_yield=True, forward_only=True),
}


@pytest.mark.parametrize('name', FOUND)
def test_found_by_other_seeds(name):
  """Models of other seeds that have failed before."""
  random_models.check(FOUND[name])
