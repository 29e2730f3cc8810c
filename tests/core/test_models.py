"""A table of models and steps: each gives under `mpmd_jit` what it gives under `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_mpmd as mpmd
from tests import oracle
from tests.core import toy
from tests.core.toy import dense
from tests.core.toy import mse

_RNG = np.random.default_rng(3)


def normal(*shape: int) -> np.ndarray:
  return _RNG.normal(size=shape).astype(np.float32) * 0.3


@dataclasses.dataclass(frozen=True)
class Case:
  """A step, its first arguments, and how many stages it has."""

  step: Callable[..., Any]
  args: tuple[Any, ...]
  num_stages: int = 3


CASES: dict[str, Case] = {}


def model(params: Any, num_stages: int = 3, batch: Any = None) -> Callable[..., Any]:
  """Registers a loss function as the model of a gradient descent step."""

  def add(loss):
    data = toy.batch() if batch is None else batch
    CASES[loss.__name__] = Case(toy.train_step(loss), (params, data), num_stages)
    return loss

  return add


def attend(p: Any, x: Any, memory: Any) -> Any:
  """Single-head attention of x [b, t, d] on memory [b, s, d]."""
  probs = jax.nn.softmax((x @ p['q']) @ (memory @ p['k']).swapaxes(1, 2))
  return x + probs @ memory


_SEQUENCES = {
    'x': _RNG.normal(size=(4, 2, 5, 8)).astype(np.float32),
    'y': _RNG.normal(size=(4, 2, 3, 8)).astype(np.float32),
}


@model(toy.weights())
def constants_at_yields(ws, mb):
  """A loss that stays a constant on its way through the stages, as one without experts does."""
  x, aux = mpmd.pipeline_yield((dense(ws[0], mb['x']), 0.0))
  x, aux = mpmd.pipeline_yield((dense(ws[1], x) * (aux + 1), aux))
  return mse(x @ ws[2], mb['y']) + 0.01 * aux


@model(toy.weights())
def losses_through_yields(ws, mb):
  """Losses of all stages, added up on the way: their cotangents at the yields are constants."""
  x = dense(ws[0], mb['x'])
  x, total = mpmd.pipeline_yield((x, jnp.mean(x**2)))
  x = dense(ws[1], x)
  x, total = mpmd.pipeline_yield((x, total + jnp.mean(x**2)))
  return total + mse(x @ ws[2], mb['y'])


@model(
    [{'w': normal(8, 8), 'q': normal(8, 8), 'k': normal(8, 8)} for _ in range(4)],
    num_stages=4,
    batch=_SEQUENCES,
)
def encoder_decoder(p, mb):
  """Two encoder stages, two decoder stages that both attend to the encoder's last output."""
  x = mpmd.pipeline_yield(attend(p[0], dense(p[0]['w'], mb['x']), mb['x']))
  memory = attend(p[1], dense(p[1]['w'], x), x)
  memory, y = mpmd.pipeline_yield((memory, 0.5 * mb['y']))
  y = attend(p[2], dense(p[2]['w'], y), memory)
  memory, y = mpmd.pipeline_yield((memory, y))
  return mse(attend(p[3], dense(p[3]['w'], y), memory), mb['y'])


@model(
    [{'w': normal(8, 8), 'q': normal(8, 8), 'k': normal(8, 8)} for _ in range(4)],
    num_stages=4,
    batch=_SEQUENCES,
)
def encoder_decoder_outside_the_yields(p, mb):
  """The memory goes to the decoder's stages beside the yields."""
  x = mpmd.pipeline_yield(attend(p[0], dense(p[0]['w'], mb['x']), mb['x']))
  memory = attend(p[1], dense(p[1]['w'], x), x)
  y = mpmd.pipeline_yield(attend(p[1], 0.5 * mb['y'], memory))
  y = mpmd.pipeline_yield(attend(p[2], dense(p[2]['w'], y), memory))
  return mse(attend(p[3], dense(p[3]['w'], y), memory), mb['y'])


@model(toy.weights(4), num_stages=4)
def branches_that_merge(ws, mb):
  """Two branches of the batch with a mark each, merged by a third mark."""
  a = mpmd.pipeline_yield(dense(ws[0], mb['x']))
  b = mpmd.pipeline_yield(dense(ws[1], mb['y']))
  x = mpmd.pipeline_yield(dense(ws[2], a + b))
  return mse(dense(ws[3], x), a)


@model(toy.weights(4), num_stages=4)
def branches_of_one_activation(ws, mb):
  """An activation forks into two marked branches, which merge."""
  x = mpmd.pipeline_yield(dense(ws[0], mb['x']))
  a = mpmd.pipeline_yield(dense(ws[1], x))
  b = mpmd.pipeline_yield(dense(ws[2], x))
  return mse(dense(ws[3], a * b), mb['y'])


@model({'used': toy.weights(3), 'unused': normal(8), 'empty': {}, 'none': None})
def unused_parameter(p, mb):
  """A parameter that no stage reads."""
  x = mb['x']
  for i, w in enumerate(p['used']):
    x = dense(w, x)
    x = mpmd.pipeline_yield(x) if i < 2 else x
  return mse(x, mb['y'])


@model(toy.weights(4), num_stages=4)
def frozen_stages(ws, mb):
  """The first and the third stage's weights get no gradient."""
  freeze = jax.lax.stop_gradient
  x = mpmd.pipeline_yield(dense(freeze(ws[0]), mb['x']))
  x = mpmd.pipeline_yield(dense(ws[1], x))
  x = mpmd.pipeline_yield(dense(freeze(ws[2]), x))
  return mse(dense(ws[3], x), mb['y'])


@model(toy.weights(3))
def frozen_backbone(ws, mb):
  """No gradient goes further back than the last stage."""
  x = mpmd.pipeline_yield(dense(ws[0], mb['x']))
  x = mpmd.pipeline_yield(dense(ws[1], x))
  return mse(dense(ws[2], jax.lax.stop_gradient(x)), mb['y'])


@model(
    {
        'table': normal(11, 4),
        'kernel': normal(3, 4, 6),
        'lstm': normal(6 + 5, 5),
        'scale': 1 + normal(5),
        'head': (normal(5, 7), normal(7)),
    },
    num_stages=4,
    batch={
        'x': _RNG.integers(0, 11, (4, 2, 6)).astype(np.int32),
        'y': _RNG.integers(0, 7, (4, 2)).astype(np.int32),
    },
)
def stages_of_different_kind(p, mb):
  """Embedding, convolution, recurrence, classifier: every boundary has a shape of its own."""
  x = mpmd.pipeline_yield(p['table'][mb['x']])
  x = jax.lax.conv_general_dilated(
      x, p['kernel'], (1,), 'SAME', dimension_numbers=('NTC', 'TIO', 'NTC')
  )
  x = mpmd.pipeline_yield(jax.nn.relu(x))

  def cell(h, x):
    h = jnp.tanh(jnp.concatenate([x, h], -1) @ p['lstm']) * p['scale']
    return h, h

  h, hs = jax.lax.scan(cell, jnp.zeros((2, 5)), x.swapaxes(0, 1))
  h, best = mpmd.pipeline_yield((h, jnp.max(hs, 0)))
  logits = jax.nn.log_softmax((h + best) @ p['head'][0] + p['head'][1])
  return -jnp.mean(jnp.take_along_axis(logits, mb['y'][:, None], 1))


@model([toy.weights(n, seed=n) for n in (1, 4, 2)])
def stages_of_different_size(p, mb):
  """One, four and two layers; the second stage scans, inside a jit and a checkpoint."""

  @jax.jit
  def layers(ws, x):
    body = jax.checkpoint(lambda x, w: (dense(w, x), None))
    return jax.lax.scan(body, x, jnp.stack(ws))[0]

  x = mpmd.pipeline_yield(dense(p[0][0], mb['x']))
  x = mpmd.pipeline_yield(layers(p[1], x))
  return mse(dense(p[2][1], dense(p[2][0], x)), mb['y'])


@model(toy.weights(3))
def integers_and_booleans_at_boundaries(ws, mb):
  """Routing decisions of the first stage serve later ones, at the yields and beside them."""
  x = dense(ws[0], mb['x'])
  route = jnp.argmax(x, -1).astype(jnp.uint8)
  keep = x[:, 0] > 0
  out = mpmd.pipeline_yield({'x': x, 'keep': keep})
  y = jnp.where(out['keep'][:, None], dense(ws[1], out['x']), out['x'])
  y, keep, choice = mpmd.pipeline_yield((y, ~out['keep'], route + 1))
  y = dense(ws[2], y) * jnp.where(keep, 0.5, 2.0)[:, None]
  return mse(y + jax.nn.one_hot(choice, 8), mb['y'])


@model([normal(16), *toy.weights(3)])
def sliced_flat_parameters(p, mb):
  """One vector that holds every stage's bias, as flat parameter buffers do."""
  x = mb['x']
  for i, w in enumerate(p[1:]):
    x = dense(w, x) + jax.lax.dynamic_slice(p[0], (4 * i,), (8,))
    x = mpmd.pipeline_yield(x) if i < 2 else x
  return mse(x, mb['y'])


# -- steps with more than a gradient ---------------------------------------------------------------


def stages(ws, x):
  """Activations after each stage."""
  outs = []
  for i, w in enumerate(ws):
    x = dense(w, x)
    outs.append(x)
    x = mpmd.pipeline_yield(x) if i < len(ws) - 1 else x
  return outs


def loss_of(ws, mb):
  return mse(stages(ws, mb['x'])[-1], mb['y'])


def accumulate(ws: Any, batch: Any, loss: Callable[..., Any] = loss_of) -> tuple[Any, Any]:
  """(Summed gradients, stacked losses)."""

  def fn(mb):
    value, grads = jax.value_and_grad(loss)(ws, mb)
    return grads, value

  return mpmd.accumulate_grads(fn, batch)


def step(*state: Any, num_stages: int = 3) -> Callable[..., Any]:
  """Registers a step function of (state, batch)."""

  def add(fn):
    CASES[fn.__name__] = Case(fn, (*state, toy.batch()), num_stages)
    return fn

  return add


@step(toy.weights())
def metrics_summed_and_stacked(ws, batch):
  """Several results of every kind: nested, of each stage, counts, sums of squares, histograms."""

  def fn(mb):
    def loss(ws):
      outs = stages(ws, mb['x'])
      aux = {
          'rms': [jnp.sqrt(jnp.mean(x**2)) for x in outs],
          'hist': jnp.histogram(outs[1], 3, (-1, 1))[0],
          'best': jnp.argmax(outs[2], -1),
          'finite': jnp.isfinite(outs[0]).all(),
      }
      return mse(outs[-1], mb['y']), aux

    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(ws)
    sums = {'grads': grads, 'hist': aux['hist'], 'loss': value, 'rms': aux['rms'], 'n': 2}
    return sums, (value, aux, {'batch': mb['x'][0]})

  sums, (losses, aux, rows) = mpmd.accumulate_grads(fn, batch)
  ws = [w - 0.1 * g / sums['n'] for w, g in zip(ws, sums['grads'])]
  return ws, (sums, losses, jax.tree_util.tree_map(jnp.max, aux), rows)


@step(toy.weights())
def values_before_in_and_after_the_loop(ws, batch):
  """Spectrally normalised weights: made before the loop, used in it and after it."""
  norms = [jnp.linalg.norm(w) for w in ws]
  unit = [w / n for w, n in zip(ws, norms)]
  grads, losses = accumulate(unit, batch)
  grads = [(g - u * jnp.vdot(g, u)) / n for g, u, n in zip(grads, unit, norms)]
  return [w - 0.1 * g for w, g in zip(ws, grads)], (losses, norms, unit[1])


@step(toy.weights())
def gradient_statistics(ws, batch):
  """What is logged about gradients: norms per parameter, cosines between them, quantiles."""
  new, (losses, norm) = toy.train_step(loss_of)(ws, batch)
  deltas = [b - a for a, b in zip(ws, new)]
  flat = jnp.concatenate([d.ravel() for d in deltas])
  stats = {
      'norms': jnp.stack([jnp.linalg.norm(d) for d in deltas]),
      'ratio': [jnp.linalg.norm(d) / jnp.linalg.norm(w) for d, w in zip(deltas, ws)],
      'cosine': jnp.vdot(deltas[0], deltas[2]) / norm,
      'largest': jnp.sort(jnp.abs(flat))[-3:],
      'histogram': jnp.histogram(flat, 4)[0],
      'rank': jnp.linalg.matrix_rank(deltas[1]),
      'by name': {f'w{i}': (d.mean(), d.std(), jnp.abs(d).max()) for i, d in enumerate(deltas)},
  }
  return new, (losses, stats)


@step(toy.weights())
def leaves_of_different_actors_mixed(ws, batch):
  """An update of each weight by its neighbours' gradients, and an average of all weights."""
  grads, losses = accumulate(ws, batch)
  mixed = [0.5 * (grads[i] + grads[(i + 1) % 3].T) for i in range(3)]
  mean = sum(ws) / 3
  return [w - 0.1 * g + 0.01 * (mean - w) for w, g in zip(ws, mixed)], losses


@step(toy.weights())
def loss_beside_its_gradient(ws, batch):
  """The loss is called twice in the code, and computed once."""
  return mpmd.accumulate_grads(lambda mb: (jax.grad(loss_of)(ws, mb), loss_of(ws, mb)), batch)


@step(toy.weights())
def loss_of_jitted_stages_before_its_gradient(ws, batch):
  """The same, in the other order, with checkpoints in one jitted stage function."""

  @jax.jit
  def stage(w, x):
    return mpmd.pipeline_yield(jax.checkpoint(dense)(w, x))

  def loss(ws, mb):
    x = mb['x']
    for w in ws:
      x = stage(w, x)
    return mse(x, mb['y']), x.mean()

  def fn(mb):
    value, mean = loss(ws, mb)
    grads = jax.grad(lambda ws: loss(ws, mb)[0])(ws)
    return grads, (value, mean)

  return mpmd.accumulate_grads(fn, batch)


def optax_case(name: str, tx: Any, params: Any = None) -> None:
  """Registers a step with an optax optimizer on weights of their own."""

  def fn(state, batch):
    ws, opt = state
    grads, losses = accumulate(ws, batch)
    updates, opt = tx.update(grads, opt, ws)
    return (optax.apply_updates(ws, updates), opt), losses

  ws = toy.weights()
  opt = jax.tree_util.tree_map(np.asarray, tx.init(ws))
  CASES[name] = Case(fn, ((ws, opt), toy.batch()))


optax_case('masked', optax.masked(optax.adam(1e-2), [True, False, True]))
optax_case(
    'frozen by optax',
    optax.multi_transform(
        {'train': optax.adamw(1e-2), 'freeze': optax.set_to_zero()}, ['freeze', 'train', 'train']
    ),
)
optax_case(
    'hyperparameters in the state',
    optax.inject_hyperparams(optax.sgd)(learning_rate=lambda n: 0.1 / (1 + n)),
)
optax_case(
    'adaptive clip',
    optax.chain(
        optax.zero_nans(), optax.adaptive_grad_clip(0.01), optax.centralize(), optax.sgd(0.1)
    ),
)
optax_case('multi_steps and lamb', optax.MultiSteps(optax.lamb(1e-2), 2))


@pytest.mark.parametrize('name', CASES)
def test_equal_to_jax(name):
  """Two calls of each step, its results compared: losses, norms, parameters, optimizer state."""
  case = CASES[name]
  oracle.check(case.step, *case.args, num_stages=case.num_stages, num_calls=2)


def test_small_types_at_boundaries():
  """Activations and gradients cross in bfloat16 and float8, rounded as the program says.

  The oracle is the step run operation by operation: within one program XLA leaves out the rounding
  of a value that is converted back at once.
  """

  def loss(ws, mb):
    x = mpmd.pipeline_yield(dense(ws[0], mb['x']).astype(jnp.bfloat16)).astype(jnp.float32)
    x = mpmd.pipeline_yield(dense(ws[1], x).astype(jnp.float8_e4m3fn)).astype(jnp.float32)
    return mse(dense(ws[2], x), mb['y'])

  step, args = toy.train_step(loss), (toy.weights(), toy.batch(2))
  with mpmd.LocalRuntime() as runtime:
    schedule = mpmd.schedules.OneFOneB(num_stages=3)
    fn = mpmd.mpmd_jit(step, schedule=schedule, runtime=runtime)
    actual = mpmd.device_get(fn(*args))
  with jax.disable_jit():
    desired = step(*args)
  oracle.assert_trees_close(actual, desired)
  values = fn.plan(*args).program.values.values()
  assert {'bfloat16', 'float8_e4m3fn'} <= {v.dtype for v in values}


def test_what_is_gathered_is_logged(caplog):
  """Arrays of different actors in one equation: a log line with the user's line and the bytes."""

  def fn(ws, batch):
    grads, losses = accumulate(ws, batch)
    flat = jnp.sort(jnp.concatenate([g.ravel() for g in grads]))
    return [w - 0.1 * g for w, g in zip(ws, grads)], (losses, flat[-5:])

  ws = [normal(40, 40) for _ in range(3)]
  batch = {k: _RNG.normal(size=(2, 2, 40)).astype(np.float32) for k in 'xy'}
  with caplog.at_level(logging.WARNING, logger='pax_mpmd'):
    oracle.check(fn, ws, batch)
  (line,) = {record.getMessage() for record in caplog.records}
  assert 'concatenate at' in line and 'test_models.py' in line and f'{2 * 4 * 1600} bytes' in line


def test_what_each_actor_makes_by_itself_is_not_logged():
  """Large constants, masks and scalars of stacked weights need no transfer, and no log line."""

  def fn(w, batch):
    grads, losses = accumulate(w, batch, lambda w, mb: loss_of([w[s] for s in range(3)], mb))
    grads = jnp.nan_to_num(grads, nan=jnp.nan, posinf=jnp.nan) * jnp.tri(40)
    return w - 0.1 * grads / jnp.linalg.norm(grads), losses

  batch = {k: np.ones((2, 2, 40), np.float32) for k in 'xy'}
  schedule = mpmd.schedules.OneFOneB(num_stages=3)
  step = mpmd.mpmd_jit(fn, schedule=schedule, runtime=mpmd.LocalRuntime())
  assert step.plan(normal(3, 40, 40), batch).notes == ()
