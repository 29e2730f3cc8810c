"""Passes through the stages: one where the code asks for several alike, else a clear refusal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import pax_mpmd as mpmd
from pax_mpmd.compile.last_yield import notes_on_last_yield
from pax_mpmd.compile.repeats import merge_repeats
from pax_mpmd.compile.trace import loop_of
from tests import oracle
from tests.compile import steps
from tests.core import toy
from tests.messages import assert_readable

WS = toy.weights()


def loss(ws, mb, wrap=lambda f: f):
  x = mb['x']
  for i, w in enumerate(ws):
    x = wrap(toy.dense)(w, x)
    x = mpmd.pipeline_yield(x) if i < 2 else x
  return toy.mse(x, mb['y'])


def marks(step):
  return [e for e in loop_of(step.jaxpr).params['jaxpr'].jaxpr.eqns if 'yield' in e.primitive.name]


def of(fn):
  return lambda ws, batch: mpmd.accumulate_grads(lambda mb: fn(ws, mb), batch)


FUNCTIONS = {
    'gradient, loss': lambda ws, mb: (jax.grad(loss)(ws, mb), loss(ws, mb)),
    'loss, gradient': lambda ws, mb: (loss(ws, mb), jax.grad(loss)(ws, mb)),
    'checkpoints': lambda ws, mb: (
        jax.grad(loss)(ws, mb, jax.checkpoint),
        loss(ws, mb, jax.checkpoint),
    ),
    'three times': lambda ws, mb: (jax.grad(loss)(ws, mb), (loss(ws, mb), jax.jit(loss)(ws, mb))),
}


@pytest.mark.parametrize('name', FUNCTIONS)
def test_repeated_passes_are_merged(name):
  """Two forward and two backward marks are left, and the results are the same."""
  step = of(FUNCTIONS[name])
  trace, leaves = steps.traced(step, WS, toy.batch())
  assert len(marks(trace)) > 4
  merged = merge_repeats(trace, 3)
  assert len(marks(merged)) == 4
  actual = steps.evaluate(merged.jaxpr, merged.consts, leaves)
  oracle.assert_trees_close(actual, steps.expected(step, WS, toy.batch()))


def test_what_fits_is_left_alone():
  """A step with one pass is not touched."""
  trace, _ = steps.traced(of(jax.value_and_grad(loss)), WS, toy.batch())
  assert merge_repeats(trace, 3) is trace


def test_passes_on_different_values():
  """Two inputs run through the stages one after the other: one error that says what to do."""
  both = lambda ws, mb: loss(ws, mb) + loss(ws, {**mb, 'x': -mb['x']})
  trace, _ = steps.traced(of(lambda ws, mb: (jax.grad(both)(ws, mb), ())), WS, toy.batch())
  with pytest.raises(mpmd.PartitionError, match='3 stages 2 times') as caught:
    merge_repeats(trace, 3)
  assert_readable(str(caught.value))
  assert 'test_repeats.py' in str(caught.value)


@pytest.mark.parametrize('layer_after', [False, True])
def test_layer_after_the_last_yield(layer_after):
  """As many yields as stages: a layer after the last one is said to belong to the last stage."""

  def with_last(ws, mb):
    x = mb['x']
    for w in ws[:3]:
      x = mpmd.pipeline_yield(toy.dense(w, x))
    return toy.mse(toy.dense(ws[3], x) if layer_after else x, mb['y'] * jnp.sum(ws[3]))

  step = of(lambda ws, mb: (jax.grad(with_last)(ws, mb), ()))
  trace, _ = steps.traced(step, toy.weights(4), toy.batch())
  notes = notes_on_last_yield(trace.jaxpr, 3)
  assert len(notes) == layer_after
  for note in notes:
    assert 'num_stages=4' in note and note.count('test_repeats.py') >= 1
  assert notes_on_last_yield(trace.jaxpr, 4) == ()
