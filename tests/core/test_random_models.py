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


# The first ones, among them gathered stacks (8), and one whose gradients are one vector (15).
@pytest.mark.parametrize('seed', [*range(9), 15], ids='seed{}'.format)
def test_random_model_on_several_devices(seed):
  """Programs that XLA partitions over four devices give what one device gives."""
  model = draw(seed)
  print(model)
  random_models.check_sharded(model, random_models.PHASES[seed % len(random_models.PHASES)])


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
