"""Splitting a Pax batch into microbatches the way Pax's SPMD pipeline splits it, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import numpy as jnp

from pax_mpmd import errors

__all__ = ['Microbatching', 'merge_microbatches', 'split_batch']


@dataclasses.dataclass(frozen=True)
class Microbatching:
  """How a batch is split: exactly one of the first two fields is set, as in Pax.

  Attributes:
    num_microbatches: number of microbatches, or None.
    microbatch_size: examples per microbatch, or None.
    streams: contiguous parts of the batch that are split each for itself; Pax's `stream_io` has one
      for each pipeline rank.
  """

  num_microbatches: int | None = None
  microbatch_size: int | None = None
  streams: int = 1

  def __post_init__(self):
    if (self.num_microbatches is None) == (self.microbatch_size is None):
      raise errors.ConfigError(
          'Exactly one of NUM_MICROBATCHES and MICROBATCH_SIZE must be set (fields'
          ' num_pipeline_microbatches and pipeline_microbatch_size of the pipeline layer); got'
          f' NUM_MICROBATCHES={self.num_microbatches}, MICROBATCH_SIZE={self.microbatch_size}.'
          ' Set the one you want and leave the other None.'
      )
    value = self.num_microbatches if self.microbatch_size is None else self.microbatch_size
    if not isinstance(value, int) or value < 1:
      name = 'NUM_MICROBATCHES' if self.microbatch_size is None else 'MICROBATCH_SIZE'
      raise errors.ConfigError(f'{name} must be an integer of at least 1; got {value!r}.')

  def count(self, batch_size: int) -> int:
    """The number of microbatches of a batch of `batch_size` examples.

    Raises:
      ConfigError: if the batch can't be split evenly.
    """
    divisor = self.num_microbatches or self.microbatch_size
    if batch_size % divisor:
      name = 'NUM_MICROBATCHES' if self.microbatch_size is None else 'MICROBATCH_SIZE'
      allowed = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
      raise errors.ConfigError(
          f'The global batch of {batch_size} examples does not split evenly with'
          f' {name}={divisor}. It must divide the batch: use one of {allowed}, or change the'
          ' batch size (PERCORE_BATCH_SIZE times the number of devices in most experiments).'
      )
    num_microbatches = self.num_microbatches or batch_size // self.microbatch_size
    if num_microbatches % self.streams:
      allowed = [
          m for m in range(self.streams, batch_size + 1, self.streams) if batch_size % m == 0
      ]
      raise errors.ConfigError(
          f'STREAM_IO = True (stream_io of the pipeline layer) splits the {num_microbatches}'
          f' microbatches of a batch of {batch_size} examples between NUM_STAGES={self.streams}'
          ' streams, which does not go evenly. Set STREAM_IO = False'
          + (f', or NUM_MICROBATCHES to one of {allowed}.' if allowed else '.')
      )
    return num_microbatches

  def first(self, batch: Any) -> Any:
    """The first microbatch of a batch of leaves `[B, ...]`."""
    num_microbatches = self.count(jax.tree_util.tree_leaves(batch)[0].shape[0])
    split = split_batch(batch, num_microbatches, self.streams)
    return jax.tree_util.tree_map(lambda x: x[0], split)


def split_batch(batch: Any, num_microbatches: int, streams: int = 1) -> Any:
  """Splits leaves `[B, ...]` into `[M, B // M, ...]`, strided: microbatch i has rows i, i + M, ...

  Strided because Pax's pipeline does it so (it keeps a sharding of the batch axis in place), and
  because per-microbatch weights then agree with Pax's. With several streams the batch is cut into
  that many contiguous parts, and each of them is split like this into M // streams microbatches.
  """

  def split(x):
    size, per_stream = x.shape[0] // num_microbatches, num_microbatches // streams
    x = jnp.reshape(x, (streams, size, per_stream, *x.shape[1:]))
    return jnp.reshape(jnp.swapaxes(x, 1, 2), (num_microbatches, size, *x.shape[3:]))

  return jax.tree_util.tree_map(split, batch)


def merge_microbatches(stacked: Any, streams: int = 1) -> Any:
  """Undoes `split_batch`: leaves `[M, microbatch, ...]` to `[B, ...]` in input order.

  A leaf `[M]`, one number a microbatch, becomes its mean.
  """

  def merge(x):
    if x.ndim < 2:
      return jnp.mean(x, axis=0).astype(x.dtype)
    m, size = x.shape[:2]
    x = jnp.reshape(x, (streams, m // streams, size, *x.shape[2:]))
    return jnp.reshape(jnp.swapaxes(x, 1, 2), (m * size, *x.shape[3:]))

  return jax.tree_util.tree_map(merge, stacked)
