"""Random pipelined training steps.

A `Model` is plain data drawn from a seed; `make_step`, `init` and `batch` turn it into a step and
its arguments. `random_models.py` runs them.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pax_mpmd as mpmd
from tests.core import random_layers as layers
from tests.core import toy

DIM, LENGTH, SIZE = 4, 3, 2  # of an activation [SIZE, LENGTH, DIM]

OPTIMIZERS = {
    'sgd': optax.sgd(0.1),
    # Epsilons are large: a gradient that is zero but for rounding must not decide an update.
    'adam': optax.adam(1e-2, eps=1e-3),
    'adamw_clipped': optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3, weight_decay=0.1)
    ),
    'lamb': optax.lamb(1e-2, eps=1e-3),
    'finite': optax.apply_if_finite(optax.adam(1e-2, eps=1e-3), max_consecutive_errors=3),
    'momentum_by_step': optax.sgd(optax.exponential_decay(0.1, 1, 0.9), momentum=0.9),
    'multi': optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2),
    'adafactor': optax.adafactor(1e-2, min_dim_size_to_factor=2, eps=1e-3),
    'raveled': optax.flatten(optax.adam(1e-2, eps=1e-3)),  # all gradients in one vector
    'noisy': optax.chain(toy.noise(0.01), optax.sgd(0.1)),
    'centred': optax.chain(optax.centralize(), optax.trace(0.9), optax.scale(-0.1)),
}


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer. `weight` is 'own', 'stack' (a row of the stages' stacked weights), 'shared<k>', or

  'chunk': the kind is scanned over the stage's rows of one array, of which stages have one or two.
  """

  kind: str
  weight: str = 'own'
  use: str = 'plain'
  wraps: tuple[str, ...] = ()

  def __str__(self) -> str:
    weight = '' if self.weight == 'own' else f'({self.weight})'
    use = '' if self.use == 'plain' else f'.{self.use}'
    return '+'.join((self.kind, *self.wraps)) + weight + use


@dataclasses.dataclass(frozen=True)
class Model:
  """A random step. Everything about it but the numbers in its arrays.

  Attributes:
    seed: of the arrays and of the schedule.
    stages: the layers of each stage.
    skips: (stage whose output is used again, stage that adds it to its input, whether it travels
      through the yields between).
    yields: what travels with the activation at each boundary, one of `_EXTRAS`.
    last_yield: whether the last stage is ended by a yield as well.
    head: 'mse', or the shared weight that is the output embedding of a cross-entropy.
    penalty: the weights whose squares are added to each microbatch's loss: '', 'all' or 'shared'.
    before: what is done before the loop, one of `_BEFORE`.
    fixed: names of weights that no gradient is taken of.
    metrics: (stage, name, whether it is summed rather than stacked).
    loop: what is done with the gradients within the loop: '', 'norm' (stacked) or 'clip'.
    optimizer: a key of OPTIMIZERS.
    ema: whether the state has a moving average of the parameters.
    poison: whether a microbatch of the first batch holds an infinity.
    num_actors, num_microbatches: numbers of them.
    donate: whether the state is donated.
    forward_only: whether the step takes no gradient.
    around: what each stage as a whole is wrapped in: '', 'remat' or 'jit'.
    jit: whether the loss function, yields and all, is a jitted one.
  """

  seed: int
  stages: tuple[tuple[Layer, ...], ...]
  skips: tuple[tuple[int, int, bool], ...] = ()
  yields: tuple[str, ...] = ()
  last_yield: bool = False
  head: str = 'mse'
  penalty: str = ''
  before: str = ''
  fixed: tuple[str, ...] = ()
  metrics: tuple[tuple[int, str, bool], ...] = ()
  loop: str = ''
  optimizer: str = 'sgd'
  ema: bool = False
  poison: bool = False
  num_actors: int = 1
  num_microbatches: int = 2
  donate: bool = False
  forward_only: bool = False
  around: tuple[str, ...] = ()
  jit: bool = False

  def __str__(self) -> str:
    parts = [f'seed {self.seed}: ' + ' | '.join(' '.join(map(str, s)) or '-' for s in self.stages)]
    parts.append(f'{self.num_actors} actors, {self.num_microbatches} microbatches')
    for field in dataclasses.fields(self)[2:]:
      value = getattr(self, field.name)
      if field.name not in ('num_actors', 'num_microbatches') and value != field.default:
        if field.name not in ('yields', 'around') or any(value):
          parts.append(field.name if value is True else f'{field.name}={value}')
    return '; '.join(parts)


def _int(x):
  return jnp.argmax(x, -1)


_EXTRAS = {
    '': None,
    'bool': lambda x: x > 0,
    'int': _int,
    'scalar': jnp.max,
    'tree': lambda x: {'n': (_int(x), 2), 'mean': jnp.mean(x, -1)},
    'unused': lambda x: (x * 2, x > 1),
}


def _use_extra(name: str, x: Any, extra: Any) -> Any:
  if name == 'bool':
    return jnp.where(extra, x, 0.5 * x)
  if name == 'int':
    return x + 0.1 * extra[..., None]
  if name == 'scalar':
    return x * jnp.cos(extra)
  if name == 'tree':
    number, two = extra['n']
    return x * two / 2 + 0.1 * number[..., None] * extra['mean'][..., None]
  return x


def _centred(params, batch):
  x = batch['x']
  return params, {**batch, 'x': x - jnp.mean(x, (0, 1), keepdims=True), 'was': x[:, :, 0]}


def _scaled(params, batch):
  total = optax.global_norm(params)
  return jax.tree_util.tree_map(lambda p: p / (1 + 0.1 * total), params), batch


def _rounded(params, batch):
  low = lambda p: p.astype(jnp.bfloat16).astype(jnp.float32)
  return jax.tree_util.tree_map(low, params), batch


# (params, batch) -> those that the loop sees.
_BEFORE = {
    '': lambda params, batch: (params, batch),
    'centred': _centred,
    'scaled': _scaled,
    'rounded': _rounded,
}

_METRICS = {
    'max': jnp.max,
    'count': lambda x: jnp.sum(x > 0),
    'square': lambda x: jnp.mean(x * x, 0),
}


def draw(seed: int) -> Model:
  """The model of a seed; equal seeds give equal models."""
  rng = random.Random(seed)

  def chance(p: float) -> bool:
    return rng.random() < p

  num_stages = rng.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 6])
  num_shared = rng.choice([0, 1, 1, 2, 3])
  with_stack, with_chunks = chance(0.3), chance(0.2)

  def layer(first: bool) -> Layer:
    weight = 'own'
    if num_shared and chance(0.4):
      weight = f'shared{rng.randrange(num_shared)}'
    elif with_stack and chance(0.7):
      weight = 'stack'
    elif with_chunks and chance(0.7):
      weight = 'chunk'
    kind = 'embed' if first and chance(0.4) else rng.choice(list(layers.KINDS))
    use = rng.choice(list(layers.USES)) if chance(0.3) else 'plain'
    wraps = tuple(rng.choices(list(layers.WRAPS), k=rng.choice([0, 0, 0, 1, 1, 2])))
    if kind in ('scan', 'scan_remat', 'repeat'):
      wraps = tuple(w for w in wraps if w != 'twice')  # compile time
    return Layer(kind, weight, use, wraps)

  stages = tuple(
      tuple(layer(s == i == 0) for i in range(rng.choice([0, 1, 1, 1, 2, 2, 3])))
      for s in range(num_stages)
  )
  skips = []
  for _ in range(rng.choice([0, 0, 1, 2])):
    if num_stages > 1:
      src, dst = sorted(rng.sample(range(num_stages), 2))
      skips.append((src, dst, chance(0.4)))
  names = [*(f'shared{k}' for k in range(num_shared)), 'stack', 'chunk']
  names += [f'own{s}.{i}' for s, stage in enumerate(stages) for i in range(len(stage))]
  optimizer = rng.choice(list(OPTIMIZERS))
  return Model(
      seed=seed,
      stages=stages,
      skips=tuple(sorted(set(skips))),
      yields=tuple(
          rng.choice(list(_EXTRAS)) if chance(0.35) else '' for _ in range(num_stages - 1)
      ),
      last_yield=chance(0.2),
      head=rng.choice(['mse', *(f'shared{k}' for k in range(num_shared))]),
      penalty=rng.choice(['all', 'shared']) if chance(0.15) else '',
      before=rng.choice(list(_BEFORE)) if chance(0.3) else '',
      fixed=tuple(name for name in names if chance(0.08)),
      metrics=tuple(
          (rng.randrange(num_stages), rng.choice(list(_METRICS)), chance(0.5))
          for _ in range(rng.choice([0, 0, 1, 2]))
      ),
      loop=rng.choice(['norm', 'clip']) if chance(0.2) else '',
      optimizer=optimizer,
      ema=chance(0.2),
      poison=optimizer == 'finite' and chance(0.5),
      num_actors=rng.randint(1, min(num_stages, 4)),
      num_microbatches=rng.randint(1, 5),
      donate=chance(0.5),
      forward_only=chance(0.06),
      around=tuple(rng.choice(['', '', 'remat', 'jit']) for _ in stages) if chance(0.4) else (),
      jit=chance(0.2),
  )


def init(model: Model) -> dict[str, Any]:
  """The first state."""
  rng = np.random.default_rng(model.seed)

  def normal(*shape):
    return (0.6 * rng.normal(size=shape)).astype(np.float32)

  weights = {}
  for s, stage in enumerate(model.stages):
    for i, layer in enumerate(stage):
      name = _name(layer, s, i)
      if name not in weights:
        rows = {'stack': len(model.stages), 'chunk': _rows(len(model.stages))[0]}
        weights[name] = normal(rows[name], DIM, DIM) if name in rows else normal(DIM, DIM)
  if model.head != 'mse':
    weights.setdefault(model.head, normal(DIM, DIM))
  weights['bias'] = normal(DIM)
  params = {k: w for k, w in weights.items() if k not in model.fixed}
  state = {
      'params': params,
      'fixed': {k: w for k, w in weights.items() if k in model.fixed},
      'opt': jax.tree_util.tree_map(np.asarray, OPTIMIZERS[model.optimizer].init(params)),
  }
  if model.ema:
    state['ema'] = params
  return state


def batch(model: Model) -> dict[str, np.ndarray]:
  """A batch, leaves [M, ...]."""
  rng = np.random.default_rng(model.seed + 1)
  shape = (model.num_microbatches, SIZE, LENGTH)
  out = {
      'x': rng.normal(size=(*shape, DIM)).astype(np.float32),
      'y': rng.normal(size=(*shape, DIM)).astype(np.float32),
      'tokens': rng.integers(0, DIM, shape).astype(np.int32),
      'key': rng.integers(0, 2**32, (model.num_microbatches, 2), np.uint32),
  }
  if model.poison:
    out['y'][rng.integers(model.num_microbatches), 0, 0, 0] = np.inf
  return out


def _rows(stage: int) -> tuple[int, int]:
  """The rows of stage-stacked layers that a stage has: one and two in turn."""
  return 3 * stage // 2, 3 * (stage + 1) // 2


def _layer(layer: Layer, stage: int, w: Any, x: Any, mb: Any) -> Any:
  use = layers.USES[layer.use]
  if layer.weight != 'chunk':
    w = use(w[stage] if layer.weight == 'stack' else w)
    return layers.apply(layer.kind, layer.wraps, w, x, mb)

  def body(x, w):
    return layers.apply(layer.kind, layer.wraps, use(w), x, mb), None

  first, last = _rows(stage)
  return jax.lax.scan(body, x, w[first:last])[0]


def _name(layer: Layer, stage: int, index: int) -> str:
  return f'own{stage}.{index}' if layer.weight == 'own' else layer.weight


def loss_fn(model: Model, weights: Any, mb: Any) -> tuple[Any, Any]:
  """The loss of one microbatch and (its weight, the metrics)."""
  x = mb['x']
  free: dict[int, Any] = {}  # outputs that skips take from outside of the yields
  carried: dict[int, Any] = {}  # and those that travel along
  metrics = []
  for s, stage in enumerate(model.stages):
    for src, dst, through in model.skips:
      if dst == s:
        x = x + 0.5 * (carried if through else free)[src]

    def run(x, s=s, stage=stage):
      for i, layer in enumerate(stage):
        x = _layer(layer, s, weights[_name(layer, s, i)], x, mb)
      return x

    around = model.around[s] if model.around else ''
    x = {'': run, 'remat': jax.checkpoint(run), 'jit': jax.jit(run)}[around](x)
    metrics += [_METRICS[name](x) for at, name, _ in model.metrics if at == s]
    free[s] = x
    if s == len(model.stages) - 1:
      break
    carried[s] = x
    last = max([dst for src, dst, through in model.skips if through and src == s], default=s)
    if last == s:
      del carried[s]
    extra = model.yields[s] if model.yields else ''
    if extra or carried:
      value = _EXTRAS[extra](x) if extra else ()
      tree = mpmd.pipeline_yield({'x': x, 'extra': value, 'carried': carried}, name=f'after{s}')
      carried = dict(tree['carried'])
      x = _use_extra(extra, tree['x'], tree['extra'])
    else:
      x = mpmd.pipeline_yield(x)
  if model.last_yield:
    x = mpmd.pipeline_yield(x)
  x = x + weights['bias']
  real = (mb['tokens'] != 0).astype(jnp.float32)
  if model.head == 'mse':
    each = jnp.mean((x - mb['y']) ** 2, -1)
  else:
    scores = jax.nn.log_softmax(x @ weights[model.head].T)
    each = -jnp.take_along_axis(scores, mb['tokens'][..., None], -1)[..., 0]
    each = each + 0.1 * jnp.mean((x - mb['y']) ** 2, -1)
  if 'was' in mb:
    each = each * jnp.cos(jnp.mean(mb['was'], -1))[:, None]
  value = jnp.sum(each * real)
  for name, w in weights.items():
    if model.penalty == 'all' or (model.penalty and name.startswith(model.penalty)):
      value = value + 0.01 * jnp.sum(w * w)
  return value, (jnp.sum(real), metrics)


def make_step(model: Model) -> Any:
  """The step (state, batch) -> (state, results)."""

  def split(metrics):
    kept = [m for m, (_, _, summed) in zip(metrics, model.metrics) if not summed]
    return [m for m, (_, _, summed) in zip(metrics, model.metrics) if summed], kept

  whole = jax.jit(loss_fn, static_argnums=0) if model.jit else loss_fn

  def forward(state, batch):
    params, seen = _BEFORE[model.before](state['params'], batch)

    def fn(mb):
      loss, (weight, metrics) = whole(model, {**params, **state['fixed']}, mb)
      summed, stacked = split(metrics)
      return (weight, summed), (loss, stacked)

    return state, mpmd.accumulate_grads(fn, seen)

  def step(state, batch):
    before, seen = _BEFORE[model.before](state['params'], batch)

    def grads_fn(mb):
      def loss(params):
        return whole(model, {**params, **state['fixed']}, mb)

      (value, (weight, metrics)), grads = jax.value_and_grad(loss, has_aux=True)(before)
      summed, stacked = split(metrics)
      if model.loop == 'norm':
        stacked = [*stacked, optax.global_norm(grads)]
      if model.loop == 'clip':
        grads = jax.tree_util.tree_map(
            lambda g: g * jnp.minimum(1.0, 0.3 * jax.lax.rsqrt(jnp.sum(g * g) + 1e-6)), grads
        )
      return (grads, weight, summed), (value, stacked)

    (grads, weight, summed), (losses, stacked) = mpmd.accumulate_grads(grads_fn, seen)
    grads = jax.tree_util.tree_map(lambda g: g / (weight + 1), grads)
    updates, opt = OPTIMIZERS[model.optimizer].update(grads, state['opt'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    new = {**state, 'params': params, 'opt': opt}
    if model.ema:
      new['ema'] = optax.incremental_update(params, state['ema'], 0.1)
    out = {
        'losses': losses,
        'loss': jnp.sum(losses) / (weight + 1),
        'norm': optax.global_norm(grads),
        'grads': grads,
        'stacked': stacked,
        'summed': summed,
        'real': jnp.mean(batch['tokens'] != 0),
    }
    return new, out

  return forward if model.forward_only else step
