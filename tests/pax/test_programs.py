"""Progress lines, lazy results and gathered checkpoints, with stand-ins for Pax's own parts."""

from __future__ import annotations

import io
import numbers
import time
import types

from absl import flags
from absl.testing import flagsaver
from clu import metrics as clu_metrics
import jax
from jax import numpy as jnp
import numpy as np
from paxml import metric_utils
from paxml import programs as programs_of_pax
from paxml import summary_utils

import pax_mpmd
from pax_mpmd import schedules
from pax_mpmd.pax import backend as backend_lib
from pax_mpmd.pax import checkpoint
from pax_mpmd.pax import lazy
from pax_mpmd.pax import programs
from pax_mpmd.pax import status as status_lib
from pax_mpmd.runtime import step as step_lib


class _Train:
  """A train program whose loss is 10 / step."""

  def should_run(self, state, step):
    del state
    return step < 4

  def run(self, state, step):
    loss = np.float32(10.0 / (step + 1))
    return types.SimpleNamespace(state=state, loss=loss, new_train_step=step + 1)


class _Eval:
  """An eval program that finds a loss of 3."""

  eval_input = types.SimpleNamespace(name='test')

  def run(self, state, step):
    del state, step
    return types.SimpleNamespace(eval_metrics={'total_loss': 3.0})


def _programs(stream):
  report, status = programs.Report(), status_lib.Status(stream)
  train = programs.TrainWithProgress(_Train(), 4, report, status, interval_s=0.0)
  return train, programs.with_progress([_Eval()], report, status, train.exclude_pause)[0], report


def test_progress_lines():
  """The first step has a line, the newest loss isn't waited for, the end tells it."""
  stream = io.StringIO()
  train, evaluate, report = _programs(stream)
  step = 0
  while train.should_run(None, step):
    step = train.run(None, step).new_train_step
  assert 'step 1/4  loss 10.0000' in stream.getvalue()
  assert 'step 3/4' in stream.getvalue()
  assert 'step 4/4' not in stream.getvalue()
  train.finish()
  assert 'step 4/4  loss 2.5000' in stream.getvalue()
  evaluate.run(None, step)
  assert report.losses == [(1, 10.0), (4, 2.5)]
  assert report.eval_losses == {'test': [(4, 3.0)]}


def test_a_stop_request_ends_training_before_the_next_step():
  """After `stop_requested` no further step runs, although Pax's program would go on."""
  train, _, _ = _programs(io.StringIO())
  assert train.should_run(None, 1)
  train.stop_requested = True
  assert not train.should_run(None, 1)


def test_summaries_can_be_waited_for(tmp_path):
  """They are on disk then, although Pax fetches and writes them in the background."""

  class Slow:
    shape, dtype = (), np.dtype(np.float32)

    def __array__(self, dtype=None, copy=None):
      time.sleep(0.3)  # the step is still running
      return np.float32(7)

  train, _, _ = _programs(io.StringIO())
  train.finish_summaries()  # a program without any
  with flagsaver.flagsaver(), summary_utils.get_summary_writer(tmp_path) as writer:
    flags.FLAGS.mark_as_parsed()
    handler = summary_utils.SummaryHandler(writer, 1, is_async=True)
    train._inner._train_summary_handler = handler
    handler.process(1, Slow(), None, {})
    train.finish_summaries()
    (file,) = tmp_path.iterdir()
    assert b'loss' in file.read_bytes()
    handler.close()
  flags.FLAGS.unparse_flags()


def test_a_stop_request_leaves_an_evaluation_between_two_batches():
  """What was computed of it is thrown away: no loss, no metrics. One that has to be is finished."""

  class Evaluation:
    eval_input = types.SimpleNamespace(name='test')
    _task = types.SimpleNamespace(early_stopping_fn=None)

    def eval_step(self, *args):
      done.append(args)

    def run(self, state, step):
      for batch in range(3):
        self.eval_step(batch)
      return programs_of_pax.EvalProgramOutput(state, eval_metrics={'loss': 1.0})

  done, report, stream = [], programs.Report(), io.StringIO()
  (evaluation,) = programs.with_progress(
      [Evaluation()], report, status_lib.Status(stream), is_cut=lambda: len(done) == 2
  )
  assert evaluation.run('state', 7) == programs_of_pax.EvalProgramOutput('state')
  assert len(done) == 2 and not report.eval_losses
  assert "step 7: evaluation on 'test' not finished" in stream.getvalue()
  Evaluation._task.early_stopping_fn = print
  assert evaluation.run('state', 8).eval_metrics == {'loss': 1.0}
  assert len(done) == 5 and report.eval_losses == {'test': [(8, 1.0)]}


def test_lazy_results_are_fetched_together_and_count_as_scalars():
  """Reading one result fetches its whole group, once; Pax averages them as weighted scalars."""
  fetched = []

  def fetch(arrays):
    fetched.append(len(arrays))
    return arrays

  tree = lazy.lazy({'a': (np.float32(2.0), np.float32(3.0)), 'b': np.arange(3)}, fetch)
  assert not fetched
  assert tree['a'][0].shape == () and tree['b'].dtype == np.arange(3).dtype
  assert isinstance(tree['a'][0], numbers.Number)
  assert metric_utils.as_float([tree['a'], tree['a']]) == 2.0
  np.testing.assert_array_equal(jax.device_get(tree)['b'], [0, 1, 2])
  assert fetched == [3]
  # Written in the same thread, clu metrics are merged and computed of what is lazy still.
  average = clu_metrics.Average(total=tree['a'][0], count=tree['a'][1])
  assert average.merge(average).compute_value().value == np.float32(4.0) / np.float32(6.0)
  assert float(jnp.add(tree['a'][0], 1)) == 3.0


class _Manager:
  """Saves every second step."""

  def __init__(self):
    self.saved = []

  def should_save(self, step):
    return step % 2 == 0

  def latest_step(self):
    return max(self.saved, default=None)


class _Checkpointer:
  """What Pax's checkpointer looks like from outside."""

  step_to_restore = 7

  def __init__(self):
    self.checkpoint_manager = _Manager()
    self.states = []

  def save_if_needed(self, step, state, *args):
    del args
    self.checkpoint_manager.saved.append(step)
    self.states.append(state)

  def save_final(self, step, *, partitioned_train_state, **kwargs):
    del kwargs
    self.save_if_needed(step, partitioned_train_state)


def test_the_state_moves_to_actors_only_when_a_save_is_due():
  """Steps that Pax's manager does not save move nothing; what is saved is what was moved."""
  inner, placed = _Checkpointer(), []

  def place(state):
    placed.append(state)
    return {'placed': state}

  outer = checkpoint.PiecewiseCheckpointer(inner, place)
  for step in range(4):
    outer.save_if_needed(step, step, None, None, None)
  outer.save_final(3, partitioned_train_state=3, train_state_pspecs=None)
  outer.save_final(3, partitioned_train_state=3, train_state_pspecs=None)
  assert inner.checkpoint_manager.saved == [0, 2, 3]
  assert placed == [0, 2, 3]
  assert inner.states == [{'placed': step} for step in placed]
  assert outer.step_to_restore == 7


def test_a_state_that_stays_the_same_is_sent_once(monkeypatch):
  """An evaluation job's next batches, and only those, go to the actors; a new state goes again."""

  def evaluate(state, batch):
    def loss(microbatch):
      x = pax_mpmd.pipeline_yield(jnp.tanh(microbatch @ state['w'][0]))
      return {}, jnp.mean(x @ state['w'][1])

    return None, pax_mpmd.accumulate_grads(loss, batch)[1]

  sent = []
  host = step_lib._host
  monkeypatch.setattr(step_lib, '_host', lambda x, leaf: sent.append(leaf.name) or host(x, leaf))
  backend = backend_lib.Backend(schedules.GPipe(num_stages=2), 'local')
  step = backend.build_step(evaluate)
  rng = np.random.RandomState(0)
  try:
    for seed, leaves in ((0, 2), (0, 1), (1, 2)):
      if leaves == 2:
        state = {'w': jnp.asarray(np.random.RandomState(seed).rand(2, 4, 4), jnp.float32)}
      batch = rng.rand(2, 3, 4).astype(np.float32)
      sent.clear()
      _, losses = step(state, batch)
      assert len(sent) == leaves
      np.testing.assert_allclose(losses, evaluate(state, batch)[1], rtol=1e-6)
  finally:
    backend.close()
