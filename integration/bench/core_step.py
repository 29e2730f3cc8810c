"""One side of a comparison without Pax: a GPT's training step under jax.jit, or on actors.

`python -m integration.bench.core_step SIDE JSON`, started by `integration.bench.alternating`. Runs
on 0.4.26 and on the newest JAX.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from integration.bench import alternating

__all__ = ['Gpt', 'build', 'side']


@dataclasses.dataclass(frozen=True)
class Gpt:
  """The model and how it is cut."""

  stages: int = 4
  layers_per_stage: int = 2
  width: int = 256
  heads: int = 4
  hidden: int = 1024
  length: int = 128
  vocab: int = 4096
  batch: int = 16
  microbatches: int = 8
  schedule: str = '1f1b'
  actors: int | None = None
  trace_dir: str | None = None


def side(name: str, model: Gpt) -> alternating.Side:
  """The command and environment of a side.

  Args:
    name: 'plain' (jax.jit on one device), 'data' (jax.jit, 2-way data parallel), 'local' or 'ray'.
    model: the model.
  """
  return alternating.side('integration.bench.core_step', name, model, 2 if name == 'data' else 1)


def _functions(model: Gpt, optimizer: Any):
  """The training step: (state, batch) -> (state, loss)."""
  import jax
  import jax.numpy as jnp
  import optax

  import pax_mpmd as mpmd

  def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

  def layer(p, x):
    b, t, d = x.shape
    qkv = (norm(x, p['scale1']) @ p['qkv']).reshape(b, t, 3, model.heads, d // model.heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    logits = jnp.einsum('bqhd,bkhd->bhqk', q, k) * (d // model.heads) ** -0.5
    mask = jnp.tril(jnp.ones((t, t), bool))
    probs = jax.nn.softmax(jnp.where(mask, logits, -1e9))
    x = x + jnp.einsum('bhqk,bkhd->bqhd', probs, v).reshape(b, t, d) @ p['out']
    return x + jax.nn.gelu(norm(x, p['scale2']) @ p['up']) @ p['down']

  @jax.checkpoint
  def stage(layers, x):
    for p in layers:
      x = layer(p, x)
    return x

  def loss_fn(params, tokens):
    x = params['embedding'][tokens] + params['position']
    for i, layers in enumerate(params['stages']):
      x = stage(layers, x)
      if i < model.stages - 1:
        x = mpmd.pipeline_yield(x)
    logits = norm(x, params['final']) @ params['embedding'].T
    labels = jnp.roll(tokens, -1, -1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  def step(state, batch):
    params, opt = state

    def grads_fn(tokens):
      loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
      return grads, loss

    grads, losses = mpmd.accumulate_grads(grads_fn, batch)
    grads = jax.tree_util.tree_map(lambda g: g / model.microbatches, grads)
    updates, opt = optimizer.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), losses.mean()

  return step


def _initial(model: Gpt, optimizer: Any) -> Any:
  import jax
  import numpy as np

  rng = np.random.default_rng(0)

  def normal(*shape):
    return (rng.normal(size=shape) * 0.02).astype(np.float32)

  d = model.width
  layer = lambda: {
      'qkv': normal(d, 3 * d), 'out': normal(d, d),
      'up': normal(d, model.hidden), 'down': normal(model.hidden, d),
      'scale1': np.ones(d, np.float32), 'scale2': np.ones(d, np.float32),
  }
  params = {
      'embedding': normal(model.vocab, d),
      'position': normal(model.length, d),
      'final': np.ones(d, np.float32),
      'stages': [[layer() for _ in range(model.layers_per_stage)] for _ in range(model.stages)],
  }
  return params, jax.tree_util.tree_map(np.asarray, optimizer.init(params))


def build(name: str, model: Gpt, runtime: Any | None = None):
  """What `alternating.serve` needs.

  Args:
    name: of the side.
    model: the model.
    runtime: where it runs if it is distributed; None: what the side's name says.
  """
  import jax
  import numpy as np
  import optax

  import pax_mpmd as mpmd

  optimizer = optax.adamw(1e-3)
  train_step = _functions(model, optimizer)
  state = _initial(model, optimizer)
  rng = np.random.default_rng(1)
  shape = (model.microbatches, model.batch // model.microbatches, model.length)
  batches = [rng.integers(1, model.vocab, shape).astype(np.int32) for _ in range(8)]
  close = lambda: None
  if name in ('plain', 'data'):
    sharding = {}
    if name == 'data':
      # Each device takes half of every microbatch.
      mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ('data',))
      spec = jax.sharding.PartitionSpec
      whole = jax.sharding.NamedSharding(mesh, spec())
      split = jax.sharding.NamedSharding(mesh, spec(None, 'data'))
      sharding = {'in_shardings': (whole, split), 'out_shardings': whole}
    step_fn = jax.jit(train_step, donate_argnums=0, **sharding)
  else:
    runtime = runtime or (mpmd.RayRuntime() if name == 'ray' else mpmd.LocalRuntime())
    step_fn = mpmd.mpmd_jit(
        train_step,
        schedule=mpmd.schedules.get(model.schedule, model.stages, model.actors),
        runtime=runtime,
        donate_argnums=0,
        trace_steps=5 if model.trace_dir else 0,
        trace_dir=model.trace_dir or '',
    )
    close = runtime.close
  box = {'state': state, 'count': 0}

  def step():
    batch = batches[box['count'] % len(batches)]
    box['count'] += 1
    box['state'], loss = step_fn(box['state'], batch)
    return lambda: np.asarray(loss)

  return step, close


if __name__ == '__main__':
  alternating.serve(lambda: build(sys.argv[1], Gpt(**json.loads(sys.argv[2]))))
