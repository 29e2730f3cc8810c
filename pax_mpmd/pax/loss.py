"""Losses, metrics and gradients of a batch from those of its microbatches, as Pax weights them.

Pax computes the main loss on the whole batch: sum(xent * w) / sum(w). Per microbatch the model
gives loss_i with weight W_i, so the batch's loss is sum(W_i loss_i) / sum(W_i), and the gradient
likewise; the loop differentiates W_i loss_i and the sum is divided once after it. What a pipeline
adds as auxiliary loss Pax divides by the number of microbatches M, unweighted, so with aux_i the
objective of a microbatch is W_i loss_i + (W / M - W_i) aux_i, W = sum(W_i).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
from paxml import learners
from paxml import sgf
from paxml import trainer_lib

from pax_mpmd import errors
from pax_mpmd.compile import marks
from pax_mpmd.pax import layer
from pax_mpmd.pax import metrics as metrics_lib
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import outputs as outputs_lib
from pax_mpmd.pax import updates

__all__ = ['ScalarRules', 'find_rules', 'make_grad_fn', 'safe_divide', 'weighted']

# In place of a weight of zero where a whole microbatch has none. Small enough to change no sum, and
# it keeps models that divide by their weights (and the gradient of that) away from 0 / 0.
_TINY_WEIGHT = 1e-20

Sums = dict[str, Any]


def without_empty_weights(inputs: Any) -> Any:
  """`inputs` of one microbatch with tiny `weights` where all of them are zero."""
  weights = inputs.get('weights') if isinstance(inputs, dict) else None
  if weights is None or not jnp.issubdtype(weights.dtype, jnp.floating):
    return inputs
  inputs = inputs.copy()
  inputs['weights'] = jnp.where(
      jnp.all(weights == 0), jnp.asarray(_TINY_WEIGHT, weights.dtype), weights
  )
  return inputs


@dataclasses.dataclass(frozen=True)
class ScalarRules:
  """How each weighted scalar of a batch follows from those of its microbatches.

  Attributes:
    loss_key: the scalar that is the loss.
    unit: the scalars whose weight is 1 whatever the batch is. Pax's models give it to what isn't an
      average over tokens, among them the counts, which they name num_something.
    dtypes: those of value and weight of each scalar.
    classes: of those that are clu metrics, their classes.
    total_weight: the weight of the whole batch's loss where the pipeline adds auxiliary losses,
      else None.
  """

  loss_key: str
  unit: frozenset[str]
  dtypes: dict[str, tuple[Any, Any]]
  classes: dict[str, type]
  total_weight: Any = None

  def sums_of(self, scalars: dict[str, tuple[Any, Any]], aux_loss: Any) -> Sums:
    """What the loop sums for the weighted scalars of one microbatch.

    Args:
      scalars: name -> (value, weight).
      aux_loss: what pipelines added to the loss as auxiliary losses.

    Returns:
      A pytree of arrays to be summed over the microbatches, for `combine`.
    """
    loss_weight = scalars[self.loss_key][1]
    sums = {}
    for name, (value, weight) in scalars.items():
      if self._has_aux_loss(name):
        main = weighted(value - aux_loss, loss_weight)
        sums[name] = (main, loss_weight, aux_loss, weight)
      elif name in self.unit:
        sums[name] = (value, weight)
      else:
        sums[name] = (weighted(value, weight), weight)
    return jax.tree_util.tree_map(jnp.asarray, sums)

  def combine(self, sums: Sums, num_microbatches: int) -> dict[str, tuple[Any, Any]]:
    """The batch's weighted scalars from the sums over its microbatches."""
    out = {}
    for name, (value, *rest) in sums.items():
      weight = rest[-1]
      if self._has_aux_loss(name):
        loss_weight, aux_loss, _ = rest
        value = safe_divide(value, loss_weight.astype(value.dtype)) + aux_loss / num_microbatches
      elif name not in self.unit:
        value = safe_divide(value, weight.astype(value.dtype))
      elif not name.startswith('num_'):
        value = value / num_microbatches
      weight = weight / num_microbatches if name in self.unit else weight
      value_dtype, weight_dtype = self.dtypes[name]
      out[name] = (value.astype(value_dtype), weight.astype(weight_dtype))
    return out

  def _has_aux_loss(self, name: str) -> bool:
    # Outside of the pipeline auxiliary losses are averages over tokens (the softmax's z-loss), so
    # 'aux_loss' too is taken apart into a weighted and an unweighted part.
    return name == self.loss_key or (name == 'aux_loss' and name in self.unit)


def find_rules(
    loss_key: str | None,
    metrics_fn: Callable[..., metrics_lib.Metrics],
    args: Sequence[Any],
    split: Callable[[Any], Any],
    num_microbatches: int,
) -> ScalarRules:
  """Finds how the weighted scalars of a model combine, by tracing it.

  Args:
    loss_key: the scalar that is the loss.
    metrics_fn: gives the metrics of the whole batch.
    args: its arguments, arrays or tracers.
    split: makes the arguments for one microbatch of them.
    num_microbatches: how many microbatches there are.

  Raises:
    ConfigError: if the loss has no weight of its own, or clu metrics can't be merged.
  """
  names: list[str] = []
  dtypes: dict[str, tuple[Any, Any]] = {}
  classes: dict[str, type] = {}
  others: list[str] = []
  has_aux_losses = False

  def weights_of(*args):
    nonlocal has_aux_losses
    with layer.collect_aux_losses() as aux_losses:
      found = metrics_fn(*args)
    scalars = found.scalars
    classes.update(found.classes)
    others.extend(found.others)
    has_aux_losses = bool(aux_losses)
    names[:] = sorted(scalars)
    dtypes.update({n: tuple(jnp.asarray(x).dtype for x in scalars[n]) for n in names})
    return [scalars[name][1] for name in names]

  closed = jax.make_jaxpr(weights_of)(*args)
  if loss_key not in names:
    raise errors.ConfigError(
        f'The loss {loss_key!r} is not among the weighted scalars (or WeightedScalarCluMetrics)'
        f' that the model returns ({names}), so microbatches can not be combined. Use'
        ' paxml.base_metrics.LossAggregator (task.loss_aggregator) with one of them as its'
        ' loss_key.'
    )
  if others:
    metrics_lib.check_mergeable(metrics_fn, args, split, num_microbatches)
  leaves = jax.tree_util.tree_leaves(args)
  unit = frozenset(
      name for i, name in enumerate(names) if _is_one(outputs_lib.constant_output(closed, i))
  )
  total = None
  if has_aux_losses:
    total = 1.0
    if loss_key not in unit:
      total = outputs_lib.eval_output(closed, names.index(loss_key), leaves)
  return ScalarRules(loss_key, unit, dtypes, classes, total)


def _is_one(value: np.ndarray | None) -> bool:
  return value is not None and bool(np.all(value == 1))


def safe_divide(x: Any, y: Any) -> Any:
  """x / y, and 0 where y is 0: a batch without any weight has loss and gradient 0, not NaN."""
  return jnp.where(y == 0, jnp.zeros_like(x), x / jnp.where(y == 0, jnp.ones_like(y), y))


def weighted(value: Any, weight: Any) -> Any:
  """value * weight, and 0 where the weight is 0, also if the value is NaN then."""
  return jnp.where(weight == 0, jnp.zeros_like(value), value) * weight


def mean_summaries(sums: dict[str, Any], num_microbatches: int) -> dict[str, Any]:
  """Summaries of the batch: the mean over microbatches as in Pax's pipeline; counts are summed."""

  def finish(name, x):
    if name.rsplit('/', 1)[-1].startswith('num_') and x.ndim == 0:
      return x
    return x / num_microbatches

  return {name: finish(name, x) for name, x in sums.items()}


def numeric_summaries(summaries: dict[str, Any]) -> dict[str, Any]:
  """Only the summaries that can be averaged; text has no mean over microbatches."""
  arrays = {name: jnp.asarray(x) for name, x in summaries.items()}
  return {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.number)}


def make_grad_fn(
    microbatching: microbatches.Microbatching, var_weight_hparams: Any, loss_key: str | None
) -> trainer_lib.GradFnProtocol:
  """A gradient function for Pax's `train_step_single_learner` that loops over microbatches.

  Args:
    microbatching: how to split the batch.
    var_weight_hparams: Praxis' metadata of the model's variables.
    loss_key: the name of the weighted scalar that is the loss.

  Returns:
    A function with the signature of `trainer_lib.GradFnProtocol`; loss, gradients, weighted
    scalars, summaries and per-example outputs are those of the whole batch.
  """

  def grad_fn(
      loss_fn: trainer_lib.LossFnProtocol,
      learner: learners.Learner,
      mdl_vars: Any,
      inputs: Any,
      prng_key: Any,
  ) -> tuple[tuple[Any, sgf.GradAuxInfo], Any]:
    batch_size = jax.tree_util.tree_leaves(inputs)[0].shape[0]
    num_microbatches = microbatching.count(batch_size)
    rules = find_rules(
        loss_key,
        lambda *args: _metrics_of(loss_fn(*args)[1]),
        (mdl_vars, inputs, prng_key),
        lambda args: (args[0], microbatching.first(args[1]), args[2]),
        num_microbatches,
    )
    update_rules = updates.find_update_rules(
        lambda *args: loss_fn(*args)[1].aux_info[2],
        mdl_vars,
        inputs,
        prng_key,
        var_weight_hparams,
        num_microbatches,
    )
    run = _Loop(
        loss_fn, learner, mdl_vars, rules, update_rules, num_microbatches, microbatching.streams
    )
    return run(inputs, prng_key)

  return grad_fn


def _metrics_of(info: sgf.GradAuxInfo) -> metrics_lib.Metrics:
  _, scalars, _, _, _, clu = info.aux_info
  return metrics_lib.take_apart(scalars, clu)


class _Loop:
  """One microbatch loop of a train step."""

  def __init__(
      self, loss_fn, learner, mdl_vars, rules, update_rules, num_microbatches, streams
  ):
    self._loss_fn = loss_fn
    self._learner = learner
    self._mdl_vars = mdl_vars
    self._rules = rules
    self._update_rules = update_rules
    self._num_microbatches = num_microbatches
    self._streams = streams
    # Pax's own: it knows which variables take no gradient and what they get in its place.
    self._grad_fn = trainer_lib._get_default_grad_fn(  # pylint: disable=protected-access
        *trainer_lib.get_excluded_var_masks(update_rules.var_weight_hparams, learner)
    )

  def __call__(self, inputs, prng_key):
    m = self._num_microbatches
    batch = dict(
        inputs=microbatches.split_batch(inputs, m, self._streams),
        prng_key=jax.random.split(prng_key, m),
    )
    if self._update_rules.decays:
      batch['index'] = jnp.arange(m, dtype=jnp.int32)

    def microbatch_fn(microbatch):
      (_, (sums, stacked)), grads = self._grad_fn(
          loss_fn=functools.partial(self._objective, microbatch.get('index')),
          learner=self._learner,
          mdl_vars=self._mdl_vars,
          inputs=without_empty_weights(microbatch['inputs']),
          prng_key=microbatch['prng_key'],
      )
      return (grads, sums), stacked

    (grads, sums), (per_example_out, clu) = marks.accumulate_grads(microbatch_fn, batch)
    weight = sums['weight']
    grads = jax.tree_util.tree_map(lambda g: safe_divide(g, weight.astype(g.dtype)), grads)
    loss = safe_divide(sums['main'], weight) + sums['aux_loss'] / m
    scalars, clu = metrics_lib.put_together(
        self._rules.combine(sums['scalars'], m),
        self._rules.classes,
        metrics_lib.merge(clu, self._streams),
    )
    aux_info = (
        loss,
        scalars,
        self._update_rules.combine(sums['updates'], self._mdl_vars),
        mean_summaries(sums['summaries'], m),
        microbatches.merge_microbatches(per_example_out, self._streams),
        clu,
    )
    return (loss, sgf.GradAuxInfo(loss_weight=weight, aux_info=aux_info)), grads

  def _objective(self, index, mdl_vars, inputs, prng_key):
    """W_i loss_i (and the share of auxiliary losses) with, as aux, what the loop accumulates."""
    rules = self._rules
    with layer.collect_aux_losses() as aux_losses:
      loss, info = self._loss_fn(mdl_vars, inputs, prng_key)
    _, _, updated_vars, summaries, per_example_out, _ = info.aux_info
    metrics = _metrics_of(info)
    scalars = metrics.scalars
    weight = jnp.asarray(jax.lax.stop_gradient(scalars[rules.loss_key][1]), loss.dtype)
    aux_loss = sum(aux_losses, jnp.zeros((), loss.dtype))
    objective = weighted(loss, weight)
    if aux_losses:
      # A weight of 1 whatever the batch is sums to M over the microbatches: their share is 1.
      unit = rules.loss_key in rules.unit
      share = 1.0 if unit else rules.total_weight / self._num_microbatches
      objective += (share - weight) * aux_loss
    sums = dict(
        main=weighted(loss - aux_loss, weight),
        aux_loss=aux_loss,
        weight=weight,
        scalars=rules.sums_of(scalars, aux_loss),
        summaries=numeric_summaries(summaries),
        updates=self._update_rules.sums_of(updated_vars, self._mdl_vars, index),
    )
    return objective, (sums, (per_example_out, metrics.others))
