"""Arrays that are made where they are needed, and arrays that are written from there."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from pathlib import Path
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from pax_mpmd import schedules
from pax_mpmd.compile import results
from pax_mpmd.runtime import xla
from pax_mpmd.runtime.devices import ActorDevices
from tests.core import toy


def _init(key, gain):
  """A state of all kinds: stacked, scanned, constant, shared, from a typed key, large and small."""
  k1, k2, k3 = jax.random.split(key, 3)
  w = jax.vmap(lambda k: gain * jax.random.normal(k, (64, 32)))(jax.random.split(k1, 4))

  def layer(carry, k):
    return carry, (jax.random.normal(k, (8, 40)), jnp.ones((8, 8)))

  _, (scanned, ones) = jax.lax.scan(layer, 0.0, jax.random.split(k3, 6))
  return {
      'w': w,
      'copy': w + 1,
      'moment': jnp.zeros_like(w),
      'truncated': jax.random.truncated_normal(jax.random.key(7), -2.0, 2.0, (100, 33)),
      'uniform': jax.random.uniform(k2, (5, 7)),
      'scanned': scanned,
      'ones': ones,
      'table': jnp.arange(40000.0) + gain,
      'half': w[0].astype(jnp.bfloat16),
      'step': jnp.zeros((), jnp.int32),
      'gain': gain,
      'seven': 7,
  }


@pytest.fixture(params=['threefry2x32', 'rbg'])
def prng(request):
  before = jax.config.jax_default_prng_impl
  jax.config.update('jax_default_prng_impl', request.param)
  yield
  jax.config.update('jax_default_prng_impl', before)


def test_each_array_is_that_of_the_whole_function(prng):
  """Whole, and every inner box, bit for bit as `jax.jit` of the function gives it."""
  key = jax.random.PRNGKey(3)
  expected = jax.jit(_init)(key, 0.3)
  state = mpmd.deferred(_init, key, 0.3)
  here = ActorDevices(xla.local_devices()[:1])
  assert state.keys() == expected.keys()
  for name, array in state.items():
    want = np.asarray(expected[name])
    assert (array.shape, array.dtype) == (want.shape, want.dtype)
    np.testing.assert_array_equal(np.asarray(array), want, err_msg=name)
    if min(want.shape, default=0) > 2:
      start, shape = (1,) * want.ndim, tuple(n - 2 for n in want.shape)
      source = array.piece(start, shape)
      box = source.make(here.compile, lambda x: xla.to_device(x, here.devices[0]))
      inner = want[tuple(slice(1, n - 1) for n in want.shape)]
      np.testing.assert_array_equal(np.asarray(box), inner, err_msg=name)


def test_only_what_a_result_needs_is_in_its_program():
  """Keys are computed once; equal arrays share a program; no program makes another's array."""
  _, leaves = results.separate_results(
      lambda key: [jax.random.normal(k, (64, 64)) for k in jax.random.split(key, 5)],
      jax.random.PRNGKey(0),
  )
  assert len({leaf.fingerprint for leaf in leaves}) == 1
  assert len({leaf.lower(leaf.aval.shape).key for leaf in leaves}) == 1
  assert all(sum(x.nbytes for x in leaf.operands) <= 16 for leaf in leaves)  # a key, two bounds
  _, (first, second) = results.separate_results(
      lambda x: (jnp.sin(jnp.zeros((64, 64)) + x), jnp.exp(jnp.ones((64, 64)) + x)), 2.0
  )
  assert 'exp' not in str(first.jaxpr) and 'sin' not in str(second.jaxpr)


def test_side_effects_are_refused():
  """A function that calls back into Python can't run elsewhere."""

  def init(x):
    return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((2000,), np.float32), x)

  with pytest.raises(mpmd.PartitionError, match='pure_callback'):
    mpmd.deferred(init, jnp.zeros(2000))


def _loss(params, microbatch):
  x = microbatch['x']
  for i in range(3):
    x = toy.dense(params['w'][i], x)
    if i < 2:
      x = mpmd.pipeline_yield(x)
  return toy.mse(x * params['scale'], microbatch['y'])


@jax.jit
def _params(key):
  return {'w': 0.3 * jax.random.normal(key, (3, 8, 8)), 'scale': jnp.ones(())}


@pytest.fixture
def runtime():
  with mpmd.LocalRuntime() as runtime:
    yield runtime


@pytest.fixture
def step(runtime):
  return mpmd.mpmd_jit(
      toy.train_step(_loss),
      schedule=schedules.OneFOneB(num_stages=3),
      runtime=runtime,
      donate_argnums=0,
  )


def _assert_equal(tree, expected):
  jax.tree_util.tree_map(
      lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), tree, expected
  )


def test_a_step_makes_its_deferred_arguments(step, monkeypatch):
  """No array is put together on the driver, each actor makes its piece, the step is as usual."""
  key, batch = jax.random.PRNGKey(1), toy.batch()
  expected, aux = jax.jit(toy.train_step(_loss))(_params(key), batch)
  fetched = []
  monkeypatch.setattr(
      mpmd.DeferredArray, '__array__', lambda self, *args: fetched.append(self) or np.zeros(1)
  )
  params, got = step(mpmd.deferred(_params, key), batch)
  assert not fetched
  assert [piece[1] for piece in params['w'].pieces] == [(1, 8, 8)] * 3
  _assert_equal((params, got[0]), (expected, aux[0]))
  np.testing.assert_allclose(got[1], aux[1], rtol=1e-6)  # a sum of partial sums


def test_place_moves_arguments_and_runs_nothing(step, runtime):
  """Deferred or not, arguments end up where a call wants them; shapes stay shapes."""
  key, batch = jax.random.PRNGKey(1), toy.batch()
  shapes = jax.tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
  state = mpmd.deferred(_params, key)
  state['scale'] = np.ones((), np.float32)
  placed, rest = step.place(state, shapes)
  assert rest == shapes
  _assert_equal(placed, _params(key))
  assert placed['w'].actors == (0, 1, 2)
  sent = []
  put = runtime._put
  runtime._put = lambda *args: sent.append(args) or put(*args)
  _assert_equal(step(placed, batch)[0], jax.jit(toy.train_step(_loss))(_params(key), batch)[0])
  assert not sent and placed['w'].is_deleted()


@dataclasses.dataclass(frozen=True)
class _File:
  """A sink that waits until a file `go` lies beside its own; for two minutes at most."""

  path: str

  def write(self, array):
    go = Path(self.path).with_name('go')
    for _ in range(12000):
      if go.exists() or not go.parent.exists():
        break
      time.sleep(0.01)
    np.save(self.path, array)
    done = concurrent.futures.Future()
    done.set_result(None)
    return types.SimpleNamespace(copy=done, commit=done)


def test_what_is_being_written_is_not_overwritten(step, runtime, tmp_path: Path):
  """A step that takes a state over while it is written changes neither the file nor the result."""
  key, batch = jax.random.PRNGKey(1), toy.batch()
  state = step.place(_params(key), batch)[0]
  before = jax.tree_util.tree_map(np.array, mpmd.device_get(state))
  expected = jax.jit(toy.train_step(_loss))(_params(key), batch)
  buffers = [buffers[0] for _, _, buffers in state['w'].pieces]
  wanted = [(b, _File(str(tmp_path / f'{i}.npy'))) for i, b in enumerate(buffers)]
  futures = runtime.write(wanted)
  new = step(state, batch)
  assert not any(future.done() for future in futures)  # the step has been sent all the same
  (tmp_path / 'go').touch()
  _assert_equal(new[0], expected[0])
  for future in futures:
    future.result(10)
  written = np.concatenate([np.load(tmp_path / f'{i}.npy') for i in range(3)])
  np.testing.assert_array_equal(written, before['w'])


def test_a_file_that_cannot_be_written(step, runtime, tmp_path: Path):
  """The error says why; the actors go on."""
  key, batch = jax.random.PRNGKey(1), toy.batch()
  state = step.place(_params(key), batch)[0]
  buffer = state['scale'].pieces[0][2][0]
  (future,) = runtime.write([(buffer, _File(str(tmp_path / 'no' / 'x.npy')))])
  with pytest.raises(mpmd.CheckpointError, match='No such file'):
    future.result(10)
  _assert_equal(step(state, batch)[0], jax.jit(toy.train_step(_loss))(_params(key), batch)[0])
