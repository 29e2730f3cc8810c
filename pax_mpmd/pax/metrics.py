"""What a model returns as metrics, over microbatches: weighted scalars, and clu metrics.

A model returns either weighted scalars, (value, weight) pairs, or clu metrics. Of the second kind
Pax's `WeightedScalarCluMetric`, which alone may be the loss, is a weighted scalar in other clothes
and is treated as one. The others are made for each microbatch and merged as clu merges what several
devices have made of one batch. By clu's contract that is the metric of the whole batch. Where it
shows that a metric doesn't keep it, because it counts a batch as one whatever its size, the metric
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from clu import metrics as clu_metrics
import jax
import numpy as np
from paxml import base_metrics

from pax_mpmd import errors
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import outputs

__all__ = ['Metrics', 'check_mergeable', 'merge', 'put_together', 'take_apart']

_Weighted = base_metrics.WeightedScalarCluMetric


@dataclasses.dataclass(frozen=True)
class Metrics:
  """The metrics of a batch or a microbatch, taken apart.

  Attributes:
    scalars: name -> (value, weight), also of what is a `WeightedScalarCluMetric`.
    classes: the classes of those that are; the names of the others aren't in it.
    others: name -> any other clu metric.
  """

  scalars: dict[str, tuple[Any, Any]]
  classes: dict[str, type]
  others: dict[str, clu_metrics.Metric]


def take_apart(weighted_scalars: Mapping[str, Any], clu: Mapping[str, Any] | None) -> Metrics:
  """Takes apart what Pax's loss function and eval step give.

  Args:
    weighted_scalars: the weighted scalars; empty where the model returns clu metrics.
    clu: the clu metrics; empty where it returns weighted scalars.

  Raises:
    ConfigError: there are both, of which Pax's summaries can take only one.
  """
  found = {**dict(weighted_scalars), **dict(clu or {})}
  scalars, classes, others = {}, {}, {}
  for name, value in found.items():
    if isinstance(value, tuple):
      scalars[name] = value
    elif isinstance(value, _Weighted):
      scalars[name] = (value.compute(), value.weight)
      classes[name] = type(value)
    elif isinstance(value, clu_metrics.Metric):
      others[name] = value
  pairs = scalars.keys() - classes.keys()
  unknown = found.keys() - scalars.keys() - others.keys()
  if unknown or (pairs and (classes or others)) or not found:
    kinds = {name: type(value).__name__ for name, value in found.items()}
    raise errors.ConfigError(
        "The metrics that the model's compute_loss returns must be weighted scalars, (value,"
        ' weight) pairs, or clu metrics, and not both; got'
        f' {", ".join(f"{name}: {kind}" for name, kind in kinds.items()) or "none"}. Return'
        ' paxml.base_metrics.WeightedScalarCluMetric.create(value, weight) in place of a pair, or'
        ' weighted scalars alone.'
    )
  return Metrics(scalars, classes, others)


def put_together(
    scalars: Mapping[str, tuple[Any, Any]], classes: Mapping[str, type], others: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Undoes `take_apart`: (weighted scalars, clu metrics)."""
  pairs = {name: pair for name, pair in scalars.items() if name not in classes}
  clu = {
      name: classes[name](weighted_value=value * weight, weight=weight)
      for name, (value, weight) in scalars.items()
      if name in classes
  }
  return pairs, {**clu, **others}


def merge(stacked: Mapping[str, Any], streams: int = 1) -> dict[str, Any]:
  """The metrics of a batch from those of its microbatches.

  Args:
    stacked: clu metrics of leaves `[M, ...]`, one row a microbatch.
    streams: see `microbatches.split_batch`.

  Returns:
    The metrics; what collects examples has them in the order of the batch.
  """
  out = {}
  for name, metric in stacked.items():
    if isinstance(metric, clu_metrics.CollectingMetric):
      out[name] = microbatches.merge_microbatches(metric, streams)
    else:
      out[name] = metric.reduce()
  return out


def check_mergeable(
    whole_fn: Callable[..., Metrics], args: Any, split: Callable[[Any], Any], num_microbatches: int
) -> None:
  """Checks that metrics merged over microbatches can be those of the whole batch.

  Leaves that are constants, such as a count of examples, are merged right away and compared.

  Args:
    whole_fn: the metrics of the whole batch, taken apart.
    args: its arguments, arrays or tracers.
    split: makes the arguments for one microbatch of them.
    num_microbatches: how many microbatches there are.

  Raises:
    ConfigError: a metric would come out otherwise; names it.
  """
  whole, whole_shapes = _constants(whole_fn, args)
  if not whole:
    return
  part, part_shapes = _constants(whole_fn, split(args))
  for name, metric in whole_shapes.items():
    collects = isinstance(metric, clu_metrics.CollectingMetric)
    _check_shapes(name, metric, part_shapes[name], num_microbatches if collects else None)
    if collects:
      continue
    rows = [np.zeros((), np.float32) if x is None else x for x in part[name]]
    stacked = [np.broadcast_to(x, (num_microbatches, *x.shape)) for x in rows]
    treedef = jax.tree_util.tree_structure(metric)
    with jax.ensure_compile_time_eval():
      merged = jax.tree_util.tree_leaves(jax.tree_util.tree_unflatten(treedef, stacked).reduce())
    for field, a, b, row in zip(_fields(metric), whole[name], merged, part[name]):
      if a is not None and row is not None and not np.allclose(a, b):
        raise errors.ConfigError(
            f'The clu metric {name!r} ({type(metric).__name__}) that compute_loss returns can not'
            f' be merged over microbatches: its {field} is {a} for a whole batch, but merged over'
            f' {num_microbatches} microbatches it is {np.asarray(b)}. It counts a batch as one,'
            ' whatever its size. Make it of the values of tokens or examples, with their mask, or'
            ' of a mean and its weight, as'
            ' paxml.base_metrics.WeightedScalarCluMetric.create(value, weight).'
        )


def _check_shapes(name: str, whole: Any, part: Any, factor: int | None) -> None:
  """Leaves are the same for a batch and a microbatch, or `factor` times as many rows."""
  leaves = [jax.tree_util.tree_leaves(x) for x in (whole, part)]
  for field, a, b in zip(_fields(whole), *leaves):
    if factor is None:
      expected = b.shape
    else:
      expected = (factor * b.shape[0], *b.shape[1:]) if b.shape else None
    if a.shape != expected:
      raise errors.ConfigError(
          f'The clu metric {name!r} ({type(whole).__name__}) that compute_loss returns can not be'
          f' put together from microbatches: its {field} is of shape {a.shape} for a whole batch'
          f' and of shape {b.shape} for a microbatch.'
          + (
              ' A CollectingMetric must collect values whose first dimension is the batch.'
              if factor
              else ' Sum over the examples where the metric is made, or collect them in a'
              ' clu.metrics.CollectingMetric.'
          )
      )


def _fields(metric: Any) -> list[str]:
  paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(metric)[0]]
  return [jax.tree_util.keystr(path).lstrip('.') for path in paths]


def _constants(
    fn: Callable[..., Metrics], args: Any
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
  """Per metric the values of its leaves, None where they aren't constants; and their shapes."""
  names: dict[str, Any] = {}

  def leaves_of(args):
    others = fn(*args).others
    names.update(jax.eval_shape(lambda: others))
    return jax.tree_util.tree_leaves({name: others[name] for name in sorted(others)})

  closed = jax.make_jaxpr(leaves_of)(args)
  values, position = {}, 0
  for name in sorted(names):
    count = len(jax.tree_util.tree_leaves(names[name]))
    values[name] = [outputs.constant_output(closed, position + i) for i in range(count)]
    position += count
  return values, names
