"""Pax's train and eval steps over microbatches: functions of whole batches for `mpmd_jit`."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import numpy as jnp
from paxml import trainer_lib

from pax_mpmd.compile import marks
from pax_mpmd.pax import layer
from pax_mpmd.pax import loss as loss_lib
from pax_mpmd.pax import metrics as metrics_lib
from pax_mpmd.pax import microbatches

__all__ = ['make_eval_step', 'make_train_step']

StepFn = Callable[[Any, Any, Any], tuple[Any, trainer_lib.StepFnOutput]]


def make_train_step(
    task: Any, microbatching: microbatches.Microbatching, var_weight_hparams: Any
) -> StepFn:
  """Pax's train step with its gradients taken microbatch by microbatch.

  Args:
    task: the instantiated Pax task.
    microbatching: how a batch is split.
    var_weight_hparams: Praxis' metadata of the model's variables.

  Returns:
    A traceable function (state, prng_key, inputs) -> (new state, StepFnOutput), inputs `[B, ...]`.
  """
  grad_fn = loss_lib.make_grad_fn(
      microbatching, var_weight_hparams, task.loss_aggregator_inst.loss_key
  )

  def train_step(state, prng_key, inputs):
    return trainer_lib.train_step_single_learner(
        task,
        state,
        prng_key,
        inputs,
        task.model.fprop_dtype,
        var_weight_hparams,
        grad_fn=grad_fn,
    )

  return train_step


def make_eval_step(
    task: Any, microbatching: microbatches.Microbatching, var_weight_hparams: Any
) -> StepFn:
  """Pax's eval step, forward only, microbatch by microbatch. As `make_train_step`."""

  def eval_step(state, prng_key, inputs):
    batch_size = jax.tree_util.tree_leaves(inputs)[0].shape[0]
    m = microbatching.count(batch_size)

    def evaluate(state, prng_key, inputs):
      return trainer_lib.eval_step_single_learner(
          task, state, prng_key, inputs, task.model.fprop_dtype, var_weight_hparams
      )[1]

    rules = loss_lib.find_rules(
        task.loss_aggregator_inst.loss_key,
        lambda *args: _metrics_of(evaluate(*args)),
        (state, prng_key, inputs),
        lambda args: (*args[:2], microbatching.first(args[2])),
        m,
    )
    batch = dict(
        inputs=microbatches.split_batch(inputs, m, microbatching.streams),
        prng_key=jax.random.split(prng_key, m),
    )
    sums, (per_example_out, clu) = marks.accumulate_grads(
        functools.partial(_eval_microbatch, functools.partial(evaluate, state), rules), batch
    )
    scalars, clu = metrics_lib.put_together(
        rules.combine(sums['scalars'], m),
        rules.classes,
        metrics_lib.merge(clu, microbatching.streams),
    )
    output = trainer_lib.StepFnOutput(
        loss=loss_lib.safe_divide(sums['main'], sums['weight']) + sums['aux_loss'] / m,
        weighted_scalars=scalars,
        per_example_out=microbatches.merge_microbatches(per_example_out, microbatching.streams),
        summary_tensors=loss_lib.mean_summaries(sums['summaries'], m),
        clu_metrics=clu,
    )
    return None, output

  return eval_step


def _eval_microbatch(evaluate, rules, microbatch):
  with layer.collect_aux_losses() as aux_losses:
    out = evaluate(microbatch['prng_key'], microbatch['inputs'])
  metrics = _metrics_of(out)
  weight = jnp.asarray(metrics.scalars[rules.loss_key][1], out.loss.dtype)
  aux_loss = sum(aux_losses, jnp.zeros((), out.loss.dtype))
  sums = dict(
      main=loss_lib.weighted(out.loss - aux_loss, weight),
      aux_loss=aux_loss,
      weight=weight,
      scalars=rules.sums_of(metrics.scalars, aux_loss),
      summaries=loss_lib.numeric_summaries(out.summary_tensors),
  )
  return sums, (out.per_example_out, metrics.others)


def _metrics_of(output: trainer_lib.StepFnOutput) -> metrics_lib.Metrics:
  return metrics_lib.take_apart(output.weighted_scalars, output.clu_metrics)
