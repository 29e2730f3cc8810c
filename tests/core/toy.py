"""Toy models for tests of dataflow: three stages of width 8, batches [M, 2, 8]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pax_mpmd as mpmd

DIM = 8


def batch(num_microbatches: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
  """A batch: `x` and `y` of shape [M, 2, 8]."""
  rng = np.random.default_rng(seed)
  shape = (num_microbatches, 2, DIM)
  return {
      'x': rng.normal(size=shape).astype(np.float32),
      'y': rng.normal(size=shape).astype(np.float32),
  }


def weights(num_stages: int = 3, seed: int = 1) -> list[np.ndarray]:
  """One matrix [8, 8] per stage."""
  rng = np.random.default_rng(seed)
  return [rng.normal(size=(DIM, DIM)).astype(np.float32) * 0.3 for _ in range(num_stages)]


def dense(w: Any, x: Any) -> Any:
  return jnp.tanh(x @ w)


def mse(x: Any, y: Any) -> Any:
  return jnp.mean((x - y) ** 2)


def train_step(loss_fn: Callable[[Any, Any], Any], lr: float = 0.1) -> Callable[..., Any]:
  """A step of gradient descent: (params, batch) -> (params, (losses, gradients' norm))."""

  def step(params, batch):
    def grads_fn(microbatch):
      loss, grads = jax.value_and_grad(loss_fn, allow_int=True)(params, microbatch)
      return grads, loss

    grads, losses = mpmd.accumulate_grads(grads_fn, batch)
    num = jax.tree_util.tree_leaves(batch)[0].shape[0]
    grads = jax.tree_util.tree_map(lambda g: g / num, grads)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree_util.tree_leaves(grads)))
    params = jax.tree_util.tree_map(lambda p, g: p - lr * g, params, grads)
    return params, (losses, norm)

  return step


def noise(scale: float) -> optax.GradientTransformation:
  """Adds noise to gradients, as `optax.add_noise` does, which has a typed key in newer versions."""

  def update(updates, key, params=None):
    key, *keys = jax.random.split(key, 1 + len(jax.tree_util.tree_leaves(updates)))
    keys = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(updates), keys)
    add = lambda g, k: g + scale * jax.random.normal(k, g.shape)
    return jax.tree_util.tree_map(add, updates, keys), key

  return optax.GradientTransformation(lambda _: jax.random.PRNGKey(3), update)
