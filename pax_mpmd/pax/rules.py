"""How the results of a batch (scalars, summaries, outputs of examples) follow from microbatches.

Found by tracing the model once on the whole batch, see `ratios`. The loop then takes from each
microbatch what has to be summed or stacked (`Rules.take`), and `Rules.finish` makes of it what Pax
computes of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import jax
from jax import numpy as jnp

from pax_mpmd import errors
from pax_mpmd.pax import layer
from pax_mpmd.pax import metrics as metrics_lib
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import outputs as outputs_lib
from pax_mpmd.pax import ratios

__all__ = ['Results', 'Rules', 'find_rules', 'safe_divide', 'weighted']

_SAME = ratios.Combination('same')
_OF_PIPELINE = ratios.Combination('of pipeline')


@dataclasses.dataclass(frozen=True)
class Results:
  """What a model gives for a batch or a microbatch.

  Attributes:
    metrics: its metrics, taken apart.
    summaries: name -> array.
    per_example: a pytree.
    loss: the loss of the batch; None for microbatches.
  """

  metrics: metrics_lib.Metrics
  summaries: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  per_example: Any = ()
  loss: Any = None


@dataclasses.dataclass(frozen=True)
class _Output:
  """A summary or a leaf of what is given per example: its aval in the whole batch, and how."""

  aval: Any
  combination: ratios.Combination


@dataclasses.dataclass(frozen=True)
class Rules:
  """How each result of a batch follows from those of its microbatches.

  Attributes:
    loss_key: the scalar that is the loss.
    num_microbatches: M.
    streams: see `microbatches.split_batch`.
    values: name -> how the value of a weighted scalar combines.
    summed: the scalars whose weights add up; those of the others are the same for any batch.
    dtypes: those of value and weight of each scalar.
    classes: of the scalars that are clu metrics, their classes.
    summaries: name -> a summary.
    per_example: the leaves of what is given per example.
    share: the factor of a microbatch's auxiliary losses in the sum of objectives.
  """

  loss_key: str
  num_microbatches: int
  streams: int
  values: dict[str, ratios.Combination]
  summed: frozenset[str]
  dtypes: dict[str, tuple[Any, Any]]
  classes: dict[str, type]
  summaries: dict[str, _Output]
  per_example: list[_Output]
  share: Any = None

  def factor(self, weights: Mapping[str, Any]) -> Any:
    """What a microbatch's loss counts by, given its weights; of the summed ones, their divisor."""
    return _factor(self.values[self.loss_key], weights)

  def divisor(self, weights: Mapping[str, Any]) -> Any:
    """What the sum of a batch's objectives is divided by, given its weights."""
    return _divisor(self.values[self.loss_key], weights, self.num_microbatches)

  def take(self, results: Results, aux_loss: Any = 0.0) -> tuple[Any, Any]:
    """What the loop keeps of one microbatch.

    Args:
      results: those of the microbatch.
      aux_loss: what pipelines added to the loss as auxiliary losses.

    Returns:
      Two pytrees of arrays: to be summed over the microbatches, and to be stacked.
    """
    scalars = results.metrics.scalars
    weights = {name: jax.lax.stop_gradient(w) for name, (_, w) in scalars.items()}
    sums: dict[str, Any] = dict(aux_loss=jnp.asarray(aux_loss), weights={}, values={})
    rows: dict[str, Any] = dict(values={})
    for name, (value, weight) in scalars.items():
      if self._has_aux_loss(name):
        value = value - aux_loss
      group = rows if self.values[name].kind in ('max', 'min') else sums
      group['values'][name] = jnp.asarray(weighted(value, _factor(self.values[name], weights)))
      if name in self.summed:
        sums['weights'][name] = jnp.asarray(weight)
    summaries = {name: jnp.asarray(results.summaries[name]) for name in self.summaries}
    leaves = [jnp.asarray(x) for x in jax.tree_util.tree_leaves(results.per_example)]
    for key, rules, xs in (
        ('summaries', self.summaries, summaries),
        ('per_example', dict(enumerate(self.per_example)), dict(enumerate(leaves))),
    ):
      sums[key], rows[key] = {}, {}
      for name, x in xs.items():
        how, group = rules[name].combination, rows if _is_stacked(rules[name], x) else sums
        if how.kind == 'ratio':
          x = weighted(x, _factor(how, weights))
        group[key][name] = x
    return sums, (rows, results.metrics.others)

  def finish(self, sums: Any, stacked: Any, treedef: Any) -> Results:
    """The results of the batch, from the sums and the rows of its microbatches.

    Args:
      sums: see `take`.
      stacked: see `take`.
      treedef: the structure of what is given per example.
    """
    rows, others = stacked
    m, weights = self.num_microbatches, self.weights(sums)
    scalars = {}
    for name, (value_dtype, weight_dtype) in self.dtypes.items():
      how = self.values[name]
      if how.kind in ('max', 'min'):
        value = getattr(jnp, how.kind)(rows['values'][name], axis=0)
      else:
        value = safe_divide(sums['values'][name], _divisor(how, weights, m))
      if self._has_aux_loss(name):
        value = value + sums['aux_loss'] / m
      scalars[name] = (value.astype(value_dtype), weights[name].astype(weight_dtype))
    loss, _ = scalars[self.loss_key]
    scalars, clu = metrics_lib.put_together(
        scalars, self.classes, metrics_lib.merge(others, self.streams)
    )
    summaries = {
        name: self._finish(rule, name, sums['summaries'], rows['summaries'], weights)
        for name, rule in self.summaries.items()
    }
    leaves = [
        self._finish(rule, i, sums['per_example'], rows['per_example'], weights)
        for i, rule in enumerate(self.per_example)
    ]
    return Results(
        metrics_lib.Metrics(scalars, {}, clu),
        summaries,
        jax.tree_util.tree_unflatten(treedef, leaves),
        loss,
    )

  def weights(self, sums: Any) -> dict[str, Any]:
    """The weights of the batch's scalars."""
    return {
        name: sums['weights'][name] if name in self.summed else jnp.ones((), dtype)
        for name, (_, dtype) in self.dtypes.items()
    }

  def _finish(self, rule, name, sums, rows, weights):
    how, dtype = rule.combination, rule.aval.dtype
    if name in rows:
      if how.kind in ('max', 'min') and rows[name].shape[1:] == rule.aval.shape:
        return getattr(jnp, how.kind)(rows[name], axis=0)
      x = microbatches.merge_microbatches(rows[name], self.streams)
      return safe_divide(x, _divisor(how, weights, 1)).astype(dtype) if how.kind == 'ratio' else x
    x = sums[name]
    if how.kind == 'of pipeline':
      return x / self.num_microbatches
    if how.kind != 'sum':
      x = safe_divide(x, _divisor(how, weights, self.num_microbatches))
    if not jnp.issubdtype(dtype, jnp.inexact):
      x = jnp.round(x)
    return x.astype(dtype)

  def _has_aux_loss(self, name: str) -> bool:
    return name in (self.loss_key, 'aux_loss')


def _is_stacked(rule: _Output, x: Any) -> bool:
  """Whether rows of a microbatch's array `x`, or `x` itself as one, are to be kept apart."""
  return rule.combination.kind in ('max', 'min', 'rows') or (
      rule.combination.kind != 'of pipeline' and x.shape != rule.aval.shape
  )


def _factor(how: ratios.Combination, weights: Mapping[str, Any]) -> Any:
  return how.divisor(weights[how.weight]) if how.kind == 'ratio' else jnp.ones(())


def _divisor(how: ratios.Combination, weights: Mapping[str, Any], num_microbatches: int) -> Any:
  if how.kind == 'ratio':
    return how.divisor(weights[how.weight])
  return jnp.asarray(1.0 if how.kind == 'sum' else float(num_microbatches))


def safe_divide(x: Any, y: Any) -> Any:
  """x / y, and 0 where y is 0: a batch without any weight has loss and gradient 0, not NaN."""
  y = jnp.asarray(y).astype(jnp.promote_types(jnp.asarray(x).dtype, jnp.float32))
  quotient = jnp.where(y == 0, jnp.zeros_like(x), x / jnp.where(y == 0, jnp.ones_like(y), y))
  return quotient.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else quotient


def weighted(value: Any, weight: Any) -> Any:
  """value * weight, and 0 where the weight is 0, also if the value is NaN then."""
  return jnp.where(weight == 0, jnp.zeros_like(value), value) * weight


def find_rules(
    loss_key: str | None,
    results_fn: Callable[..., Results],
    args: Sequence[Any],
    split: Callable[[Any], Any],
    num_microbatches: int,
    streams: int = 1,
) -> Rules:
  """Finds how the results of a model combine, by tracing it.

  Args:
    loss_key: the scalar that is the loss.
    results_fn: gives the results of the whole batch.
    args: its arguments, arrays or tracers.
    split: makes the arguments for one microbatch of them.
    num_microbatches: how many microbatches there are.
    streams: see `microbatches.split_batch`.

  Raises:
    ConfigError: something can't be had from microbatches; names it.
  """
  found: list[Any] = []

  def trace(*args):
    with layer.collect_aux_losses() as aux_losses:
      results = results_fn(*args)
    scalars = results.metrics.scalars
    found[:] = [results.metrics, sorted(scalars)]
    pairs = [scalars[name] for name in sorted(scalars)]
    return (
        [value for value, _ in pairs],
        [weight for _, weight in pairs],
        {name: x for name, x in results.summaries.items() if _is_numeric(x)},
        jax.tree_util.tree_leaves(results.per_example),
        list(aux_losses),
    )

  closed, shapes = jax.make_jaxpr(trace, return_shape=True)(*args)
  metrics, names = found
  if loss_key not in names:
    raise errors.ConfigError(
        f'The loss {loss_key!r} is not among the weighted scalars (or WeightedScalarCluMetrics)'
        f' that the model returns ({names}), so microbatches can not be combined. Use'
        ' paxml.base_metrics.LossAggregator (task.loss_aggregator; no MultiLossAggregator) with one'
        ' of them as its loss_key.'
    )
  if metrics.others:
    metrics_lib.check_mergeable(
        lambda *args: results_fn(*args).metrics, args, split, num_microbatches
    )
  finder = _Finder(closed, shapes, args, split, names, num_microbatches)
  values = {name: finder.value(name) for name in names}
  share = None
  if shapes[4]:
    how = values[loss_key]
    weights = {}
    if how.kind == 'ratio':
      position = finder.positions[1][names.index(how.weight)]
      leaves = jax.tree_util.tree_leaves(args)
      weights = {how.weight: outputs_lib.eval_output(closed, position, leaves)}
    share = _divisor(how, weights, num_microbatches) / num_microbatches
  return Rules(
      loss_key,
      num_microbatches,
      streams,
      values,
      frozenset(filter(finder.adds_up, names)),
      {name: (v.dtype, w.dtype) for name, v, w in zip(names, *shapes[:2])},
      dict(metrics.classes),
      {name: _Output(x, finder.summary(name)) for name, x in shapes[2].items()},
      [_Output(x, finder.per_example(i)) for i, x in enumerate(shapes[3])],
      share,
  )


class _Finder:
  """Finds how single results combine."""

  def __init__(self, closed, shapes, args, split, names, num_microbatches):
    numbers = iter(range(len(closed.jaxpr.outvars)))
    self.positions = jax.tree_util.tree_map(lambda _: next(numbers), shapes)
    self._shapes = shapes
    self._names = names
    self._one = num_microbatches == 1
    parts = jax.eval_shape(lambda *args: split(args), *args)
    pairs = zip(jax.tree_util.tree_leaves(args), jax.tree_util.tree_leaves(parts))
    varying = [jnp.shape(x) != part.shape for x, part in pairs]
    sizes = [jnp.shape(x)[0] for x, v in zip(jax.tree_util.tree_leaves(args), varying) if v]
    self._batch_size = sizes[0] if sizes else 1
    self._trace = ratios.Trace(closed, varying, self._batch_size)
    self._weights = {
        name: i for name, i in zip(names, self.positions[1]) if self._trace.is_count(i)
    }

  def adds_up(self, name: str) -> bool:
    """Whether the weight of a scalar is a sum over the batch."""
    return name in self._weights

  def value(self, name: str) -> ratios.Combination:
    """Of the value of a scalar."""
    if self._one:
      return _SAME
    i = self._names.index(name)
    how = self._trace.combination(self.positions[0][i], self._weights, self.positions[4])
    if how.kind == 'impossible':
      raise errors.ConfigError(
          f'The value of {name!r} among what the model returns from compute_loss {how.why}, so it'
          ' can not be combined over microbatches. Return with it the weight that it is divided by,'
          ' (sum(x * w) / sum(w), sum(w)), each term of another weight as a scalar of its own, or'
          ' set NUM_MICROBATCHES=1.'
      )
    if how.kind != 'unknown':
      return how
    if name in self._weights:
      return ratios.Combination('ratio', name, lambda w: w)
    return ratios.Combination('sum' if name.startswith('num_') else 'mean')

  def summary(self, name: str) -> ratios.Combination:
    """Of a summary."""
    if '/pipeline/' in name or self._one:
      return _OF_PIPELINE if '/pipeline/' in name else _SAME
    how = self._trace.combination(self.positions[2][name], self._weights, self.positions[4])
    if how.kind in ('unknown', 'impossible'):
      count = name.rsplit('/', 1)[-1].startswith('num_') and self._shapes[2][name].ndim == 0
      return ratios.Combination('sum' if count else 'mean')
    return how

  def per_example(self, i: int) -> ratios.Combination:
    """Of a leaf of what is given per example."""
    shape = self._shapes[3][i].shape
    rows = shape[:1] == (self._batch_size,)
    if self._one:
      return ratios.Combination('rows') if rows else _SAME
    how = self._trace.combination(self.positions[3][i], self._weights, self.positions[4])
    if rows:
      return how if how.kind == 'ratio' else ratios.Combination('rows')
    if how.kind in ('unknown', 'impossible'):
      raise errors.ConfigError(
          f'Output {i} of the shape {shape} among what compute_loss returns per example has no row'
          f' for each of the {self._batch_size} examples, so it can not be combined over'
          ' microbatches. Leave it out, give it a leading axis over the examples, or set'
          ' NUM_MICROBATCHES=1.'
      )
    return how


def _is_numeric(x: Any) -> bool:
  return jnp.issubdtype(jnp.asarray(x).dtype, jnp.number)
