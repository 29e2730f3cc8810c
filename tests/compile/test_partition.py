"""The loop cut into tasks: running the tasks is running the loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.evaluate import evaluate_loop
from pax_mpmd.compile.partition import partition
from pax_mpmd.compile.program import OperandKind
from pax_mpmd.compile.segments import find_segments
from pax_mpmd.compile.segments import FREE
from pax_mpmd.compile.shared import delay_shared_sums
from pax_mpmd.compile.trace import loop_of
from pax_mpmd.compile.unstack import join_outputs
from pax_mpmd.compile.unstack import split_inputs
from pax_mpmd.compile.unstack import unstack
from tests import oracle
from tests.compile import steps
from tests.core import toy
from tests.core import transformer
from tests.core.test_loop_values import loss


def cut_of(step, *args, num_stages=3):
  """(the step's jaxpr, its cut loop), after a comparison with the plain step."""
  trace, leaves = steps.traced(step, *args)
  un = delay_shared_sums(unstack(trace, num_stages), num_stages)
  cut = partition(un.jaxpr, num_stages)
  outs = steps.evaluate_around(un.jaxpr, un.consts, split_inputs(un, leaves), evaluate_loop, cut)
  # Adam's first step divides small gradients by their size, which shows how they were rounded.
  joined = join_outputs(un, outs)
  # Adam divides a gradient by its own size, so where one is almost 0 it steps by rounding.
  oracle.assert_trees_close(joined, steps.expected(step, *args), rtol=1e-4, atol=1e-4)
  return un.jaxpr, cut


@functools.cache
def transformer_cut():
  """The same for the transformer's training step."""
  return cut_of(transformer.train_step, transformer.init(3), transformer.batch(1))


def primitives(task):
  return [e.primitive.name for e in task.jaxpr.eqns]


def test_tasks_of_a_plain_chain():
  """Each stage's product in its F, its two transposed products in its B; residuals stay."""
  _, cut = cut_of(toy.train_step(loss), toy.weights(), toy.batch())
  # The last stage needs no residuals of its own forward: all of it could be in B, yet the loss
  # is a stacked result and so made in F.
  assert set(cut.tasks) == {(s, p) for s in range(3) for p in 'FB'}
  for s in range(3):
    assert primitives(cut.tasks[s, 'F']).count('dot_general') == 1
    # The first stage needs no gradient of its input.
    assert primitives(cut.tasks[s, 'B']).count('dot_general') == (1 if s == 0 else 2)
  assert cut.num_microbatches == 4 and cut.num_summed == 3


def test_every_edge_is_made_once_and_read_later():
  """An edge has one maker; its readers come after it in the order of one microbatch."""
  _, cut = transformer_cut()
  position = {key: s if key[1] == 'F' else 5 - s for key in cut.tasks for s in [key[0]]}
  maker = {}
  for key, task in cut.tasks.items():
    for op in task.outputs:
      if op.kind is OperandKind.EDGE:
        assert op.id not in maker
        maker[op.id] = key
  read = set()
  for key, task in cut.tasks.items():
    for op in task.inputs:
      if op.kind is OperandKind.EDGE:
        read.add(op.id)
        assert position[maker[op.id]] < position[key]
  assert set(maker) == read == set(range(len(cut.edges)))


def test_every_result_has_one_owner():
  """Each sum and each stacked result is made by exactly one task."""
  _, cut = transformer_cut()
  made = [
      op.id for task in cut.tasks.values() for op in task.outputs if op.kind is OperandKind.CARRY
  ]
  assert sorted(made) == list(range(len(cut.outs)))
  assert all(cut.owner(i) in cut.tasks for i in made)


def test_invariant_work_is_hoisted_once():
  """What depends on no microbatch leaves the loop; mere layout doesn't."""

  def step(ws, batch):
    scale = jnp.float32(2)

    def fn(mb):
      x = toy.dense(jnp.exp(ws[0]).T, mb['x'])
      x = mpmd.pipeline_yield(x)
      x = mpmd.pipeline_yield(toy.dense(jnp.exp(ws[0]) * scale, x))
      return toy.mse(x, mb['y']), ()

    return mpmd.accumulate_grads(fn, batch)

  _, cut = cut_of(step, toy.weights(), toy.batch())
  names = [e.primitive.name for e in cut.hoisted]
  assert 'exp' in names and 'transpose' not in names
  assert not any('exp' in primitives(task) for task in cut.tasks.values())
  for task in cut.tasks.values():
    for op, v in zip(task.inputs, task.jaxpr.invars):
      assert op.kind is not OperandKind.STEP or not cut.is_batch[op.id] or v.aval.shape[0] == 2


def test_what_the_batch_gives_is_recomputed():
  """A mask of the batch's row is made by each of its users; a product with a weight isn't."""

  def step(ws, batch):
    def fn(mb):
      mask = jnp.where(mb['x'] > 0, 1.0, 0.5)
      heavy = mb['x'] @ ws[0]
      x = toy.dense(ws[0], mb['x']) * mask
      x = mpmd.pipeline_yield(x)
      x = mpmd.pipeline_yield(toy.dense(ws[1], x) * mask + heavy)
      return toy.mse(toy.dense(ws[2], x) * mask, mb['y']), ()

    return mpmd.accumulate_grads(fn, batch)

  _, cut = cut_of(step, toy.weights(), toy.batch())
  for s in range(3):
    assert 'gt' in primitives(cut.tasks[s, 'F'])
  assert sum(primitives(t).count('dot_general') for t in cut.tasks.values()) == 4


def test_segments():
  """Forward marks, then backward marks in reverse order; everything else where it first can be."""
  trace, _ = steps.traced(toy.train_step(loss), toy.weights(), toy.batch())
  body = loop_of(trace.jaxpr).params['jaxpr'].jaxpr
  segments = find_segments(body, 3)
  directions = [segments.marks[i] for i in sorted(segments.marks)]
  assert directions == [('forward', 0), ('forward', 1), ('backward', 1), ('backward', 0)]
  assert segments.has_backward
  assert [segments.stage(k) for k in range(6)] == [0, 1, 2, 2, 1, 0]
  assert ''.join(segments.phase(k) for k in range(6)) == 'FFFBBB'
  for v in body.invars:
    assert segments.of(v) == FREE
  for out, stage in zip(body.outvars[:3], (0, 1, 2)):
    # The last stage's gradient depends on no backward mark.
    assert segments.of(out) == (2 if stage == 2 else segments.backward(stage))


@pytest.mark.parametrize('num_stages', [1, 2, 5])
def test_number_of_stages(num_stages):
  """Also one stage, which has no marks at all."""
  ws = toy.weights(num_stages)
  _, cut = cut_of(toy.train_step(loss), ws, toy.batch(), num_stages=num_stages)
  assert {s for s, _ in cut.tasks} == set(range(num_stages))


def test_forward_only_has_no_backward_tasks():
  """Without a gradient everything runs in F."""

  def step(ws, batch):
    return mpmd.accumulate_grads(lambda mb: (loss(ws, mb), ()), batch)

  _, cut = cut_of(step, toy.weights(), toy.batch())
  assert {p for _, p in cut.tasks} == {'F'}


def test_remat_keeps_only_the_input():
  """Under checkpoint a stage's only edge to its own backward is what it was given."""

  def remat_loss(ws, mb):
    x = mb['x']
    for i, w in enumerate(ws):
      x = jax.checkpoint(lambda w, x: jnp.sin(toy.dense(w, jnp.cos(x))))(w, x)
      x = mpmd.pipeline_yield(x) if i < 2 else x
    return toy.mse(x, mb['y'])

  _, cut = cut_of(toy.train_step(remat_loss), toy.weights(), toy.batch())
  assert all(a.shape == (2, 8) for a in cut.edges)
  middle = [op for op in cut.tasks[1, 'F'].outputs if op.kind is OperandKind.EDGE]
  assert len(middle) == 1  # to the next stage; its own backward reads what it was sent


def test_hoisted_equations_use_the_step_s_variables():
  """They stand before the loop, so none may read a variable of the body."""
  jaxpr, cut = transformer_cut()
  known = {*jaxpr.invars, *jaxpr.constvars}
  for eqn in jaxpr.eqns[: jaxpr.eqns.index(loop_of(jaxpr))]:
    known.update(eqn.outvars)
  for eqn in cut.hoisted:
    assert all(isinstance(x, jc.Literal) or x in known for x in eqn.invars)
    known.update(eqn.outvars)
  assert np.all([isinstance(x, jc.Literal) or x in known for x in cut.operands])
