"""What becomes of arguments and results: `MpmdArray`s between calls, functions and runtimes."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from tests import oracle
from tests.core import toy
from tests.core.test_loop_values import forward
from tests.core.test_loop_values import loss
from tests.messages import assert_readable

SCHEDULE = mpmd.schedules.OneFOneB(num_stages=3)


@pytest.fixture
def runtime():
  with mpmd.LocalRuntime() as made:
    yield made


def jit(step, runtime, **options):
  """mpmd_jit with three stages."""
  return mpmd.mpmd_jit(step, schedule=SCHEDULE, runtime=runtime, **options)


def test_fetched_arrays_do_not_change(runtime):
  """A numpy array read from a state stays as it was when later steps overwrite the state."""
  fn = jit(toy.train_step(loss), runtime, donate_argnums=0)
  state, _ = fn(toy.weights(), toy.batch())
  fetched = [np.asarray(x) for x in state]
  copies = [x.copy() for x in fetched]
  for _ in range(3):
    state, _ = fn(state, toy.batch())
  oracle.assert_trees_equal(fetched, copies)
  assert np.abs(np.asarray(state[0]) - copies[0]).max() > 1e-5


def test_result_that_is_an_argument_survives_its_donation(runtime):
  """An array that a step returned as it was given is kept when the result is donated later."""

  def through(state, batch):
    _, out = toy.train_step(loss)(state['w'], batch)
    return {**state, 'w': state['w']}, out

  def change(state, batch):
    ws, out = toy.train_step(loss)(state['w'], batch)
    return {'w': [-w for w in ws], 'n': state['n'] + 1}, out

  made, _ = jit(change, runtime)({'w': toy.weights(), 'n': np.ones((8, 8), 'f')}, toy.batch())
  before = mpmd.device_get(made)
  passed, _ = jit(through, runtime)(made, toy.batch())
  # Not read so far, so that what is compared now isn't an old copy.
  passed2, _ = jit(through, runtime)(passed, toy.batch())
  jit(change, runtime, donate_argnums=0)(passed, toy.batch())
  oracle.assert_trees_equal(mpmd.device_get(passed2), before)
  with pytest.raises(mpmd.MpmdError, match='donated'):
    np.asarray(passed['w'][0])


def test_train_and_eval_share_a_state(runtime):
  """Two functions on one runtime; evaluation reads the state that training goes on with."""

  def evaluate(ws, batch):
    def fn(mb):
      out = forward(ws, mb['x'])[-1]
      return toy.mse(out, mb['y']), out

    total, outs = mpmd.accumulate_grads(fn, batch)
    return total / batch['x'].shape[0], outs

  train = toy.train_step(loss)
  train_fn, eval_fn = jit(train, runtime, donate_argnums=0), jit(evaluate, runtime)
  ws = expected = toy.weights()
  for i in range(3):
    ws, _ = train_fn(ws, toy.batch(seed=i))
    expected, _ = jax.jit(train)(expected, toy.batch(seed=i))
    actual = eval_fn(ws, toy.batch(2, seed=i + 10))
    desired = jax.jit(evaluate)(expected, toy.batch(2, seed=i + 10))
    oracle.assert_trees_close(actual, desired)


def test_arrays_of_another_runtime(runtime):
  """They are fetched and sent, not mistaken for arrays of this runtime's actors."""
  step = toy.train_step(loss)
  with mpmd.LocalRuntime() as other:
    there, _ = jit(step, other)([w * 2 for w in toy.weights()], toy.batch())
    jit(step, runtime)(toy.weights(), toy.batch())
    actual = jit(step, runtime)(there, toy.batch(seed=1))
    desired = jax.jit(step)(mpmd.device_get(there), toy.batch(seed=1))
    oracle.assert_trees_close(actual, desired)


def test_results_work_with_numpy_and_jax(runtime):
  """What users do with losses: means, floats, indexing, logging, jnp functions."""
  ws, (losses, norm) = jit(toy.train_step(loss), runtime)(toy.weights(), toy.batch())
  expected_ws, (expected, expected_norm) = jax.jit(toy.train_step(loss))(
      toy.weights(), toy.batch()
  )
  assert float(norm) == pytest.approx(float(expected_norm), rel=1e-5)
  for mean in (jnp.mean(losses), np.mean(losses), jax.jit(jnp.mean)(losses)):
    assert float(mean) == pytest.approx(float(expected.mean()), rel=1e-5)
  assert f'{norm:.3f}' == f'{float(norm):.3f}'
  assert norm == float(norm) and not norm != float(norm) and 2 * norm - norm < norm + 1
  np.testing.assert_array_equal(losses == losses[0], np.asarray(losses) == losses[0])
  np.testing.assert_array_equal(jnp.ones(4) + losses, jnp.ones(4) + np.asarray(losses))
  with pytest.raises(ValueError, match='read-only'):
    np.asarray(losses)[0] = 1
  assert losses[0] == np.asarray(losses)[0] and len(losses) == 4
  oracle.assert_trees_close(jnp.dot(ws[0], ws[1]), jnp.dot(expected_ws[0], expected_ws[1]))


def test_plan_of_shapes_starts_nothing(runtime):
  """ShapeDtypeStructs are enough for a plan."""
  shapes = jax.tree_util.tree_map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (toy.weights(), toy.batch())
  )
  planned = jit(toy.train_step(loss), runtime).plan(*shapes)
  assert len(planned.plan.actors) == 3
  assert runtime.num_actors == 0


def test_double_precision_arguments(runtime):
  """float64 and int64 arguments are taken as jax.jit takes them."""
  args = ([w.astype(np.float64) for w in toy.weights()], toy.batch())
  oracle.check(toy.train_step(loss), *args, runtime=runtime, num_calls=2)


def test_wrong_number_of_actors(runtime):
  """A second function for another number of actors on the same runtime says what to do."""
  jit(toy.train_step(loss), runtime)(toy.weights(), toy.batch())
  schedule = mpmd.schedules.OneFOneB(num_stages=3, num_actors=2)
  fn = mpmd.mpmd_jit(toy.train_step(loss), schedule=schedule, runtime=runtime)
  with pytest.raises(mpmd.MpmdError, match='2'):
    fn(toy.weights(), toy.batch())


def test_arrays_are_fetched_before_they_are_pickled(runtime):
  """Pickling and deep copies say what to do; a shallow copy is the array itself."""
  (w, *_), _ = jit(toy.train_step(loss), runtime)(toy.weights(), toy.batch())
  for dump in (pickle.dumps, copy.deepcopy):
    with pytest.raises(mpmd.MpmdError, match='device_get') as caught:
      dump({'w': w})
    assert_readable(str(caught.value))
  assert copy.copy(w) is w
  np.testing.assert_array_equal(pickle.loads(pickle.dumps(mpmd.device_get(w))), np.asarray(w))


@pytest.mark.parametrize('transform', [jax.jit, lambda f: jax.grad(lambda *a: f(*a)[1][1])])
def test_called_inside_a_transformation(transform, runtime):
  """The step's function isn't traceable, and says so."""
  fn = jit(toy.train_step(loss), runtime)
  with pytest.raises(mpmd.ConfigError, match=r'\[0\]\[0\].*jax.jit') as caught:
    transform(fn)(toy.weights(), toy.batch())
  assert_readable(str(caught.value))


def test_donated_position_that_is_no_argument(runtime):
  """Positions beyond the arguments, and arguments passed by keyword, aren't ignored."""
  fn = jit(toy.train_step(loss), runtime, donate_argnums=(0, 2))
  with pytest.raises(mpmd.ConfigError, match=r'\(0, 2\).*2 positional') as caught:
    fn(toy.weights(), toy.batch())
  assert_readable(str(caught.value))
