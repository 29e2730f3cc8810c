"""Pax's train and eval steps over microbatches: functions of whole batches for `mpmd_jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp
from paxml import trainer_lib

from pax_mpmd.compile import marks
from pax_mpmd.pax import layer
from pax_mpmd.pax import loss as loss_lib
from pax_mpmd.pax import metrics as metrics_lib
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import rules as rules_lib
from pax_mpmd.pax import stacks

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
      microbatching,
      var_weight_hparams,
      task.loss_aggregator_inst.loss_key,
      bf16_accum_in_fp32=getattr(stacks.stack_of(task.model), 'bf16_accum_in_fp32', False),
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

    rules = rules_lib.find_rules(
        task.loss_aggregator_inst.loss_key,
        lambda *args: _results_of(evaluate(*args)),
        (state, prng_key, inputs),
        lambda args: (*args[:2], microbatching.first(args[2])),
        m,
        microbatching.streams,
    )
    batch = dict(
        inputs=microbatches.split_batch(inputs, m, microbatching.streams),
        prng_key=jax.random.split(prng_key, m),
    )
    treedef: Any = None

    def evaluate_microbatch(microbatch):
      nonlocal treedef
      with layer.collect_aux_losses() as aux_losses:
        out = evaluate(state, microbatch['prng_key'], microbatch['inputs'])
      treedef = jax.tree_util.tree_structure(out.per_example_out)
      return rules.take(_results_of(out), sum(aux_losses, jnp.zeros((), out.loss.dtype)))

    results = rules.finish(*marks.accumulate_grads(evaluate_microbatch, batch), treedef)
    output = trainer_lib.StepFnOutput(
        loss=results.loss,
        weighted_scalars=results.metrics.scalars,
        per_example_out=results.per_example,
        summary_tensors=results.summaries,
        clu_metrics=results.metrics.others,
    )
    return None, output

  return eval_step


def _results_of(output: trainer_lib.StepFnOutput) -> rules_lib.Results:
  return rules_lib.Results(
      metrics_lib.take_apart(output.weighted_scalars, output.clu_metrics),
      output.summary_tensors,
      output.per_example_out,
  )
