"""A small causal transformer with tied embedding, stages stacked, and its training step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pax_mpmd as mpmd

VOCAB, DIM, HEADS, HIDDEN, LENGTH = 17, 16, 2, 32, 6
CLIP = 0.3

OPTIMIZER = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(1e-2))


class State(NamedTuple):
  """What a training step carries on: `params` and the optimizer's state."""

  params: Any
  opt: Any


def init(num_stages: int, seed: int = 0) -> State:
  """The first state; the leaves of `params['layers']` are `[num_stages, ...]`."""
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return (rng.normal(size=shape) * shape[-2] ** -0.5).astype(np.float32)

  s = num_stages
  params = {
      'embedding': normal(VOCAB, DIM),
      'position': normal(LENGTH, DIM) * np.float32(0.1),
      'final_scale': np.ones((DIM,), np.float32),
      'layers': {
          'qkv': normal(s, DIM, 3 * DIM),
          'out': normal(s, DIM, DIM),
          'up': normal(s, DIM, HIDDEN),
          'down': normal(s, HIDDEN, DIM),
          'scale1': np.ones((s, DIM), np.float32),
          'scale2': np.ones((s, DIM), np.float32),
      },
  }
  return State(params, jax.tree_util.tree_map(np.asarray, OPTIMIZER.init(params)))


def batch(num_microbatches: int, size: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
  """Tokens and labels [M, size, length], some of them padding."""
  rng = np.random.default_rng(seed)
  shape = (num_microbatches, size, LENGTH)
  tokens = rng.integers(1, VOCAB, shape).astype(np.int32)
  return {'tokens': tokens, 'labels': np.roll(tokens, -1, -1)}


def _norm(x, scale):
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer(p: Any, x: Any, mask: Any) -> Any:
  """Attention and MLP on x [batch, length, dim]."""
  b, t, _ = x.shape
  qkv = (_norm(x, p['scale1']) @ p['qkv']).reshape(b, t, 3, HEADS, DIM // HEADS)
  q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
  logits = jnp.einsum('bqhd,bkhd->bhqk', q, k) * (DIM // HEADS) ** -0.5
  probs = jax.nn.softmax(jnp.where(mask, logits, -1e9))
  x = x + jnp.einsum('bhqk,bkhd->bqhd', probs, v).reshape(b, t, DIM) @ p['out']
  return x + jax.nn.gelu(_norm(x, p['scale2']) @ p['up']) @ p['down']


def loss_fn(params: Any, microbatch: Any) -> tuple[Any, Any]:
  """Mean cross-entropy and the accuracy; a yield between each two stages."""
  layers = params['layers']
  num_stages = layers['qkv'].shape[0]
  mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
  x = params['embedding'][microbatch['tokens']] + params['position']
  for s in range(num_stages):
    x = jax.checkpoint(layer)(jax.tree_util.tree_map(lambda w, s=s: w[s], layers), x, mask)
    if s < num_stages - 1:
      x = mpmd.pipeline_yield(x)
  logits = _norm(x, params['final_scale']) @ params['embedding'].T
  picked = jnp.take_along_axis(jax.nn.log_softmax(logits), microbatch['labels'][..., None], -1)
  return -jnp.mean(picked), jnp.mean(logits.argmax(-1) == microbatch['labels'])


def train_step(state: State, batch: Any) -> tuple[State, dict[str, Any]]:
  """One step; also returns per-microbatch losses, the gradients and their norm."""

  def grads_fn(microbatch):
    out, grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, microbatch)
    return grads, out

  grads, (losses, accuracies) = mpmd.accumulate_grads(grads_fn, batch)
  grads = jax.tree_util.tree_map(lambda g: g / batch['tokens'].shape[0], grads)
  updates, opt = OPTIMIZER.update(grads, state.opt, state.params)
  state = State(optax.apply_updates(state.params, updates), opt)
  return state, {
      'losses': losses,
      'accuracies': accuracies,
      'grads': grads,
      'norm': optax.global_norm(grads),
  }
