"""The prologue and the epilogue on actors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import pax_mpmd as mpmd
from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.evaluate import evaluate_loop
from pax_mpmd.compile.partition import partition
from pax_mpmd.compile.placement import place
from pax_mpmd.compile.program import OperandKind
from pax_mpmd.compile.shared import delay_shared_sums
from pax_mpmd.compile.unstack import join_outputs
from pax_mpmd.compile.unstack import split_inputs
from pax_mpmd.compile.unstack import unstack
from tests import oracle
from tests.compile import steps
from tests.core import toy
from tests.core import transformer
from tests.core.test_loop_values import loss


def placed_of(step, *args, num_stages=3, next_value_of=None, placement=None):
  """The placed step, after running its programs actor by actor and comparing with the plain one."""
  trace, leaves = steps.traced(step, *args)
  un = delay_shared_sums(unstack(trace, num_stages), num_stages)
  placement = placement or tuple(range(num_stages))
  pairs = next_value_of(un) if next_value_of else {}
  placed = place(un.jaxpr, partition(un.jaxpr, num_stages), placement, pairs)
  outs = run(un, placed, placement, split_inputs(un, leaves))
  # Adam's first step divides small gradients by their size, which shows how they were rounded.
  joined = join_outputs(un, outs)
  # Adam divides a gradient by its own size, so where one is almost 0 it steps by rounding.
  oracle.assert_trees_close(joined, steps.expected(step, *args), rtol=1e-4, atol=1e-4)
  return un, placed


def run(un, placed, placement, args):
  """Runs the programs in their order, each on what its actor holds or is sent."""
  held = {}  # (variable, actor) -> value
  first = {}  # variable -> actor
  constants = dict(zip(un.jaxpr.constvars, un.consts))

  def put(v, actor, value):
    held[v, actor] = value
    first.setdefault(v, actor)

  def get(v, actor):
    if isinstance(v, jc.Literal):
      return v.val
    if v in constants:
      return constants[v]
    return held[(v, actor)] if (v, actor) in held else held[v, first[v]]

  for v, actors, value in zip(un.jaxpr.invars, placed.input_actors, args):
    for actor in actors:
      put(v, actor, value)

  def run_body(body):
    consts = [constants[v] for v in body.jaxpr.constvars]
    values = jc.eval_jaxpr(body.jaxpr, consts, *[get(v, body.actor) for v in body.jaxpr.invars])
    for v, value in zip(body.jaxpr.outvars, values):
      put(v, body.actor, value)

  for body in placed.prologue:
    run_body(body)
  cut = placed.cut
  for initial, actor in zip(placed.carry_initial, placed.carry_actor):
    assert not np.any(get(initial, actor))
  operands = []
  for i, x in enumerate(cut.operands):
    readers = {
        placement[t.stage]
        for t in cut.tasks.values()
        for op in t.inputs
        if op.kind is OperandKind.STEP and op.id == i
    }
    operands.append(get(x, min(readers)))
  for v, actor, value in zip(cut.outs, placed.carry_actor, evaluate_loop(cut, operands)):
    put(v, actor, value)
  for body in placed.epilogue:
    run_body(body)
  for v, actors in zip(un.jaxpr.outvars, placed.output_actors):
    for actor in actors:
      assert isinstance(v, jc.Literal) or v in constants or (
          (v, actor) in held or v in {x for b in placed.epilogue for x in b.jaxpr.outvars}
      )
  results = zip(un.jaxpr.outvars, placed.output_actors)
  return [get(v, actors[0] if actors else 0) for v, actors in results]


def state_pairs(num):
  """The first `num` results replace the first `num` arguments, piece by piece."""

  def pairs(un):
    def pieces(grids):
      return [1 if g is None else g.num_cells for g in grids]

    count = sum(pieces(un.in_grids)[:num])
    assert count == sum(pieces(un.out_grids)[:num])
    return {i: i for i in range(count)}

  return pairs


NUM_STATE = len(jax.tree_util.tree_leaves(transformer.init(1)))


@functools.cache
def transformer_placed():
  """The transformer's training step on three actors."""
  args = (transformer.init(3), transformer.batch(1))
  return placed_of(transformer.train_step, *args, next_value_of=state_pairs(NUM_STATE))


def test_transformer_step():
  """A training step with clipping, on three actors: few levels, moments with their weights."""
  un, placed = transformer_placed()
  # Sum the shared weight; square its gradient; send the norm's parts; update.
  assert {body.level for body in placed.epilogue} <= {0, 1, 2}
  per_actor = {a: [b for b in placed.epilogue if b.actor == a] for a in range(3)}
  assert all(1 <= len(bodies) <= 3 for bodies in per_actor.values())
  stacked = sum(3 for g in un.in_grids[:NUM_STATE] if g is not None)
  held = [a for a in placed.input_actors if len(a) == 1]
  assert len(held) >= stacked


def test_levels_count_messages():
  """A program of level n waits for values that were sent n times, one after the other."""

  def step(ws, batch):
    ws, (losses, norm) = toy.train_step(loss)(ws, batch)
    return [w / norm for w in ws], losses

  pairs = {0: 0, 1: 1, 2: 2}
  _, placed = placed_of(step, toy.weights(), toy.batch(), next_value_of=lambda un: pairs)
  made = {v: b for b in placed.epilogue for v in b.jaxpr.outvars}
  for body in placed.epilogue:
    for v in body.jaxpr.invars:
      if v in made and made[v].actor != body.actor:
        assert made[v].level < body.level
      elif v in made:
        assert made[v].level <= body.level
  assert max(b.level for b in placed.epilogue) == 1


def test_moments_live_with_their_weights():
  """The optimizer's state of a weight is where the weight is, though only the epilogue reads it."""

  def step(state, batch):
    ws, ms = state
    grads, _ = mpmd.accumulate_grads(lambda mb: (jax.grad(loss)(ws, mb), ()), batch)
    ms = [0.9 * m + g for m, g in zip(ms, grads)]
    return [w - 0.1 * m for w, m in zip(ws, ms)], ms

  ws = toy.weights()
  _, placed = placed_of(
      step, (ws, [np.zeros_like(w) for w in ws]), toy.batch(),
      next_value_of=lambda un: {i: i for i in range(6)},
  )
  assert placed.input_actors[:6] == ((0,), (1,), (2,)) * 2
  assert placed.output_actors == ((0,), (1,), (2,)) * 2
  assert {b.level for b in placed.epilogue} == {0}


def test_scalars_are_repeated_not_sent():
  """A learning rate from the step's count is computed on each actor; no program waits for it."""

  def step(state, batch):
    ws, n = state
    grads, _ = mpmd.accumulate_grads(lambda mb: (jax.grad(loss)(ws, mb), ()), batch)
    lr = 0.1 * jnp.exp(-n.astype(jnp.float32) / 10)
    return [w - lr * g for w, g in zip(ws, grads)], n + 1

  _, placed = placed_of(
      step, (toy.weights(), np.int32(3)), toy.batch(),
      next_value_of=lambda un: {i: i for i in range(4)},
  )
  assert placed.input_actors[3] == (0, 1, 2) == placed.output_actors[3]
  assert {b.level for b in placed.epilogue} == {0}
  assert all(any(e.primitive.name == 'exp' for e in b.jaxpr.eqns) for b in placed.epilogue)


def test_other_placements():
  """Stages in any order on the actors, two on one."""
  for placement in [(2, 1, 0), (0, 1, 0), (0, 0, 0)]:
    placed_of(
        toy.train_step(loss), toy.weights(), toy.batch(), placement=placement,
        next_value_of=lambda un: {0: 0, 1: 1, 2: 2},
    )


def test_program_order():
  """Each program comes after those it needs, and reads nothing that nobody makes."""
  un, placed = transformer_placed()
  known = {*un.jaxpr.invars}
  for body in placed.prologue:
    assert known.issuperset(body.jaxpr.invars)
    known.update(body.jaxpr.outvars)
  known.update(placed.cut.outs)
  for body in placed.epilogue:
    assert known.issuperset(body.jaxpr.invars)
    known.update(body.jaxpr.outvars)
