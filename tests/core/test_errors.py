"""Steps that can't be cut, and what is said about them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from tests import oracle
from tests.core import toy
from tests.core.toy import dense
from tests.core.toy import mse
from tests.messages import assert_readable


def plan(step, *args, schedule=None):
  schedule = schedule or mpmd.schedules.OneFOneB(num_stages=3)
  fn = mpmd.mpmd_jit(step, schedule=schedule, runtime=mpmd.LocalRuntime())
  return fn.plan(*args)


def message(error, step, *args, **kwargs) -> str:
  """The text of the error that planning `step` raises: short, and naming this file."""
  with pytest.raises(error) as caught:
    plan(step, *args, **kwargs)
  assert_readable(str(caught.value))
  return str(caught.value)


def loss(ws, mb, num_yields=2):
  x = mb['x']
  for i, w in enumerate(ws):
    x = dense(w, x)
    if i < num_yields:
      x = mpmd.pipeline_yield(x)
  return mse(x, mb['y'])


@pytest.mark.parametrize('num_yields', [0, 1, 40])
def test_wrong_number_of_yields(num_yields):
  """It says how many there are, how many there should be, and where they stand."""
  text = message(
      mpmd.PartitionError,
      toy.train_step(lambda ws, mb: loss(ws, mb, num_yields)),
      toy.weights(num_yields + 1),
      toy.batch(),
  )
  assert 'num_stages=3' in text and f'{num_yields} calls' in text
  assert f'num_stages={num_yields + 1}' in text
  assert text.count('test_errors.py') == min(num_yields, 1)
  assert num_yields < 2 or f', {num_yields} times' in text


def _in_scan(ws, mb):
  def body(x, w):
    return mpmd.pipeline_yield(dense(w, x)), None

  return mse(jax.lax.scan(body, mb['x'], jnp.stack(ws))[0], mb['y'])


def _in_checkpoint(ws, mb):
  x = mb['x']
  for w in ws:
    x = jax.checkpoint(lambda w, x: mpmd.pipeline_yield(dense(w, x)))(w, x)
  return mse(x, mb['y'])


def _in_cond(ws, mb):
  x = dense(ws[0], mb['x'])
  x = jax.lax.cond(jnp.sum(x) > 0, mpmd.pipeline_yield, lambda x: x, x)
  return mse(dense(ws[1], x), mb['y'])


def _in_while(ws, mb):
  x = jax.lax.stop_gradient(dense(ws[0], mb['x']))
  x = jax.lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: mpmd.pipeline_yield(x - 1), x)
  return mse(dense(ws[1], x), mb['y'])


def _in_fori(ws, mb):
  x = jax.lax.fori_loop(0, 2, lambda i, x: mpmd.pipeline_yield(dense(ws[0], x)), mb['x'])
  return mse(dense(ws[1], x), mb['y'])


@pytest.mark.parametrize(
    'loss_fn,kind',
    [
        (_in_scan, 'scan'),
        (_in_checkpoint, 'checkpoint'),
        (_in_cond, 'cond'),
        (_in_while, 'while'),
        (_in_fori, 'scan'),
    ],
)
def test_yield_inside_control_flow(loss_fn, kind):
  """It names the user's line and what the call stands in."""
  text = message(mpmd.PartitionError, toy.train_step(loss_fn), toy.weights(), toy.batch())
  assert f'inside {kind}' in text and 'test_errors.py' in text


def _grad_of_the_loop(ws, batch):
  total = lambda ws: mpmd.accumulate_grads(lambda mb: (loss(ws, mb), ()), batch)[0]
  return jax.grad(total)(ws)


def _vmap_of_the_loop(ws, batch):
  total = lambda scale: mpmd.accumulate_grads(
      lambda mb: (loss([w * scale for w in ws], mb), ()), batch
  )
  return jax.vmap(total)(jnp.ones(2))


@pytest.mark.parametrize('step', [_grad_of_the_loop, _vmap_of_the_loop])
def test_loop_transformed_as_a_whole(step):
  """The user wrote no scan, so the message speaks of the loop, and of where the gradient goes."""
  text = message(mpmd.PartitionError, step, toy.weights(), toy.batch())
  assert 'differentiated or vmapped as a whole' in text and 'jax.grad(loss)' in text
  assert text.count('test_errors.py') == 2 and 'scan' not in text


def test_loop_inside_a_loop():
  """The microbatch loop must be outermost."""

  def step(ws, batch):
    fn = lambda mb: (jax.grad(loss)(ws, mb), ())
    return jax.lax.scan(lambda c, _: (c, mpmd.accumulate_grads(fn, batch)), 0, None, length=2)

  text = message(mpmd.PartitionError, step, toy.weights(), toy.batch())
  assert 'accumulate_grads is called inside scan' in text and text.count('test_errors.py') == 2


def test_second_derivatives():
  """A gradient of a gradient runs through the stages more than once."""

  def step(ws, batch):
    inner = lambda ws, mb: sum(jnp.sum(g**2) for g in jax.grad(loss)(ws, mb))
    return mpmd.accumulate_grads(lambda mb: (jax.grad(inner)(ws, mb), ()), batch)

  text = message(mpmd.PartitionError, step, toy.weights(), toy.batch())
  assert 'differentiated more than once' in text and 'test_errors.py' in text


def test_no_pair():
  """What the microbatch's function returns is an array to its writer, not a tracer."""

  def step(ws, batch):
    return mpmd.accumulate_grads(lambda mb: loss(ws, mb), batch)

  text = message(mpmd.PartitionError, step, toy.weights(), toy.batch())
  assert 'an array' in text and 'return grads, loss' in text


def test_names_of_yields():
  """Named boundaries are named where they are listed."""

  def named(ws, mb):
    x = mpmd.pipeline_yield(dense(ws[0], mb['x']), name='after the encoder')
    return mse(dense(ws[1], x), mb['y'])

  text = message(mpmd.PartitionError, toy.train_step(named), toy.weights(), toy.batch())
  assert "test_errors.py" in text and "'after the encoder'" in text


def test_no_loop():
  """A step without accumulate_grads."""

  def step(ws, batch):
    return jax.grad(lambda ws: loss(ws, jax.tree_util.tree_map(lambda x: x[0], batch)))(ws)

  text = message(mpmd.PartitionError, step, toy.weights(), toy.batch())
  assert 'accumulate_grads' in text and '0 ' in text


def test_two_loops():
  """Both lines are named."""

  def step(ws, batch):
    fn = lambda mb: (jax.grad(loss)(ws, mb), ())
    a, _ = mpmd.accumulate_grads(fn, batch)
    b, _ = mpmd.accumulate_grads(fn, batch)
    return a, b

  text = message(mpmd.PartitionError, step, toy.weights(), toy.batch())
  assert '2 accumulate_grads' in text and text.count('test_errors.py') == 2


def test_yield_outside_the_loop():
  """A yield in the epilogue."""

  def step(ws, batch):
    ws, out = toy.train_step(loss)(ws, batch)
    return mpmd.pipeline_yield(ws), out

  text = message(mpmd.PartitionError, step, toy.weights(), toy.batch())
  assert 'outside' in text and 'test_errors.py' in text


def test_batches_that_do_not_agree():
  """Leaves with different numbers of microbatches."""
  batch = {**toy.batch(), 'y': toy.batch(3)['y']}
  text = message(mpmd.PartitionError, toy.train_step(loss), toy.weights(), batch)
  assert "['x'] (4, 2, 8)" in text and "['y'] (3, 2, 8)" in text
  many = {f'leaf{i:03}': np.zeros((4 + (i == 150), 2)) for i in range(300)}
  text = message(mpmd.PartitionError, toy.train_step(loss), toy.weights(), many)
  assert "['leaf150'] (5, 2)" in text and '294 more' in text


def test_a_broken_schedule_is_refused_first():
  """A schedule that can't run raises ScheduleError with its grid, not an error of the planner."""

  class Broken(mpmd.schedules.OneFOneB):
    def tasks(self, num_microbatches):
      lists = [list(x) for x in super().tasks(num_microbatches)]
      lists[1][0], lists[1][-1] = lists[1][-1], lists[1][0]
      return lists

  text = ''
  with pytest.raises(mpmd.ScheduleError) as caught:
    plan(toy.train_step(loss), toy.weights(), toy.batch(), schedule=Broken(num_stages=3))
  text = str(caught.value)
  assert 'Broken' in text and '1B3' in text and 'needs' in text


def test_forward_only_schedule_for_a_training_step():
  """A table without backward tasks can't train; it can evaluate."""
  rows = [['0F0', '0F1'], ['1F0', '1F1'], ['2F0', '2F1']]
  schedule = mpmd.schedules.FromTable(rows)
  with pytest.raises(mpmd.ScheduleError, match='B'):
    plan(toy.train_step(loss), toy.weights(), toy.batch(2), schedule=schedule)

  def step(ws, batch):
    return mpmd.accumulate_grads(lambda mb: (loss(ws, mb), ()), batch)

  oracle.check(step, toy.weights(), toy.batch(2), schedule=schedule)


def test_debug_print_is_left_out_with_a_note():
  """Prints can't run on actors: they are dropped, wherever they stand, and a note says so."""

  def print_loss(ws, mb):
    jax.debug.print('x {}', mb['x'][0, 0])
    return loss(ws, mb)

  def print_rows(_, row):
    jax.debug.print('row {}', row)
    return None, row * 2

  def step(ws, batch):
    ws, out = toy.train_step(print_loss)(ws, batch)
    jax.debug.print('norm {}', out[1])
    return ws, (out, jax.lax.scan(print_rows, None, ws[0])[1])

  planned = oracle.check(step, toy.weights(), toy.batch(2), num_calls=2)
  notes = [n for n in planned.notes if 'print' in n]
  assert len(notes) == 3 and all('test_errors.py' in n for n in notes)


@pytest.mark.parametrize('where', ['loop', 'step'])
def test_callbacks_are_refused(where):
  """A host callback can't go to another process."""

  def call(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

  def loss_fn(ws, mb):
    mb = {**mb, 'x': jax.lax.stop_gradient(call(mb['x']))} if where == 'loop' else mb
    return loss(ws, mb)

  def step(ws, batch):
    ws, out = toy.train_step(loss_fn)(ws, batch)
    return (jax.tree_util.tree_map(call, ws) if where == 'step' else ws), out

  text = message(mpmd.PartitionError, step, toy.weights(), toy.batch())
  assert 'pure_callback' in text and 'test_errors.py' in text


def test_typed_key_as_argument_is_refused():
  """Arguments are arrays of numbers; the message says how to pass a key."""

  def step(ws, batch, key):
    ws, out = toy.train_step(loss)(ws, batch)
    return ws, (out, jax.random.normal(key))

  keys = jax.random.split(jax.random.key(0), 1000)
  text = message(mpmd.ConfigError, step, toy.weights(), toy.batch(), keys)
  assert 'key_data' in text and '[0][2]' in text and 'key<fry>[1000]' in text


def test_typed_key_as_result_is_refused():
  """The same for results."""

  def step(ws, batch):
    ws, out = toy.train_step(loss)(ws, batch)
    return ws, (out, jax.random.key(1))

  text = message(mpmd.PartitionError, step, toy.weights(), toy.batch())
  assert 'key_data' in text


def test_argument_that_is_no_array():
  """A string among the arguments."""

  def step(ws, batch, name):
    return toy.train_step(loss)(ws, batch)

  text = message(mpmd.ConfigError, step, toy.weights(), toy.batch(), 'adam')
  assert 'adam' in text
  text = message(mpmd.ConfigError, step, toy.weights(), toy.batch(), 'adam' * 1000)
  assert 'adam' in text
  names = np.array([['abc'] * 100] * 100)
  text = message(mpmd.ConfigError, step, toy.weights(), toy.batch(), names)
  assert '[100, 100]' in text
  for wrong in ('1f1b', [['0F0'] * 100] * 100):
    with pytest.raises(mpmd.ConfigError, match='Schedule') as caught:
      mpmd.mpmd_jit(step, schedule=wrong, runtime=mpmd.LocalRuntime())
    assert_readable(str(caught.value))
