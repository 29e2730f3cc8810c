"""What a Pax experiment can say, against Pax itself; dropout among MPMD runs."""

from __future__ import annotations

import jax
import numpy as np
from paxml import trainer_lib
import pytest

from pax_mpmd import errors
from pax_mpmd.pax import mixin
from tests.pax import compare
from tests.pax import features
from tests.pax import refused
from tests.pax import tiny


@pytest.mark.parametrize('case', features.CASES, ids=lambda case: case.experiment.__name__)
def test_equal_to_pax(case):
  """Losses, scalars, outputs, summaries, variables and slots are Pax's in every step."""
  inputs = case.batch(0)
  spmd = tiny.Run(case.experiment, mpmd=False, inputs=inputs)
  mpmd = tiny.Run(
      case.experiment, mpmd=True, schedule=case.schedule, initial=spmd.initial, inputs=inputs
  )
  try:
    options = {}
    if case.rtol is not None:
      close = (case.rtol, 1e-3)
      options = dict(rtol=case.rtol, state_tolerance=close, summary_tolerance=close)
    compare.assert_equal_to_pax(
        spmd, mpmd, case.num_steps, case.batch, moves_visibly=True, **options
    )
  finally:
    mpmd.close()


def test_dropout_does_not_depend_on_schedule_or_actors():
  """One seed gives the same masks on one or two actors, in any order, and under plain jax.jit."""
  plain = tiny.Run(tiny.TinyDropout, mpmd=True)
  inputs = tiny.batch(0)
  desired = plain.step(plain.initial, inputs)
  for schedule, actors in (('zb_h1', 2), ('gpipe', 1)):
    run = tiny.Run(
        tiny.TinyDropout, mpmd=True, schedule=schedule, actors=actors, initial=plain.initial
    )
    try:
      state, out = run.step(run.initial, inputs)
    finally:
      run.close()
    np.testing.assert_allclose(out.loss, desired[1].loss, rtol=1e-6)
    # Masks that differed would change gradients by much more than the order of sums.
    compare.assert_close(state.mdl_vars, desired[0].mdl_vars, 1e-4, 1e-5, schedule)


@pytest.mark.parametrize('case', refused.REFUSED, ids=lambda case: case.what)
def test_refused(case):
  """The error comes with the task's config and names the field and what would work."""
  experiment = type('Refused', (mixin.MpmdPipelineMixin, features.Small), dict(case.fields))
  if case.edit is not None:
    experiment.edit = lambda self, task_p, layer_p, learner_p: case.edit(task_p)
  with pytest.raises(errors.ConfigError) as info:
    experiment().task()
  for word in (case.field, *case.words):
    assert word in str(info.value)


@pytest.mark.parametrize(
    'experiment, words',
    [
        (refused.Squared, 'squared in the pipeline.*depends on the order of the microbatches'),
        (refused.Quantized, 'vq_layer/means in the pipeline, and the loss depends on it'),
        (refused.SeveralLosses, 'task.loss_aggregator; no MultiLossAggregator'),
        (refused.WithBothMetrics, 'average: Average.*weighted scalars'),
    ],
)
def test_refused_while_tracing(experiment, words):
  """What only the model's code says is refused while the step is traced; nothing has started."""
  run = tiny.Run(experiment, mpmd=True, initial=())
  step = run.partitioner.traceable_step(trainer_lib.train_step_single_learner, is_eval=False)
  state = run.partitioner.get_train_state_metadata().unpadded_global_shapes
  with pytest.raises(errors.ConfigError, match=words):
    jax.eval_shape(step, state, jax.random.PRNGKey(0), tiny.specs())
