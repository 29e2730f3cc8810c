"""The layers of random models: functions (weight [D, D], x [b, T, D], microbatch) -> x."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp

Layer = Callable[[Any, Any, Mapping[str, Any]], Any]


def _dense(w, x, mb):
  del mb
  return jnp.tanh(x @ w)


def _gelu(w, x, mb):
  del mb
  return jax.nn.gelu(x @ w)


def _linear(w, x, mb):
  del mb
  return x @ w


def _norm(w, x, mb):
  del mb
  centred = x - jnp.mean(x, -1, keepdims=True)
  return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 0.1) * (1 + w[0]) + w[1]


def _gate(w, x, mb):
  del mb
  return x * jax.nn.sigmoid(x @ w)


def _attention(w, x, mb):
  """Each position looks at those before it that aren't padding (token 0)."""
  length = x.shape[-2]
  seen = jnp.tril(jnp.ones((length, length), bool)) & (mb['tokens'] != 0)[:, None, :]
  logits = jnp.where(seen, jnp.einsum('bqd,bkd->bqk', x @ w, x), -1e9)
  return jnp.einsum('bqk,bkd->bqd', jax.nn.softmax(logits), x)


def _embed(w, x, mb):
  return 0.5 * x + w[mb['tokens']]


def _mask(w, x, mb):
  return jnp.where((mb['tokens'] > 1)[..., None], x @ w, x)


def _pick(w, x, mb):
  """Integers that come from the activation: the row of the weight of the largest entry."""
  del mb
  return x + 0.3 * w[jnp.argmax(x, -1)]


def _dropout(w, x, mb):
  key = jax.random.fold_in(mb['key'], 3)
  return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x @ w, 0.0)


def _scan(w, x, mb):
  """Layers that are scanned over; their weights are stacked from one."""
  del mb
  stacked = jnp.stack([w, 0.5 * w.T])
  return jax.lax.scan(lambda x, w: (x + 0.5 * jnp.tanh(x @ w), None), x, stacked)[0]


def _scan_remat(w, x, mb):
  del mb

  @jax.checkpoint
  def body(x, scale):
    x = jnp.tanh(x @ (w * scale))
    return x, jnp.sum(x, -1)

  x, sums = jax.lax.scan(body, x, jnp.array([1.0, 0.7, 0.9]))
  return x + 0.1 * jnp.mean(sums, 0)[..., None]


def _repeat(w, x, mb):
  del mb
  return jax.lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ w + 0.1 * i), x)


def _while(w, x, mb):
  """A loop whose length depends on the data; it has no reverse derivative, so none is taken."""
  del mb
  scale = jax.lax.while_loop(
      lambda s: s * jnp.max(jnp.abs(jax.lax.stop_gradient(x))) < 1.0, lambda s: s * 1.5, 0.5
  )
  return jnp.tanh(scale * x @ w)


def _switch(w, x, mb):
  branches = [lambda w, x: x @ w, lambda w, x: jnp.sin(x @ w), lambda w, x: x * w[0]]
  return jax.lax.switch(mb['tokens'][0, 0] % 3, branches, w, x)


@jax.custom_vjp
def _odd(x):
  return jnp.sin(x)


# Not the derivative of sine: so that it shows if the rule is lost.
_odd.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (0.5 * g * x,))


def _custom_vjp(w, x, mb):
  del mb
  return _odd(x @ w)


def _relu(w, x, mb):
  del mb
  return jax.nn.relu(x @ w) + 0.1 * x


@jax.jit
def _block(w, x):
  return jnp.tanh(x @ w) @ w


def _called(w, x, mb):
  """A function with a jit of its own, the same wherever it is called."""
  del mb
  return 0.5 * _block(w, x)


def _half_stopped(w, x, mb):
  del mb
  y = jnp.tanh(x @ w)
  return y + jax.lax.stop_gradient(x - y)


KINDS: Mapping[str, Layer] = {
    'dense': _dense,
    'gelu': _gelu,
    'linear': _linear,
    'norm': _norm,
    'gate': _gate,
    'attention': _attention,
    'embed': _embed,
    'mask': _mask,
    'pick': _pick,
    'dropout': _dropout,
    'scan': _scan,
    'scan_remat': _scan_remat,
    'repeat': _repeat,
    'while': _while,
    'switch': _switch,
    'custom_vjp': _custom_vjp,
    'relu': _relu,
    'called': _called,
    'half_stopped': _half_stopped,
}


def _residual(fn: Layer) -> Layer:
  return lambda w, x, mb: x + 0.5 * fn(w, x, mb)


def _cond(fn: Layer) -> Layer:
  def run(w, x, mb):
    return jax.lax.cond(
        jnp.mean(x) > 0.05, lambda w, x: fn(w, x, mb), lambda w, x: x * w[1], w, x
    )

  return run


def _twice(fn: Layer) -> Layer:
  return lambda w, x, mb: fn(w, fn(w, x, mb), mb)


WRAPS: Mapping[str, Callable[[Layer], Layer]] = {
    'residual': _residual,
    'remat': jax.checkpoint,
    'jit': jax.jit,
    'cond': _cond,
    'twice': _twice,
}

# What happens to a weight before it is used.
USES: Mapping[str, Callable[[Any], Any]] = {
    'plain': lambda w: w,
    'transposed': lambda w: w.T,
    'scaled': lambda w: 0.5 * w,
    'cast': lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
    'cast_transposed': lambda w: w.astype(jnp.bfloat16).T.astype(jnp.float32),
    'frozen': jax.lax.stop_gradient,
    'normed': lambda w: w * jax.lax.rsqrt(1 + jnp.sum(w * w)),
}


def apply(kind: str, wraps: tuple[str, ...], w: Any, x: Any, mb: Mapping[str, Any]) -> Any:
  """Applies a layer, wrapped by `wraps` from the inside out."""
  fn = functools.reduce(lambda fn, wrap: WRAPS[wrap](fn), wraps, KINDS[kind])
  return fn(w, x, mb)
