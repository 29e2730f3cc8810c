"""Losses, metrics and gradients of a batch from those of its microbatches, as Pax weights them.

Pax computes the main loss on the whole batch: sum(xent * w) / D, where D mostly is the sum of the
weights w (`rules` finds it). A microbatch's loss_i is divided by its own D_i, so the batch's loss
is sum(D_i loss_i) / D, and the gradient likewise; the loop differentiates D_i loss_i and the sum is
divided once after it. What a pipeline adds as auxiliary loss Pax divides by the number of
microbatches M, unweighted, so with aux_i the objective of a microbatch is
D_i loss_i + (D / M - D_i) aux_i.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import numpy as jnp
from paxml import learners
from paxml import sgf
from paxml import trainer_lib

from pax_mpmd.compile import marks
from pax_mpmd.pax import layer
from pax_mpmd.pax import metrics as metrics_lib
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import rules as rules_lib
from pax_mpmd.pax import updates

__all__ = ['make_grad_fn']

# In place of a weight of zero where a whole microbatch has none. Small enough to change no sum, and
# it keeps models that divide by their weights (and the gradient of that) away from 0 / 0.
_TINY_WEIGHT = 1e-20


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


def make_grad_fn(
    microbatching: microbatches.Microbatching,
    var_weight_hparams: Any,
    loss_key: str | None,
    bf16_accum_in_fp32: bool = False,
) -> trainer_lib.GradFnProtocol:
  """A gradient function for Pax's `train_step_single_learner` that loops over microbatches.

  Args:
    microbatching: how to split the batch.
    var_weight_hparams: Praxis' metadata of the model's variables.
    loss_key: the name of the weighted scalar that is the loss.
    bf16_accum_in_fp32: of bfloat16 variables in the pipeline, whether the sum over microbatches is
      float32; of others, whose gradients Pax has of the whole batch at once, it always is.

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
    rules = rules_lib.find_rules(
        loss_key,
        lambda *args: _results_of(loss_fn(*args)[1]),
        (mdl_vars, inputs, prng_key),
        lambda args: (args[0], microbatching.first(args[1]), args[2]),
        num_microbatches,
        microbatching.streams,
    )
    update_rules = updates.find_update_rules(
        lambda *args: (lambda loss, info: (loss, info.aux_info[2]))(*loss_fn(*args)),
        mdl_vars,
        inputs,
        prng_key,
        var_weight_hparams,
        num_microbatches,
    )
    run = _Loop(loss_fn, learner, mdl_vars, rules, update_rules, bf16_accum_in_fp32)
    return run(inputs, prng_key)

  return grad_fn


def _results_of(info: sgf.GradAuxInfo) -> rules_lib.Results:
  _, scalars, _, summaries, per_example_out, clu = info.aux_info
  return rules_lib.Results(metrics_lib.take_apart(scalars, clu), summaries, per_example_out)


class _Loop:
  """One microbatch loop of a train step."""

  def __init__(self, loss_fn, learner, mdl_vars, rules, update_rules, bf16_accum_in_fp32):
    self._loss_fn = loss_fn
    self._learner = learner
    self._mdl_vars = mdl_vars
    self._rules = rules
    self._update_rules = update_rules
    self._bf16_accum_in_fp32 = bf16_accum_in_fp32
    self._treedef: Any = None  # this and the next are found while the loop is traced
    self._dtypes: Any = None
    # Pax's own: it knows which variables take no gradient and what they get in its place.
    self._grad_fn = trainer_lib._get_default_grad_fn(  # pylint: disable=protected-access
        *trainer_lib.get_excluded_var_masks(update_rules.var_weight_hparams, learner)
    )

  def __call__(self, inputs, prng_key):
    rules = self._rules
    m = rules.num_microbatches
    batch = dict(
        inputs=microbatches.split_batch(inputs, m, rules.streams),
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
      self._dtypes = jax.tree_util.tree_map(lambda g: g.dtype, grads)
      return (jax.tree_util.tree_map_with_path(self._accumulated, grads), sums), stacked

    (grads, (sums, updated)), stacked = marks.accumulate_grads(microbatch_fn, batch)
    results = rules.finish(sums, stacked, self._treedef)
    weights = rules.weights(sums)
    divisor = rules.divisor(weights)
    grads = jax.tree_util.tree_map(
        lambda g, dtype: rules_lib.safe_divide(g, divisor).astype(dtype), grads, self._dtypes
    )
    aux_info = (
        results.loss,
        results.metrics.scalars,
        self._update_rules.combine(updated, self._mdl_vars),
        results.summaries,
        results.per_example,
        results.metrics.others,
    )
    weight = weights[rules.loss_key]
    return (results.loss, sgf.GradAuxInfo(loss_weight=weight, aux_info=aux_info)), grads

  def _accumulated(self, path, grad):
    """A gradient in the type in which it is summed over microbatches."""
    if grad.dtype != jnp.bfloat16:
      return grad
    if updates.in_pipeline(path) and not self._bf16_accum_in_fp32:
      return grad
    return grad.astype(jnp.float32)

  def _objective(self, index, mdl_vars, inputs, prng_key):
    """D_i loss_i (and the share of auxiliary losses) with, as aux, what the loop accumulates."""
    rules = self._rules
    with layer.collect_aux_losses() as aux_losses:
      loss, info = self._loss_fn(mdl_vars, inputs, prng_key)
    results = _results_of(info)
    self._treedef = jax.tree_util.tree_structure(results.per_example)
    weights = {name: w for name, (_, w) in results.metrics.scalars.items()}
    factor = jax.lax.stop_gradient(rules.factor(weights)).astype(loss.dtype)
    objective = rules_lib.weighted(loss, factor)
    aux_loss = sum(aux_losses, jnp.zeros((), loss.dtype))
    if aux_losses:
      objective += (rules.share - factor) * aux_loss
    sums, stacked = rules.take(results, aux_loss)
    updated = self._update_rules.sums_of(info.aux_info[2], self._mdl_vars, index)
    return objective, ((sums, updated), stacked)
