"""Every named schedule gives the result of `jax.jit`."""

from __future__ import annotations

import pytest

import pax_mpmd as mpmd
from pax_mpmd import schedules
from tests import oracle
from tests.core import toy

# name -> (num_actors, num_stages, num_microbatches)
SIZES = {
    'gpipe': (1, 1, 4),
    '1f1b': (3, 3, 5),
    'eager_1f1b': (3, 4, 6),
    'interleaved_1f1b': (2, 4, 5),
    'bfs': (4, 8, 1),
    'zb_h1': (4, 4, 8),
    'zb_v': (2, 4, 6),
    'dualpipe_v': (3, 6, 10),
}


def step_of(num_stages):
  """A training step of a chain of dense layers, one to a stage."""

  def loss(params, microbatch):
    x = toy.dense(params[0], microbatch['x'])
    for weight in params[1:]:
      x = toy.dense(weight, mpmd.pipeline_yield(x))
    return toy.mse(x, microbatch['y'])

  return toy.train_step(loss)


@pytest.mark.parametrize('name', schedules.NAMES)
def test_named_schedules(name):
  """Loss, gradient norm and parameters are those of the plain program."""
  num_actors, num_stages, num_microbatches = SIZES[name]
  oracle.check(
      step_of(num_stages),
      toy.weights(num_stages),
      toy.batch(num_microbatches),
      schedule=name,
      num_stages=num_stages,
      num_actors=num_actors,
  )
