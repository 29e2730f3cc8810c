"""What a step is compiled to grows as it should: programs not at all, the rest linearly."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pax_mpmd as mpmd
from pax_mpmd import plan as planning
from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile import step as compiling
from pax_mpmd.compile.trace import loop_of
from pax_mpmd.plan.instructions import Send
from tests.core import toy

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def loss(p, mb):
  """Equal stages, whose weights are stacked, and an embedding that the ends share."""
  x = mb['x'] @ p['tied']
  num_stages = p['w'].shape[0]
  for s in range(num_stages):
    x = toy.dense(p['w'][s], x) + p['b'][s]
    x = mpmd.pipeline_yield(x) if s < num_stages - 1 else x
  return toy.mse(x @ p['tied'].T, mb['y'])


def step(state, batch):
  params, opt = state

  def grads_fn(mb):
    value, grads = jax.value_and_grad(loss)(params, mb)
    return grads, value

  grads, losses = mpmd.accumulate_grads(grads_fn, batch)
  updates, opt = OPTIMIZER.update(grads, opt, params)
  return (optax.apply_updates(params, updates), opt), losses


def arguments(num_stages, num_microbatches):
  shape = jax.ShapeDtypeStruct
  params = {
      'w': shape((num_stages, toy.DIM, toy.DIM), jnp.float32),
      'b': shape((num_stages, toy.DIM), jnp.float32),
      'tied': shape((toy.DIM, toy.DIM), jnp.float32),
  }
  batch = {k: shape((num_microbatches, 2, toy.DIM), jnp.float32) for k in 'xy'}
  return (params, jax.eval_shape(OPTIMIZER.init, params)), batch


@functools.cache
def planned(num_stages, num_actors, num_microbatches, schedule='interleaved_1f1b'):
  fn = mpmd.mpmd_jit(
      step,
      schedule=mpmd.schedules.get(schedule, num_stages=num_stages, num_actors=num_actors),
      runtime=mpmd.LocalRuntime(),
      donate_argnums=0,
  )
  return fn.plan(*arguments(num_stages, num_microbatches))


def equations(num_stages):
  """Equations outside of the loop, in it, in the tasks, in the outer programs; all ever made."""
  with mock.patch.object(compiling, 'export', wraps=compiling.export) as export:
    with mock.patch.object(jc, 'new_eqn', wraps=jc.new_eqn) as new_eqn:
      planned.__wrapped__(num_stages, 4, 4)
  jaxpr, placed = export.call_args.args[:2]
  bodies = [*placed.prologue, *placed.epilogue]
  return np.array([
      len(jaxpr.eqns),
      len(loop_of(jaxpr).params['jaxpr'].jaxpr.eqns),
      sum(len(body.jaxpr.eqns) for body in placed.cut.tasks.values()),
      sum(len(body.jaxpr.eqns) for body in bodies),
      new_eqn.call_count,
  ])


def counts(planned):
  lists = [actor.instructions for actor in planned.plan.actors]
  slots = sum(len(actor.slots) for actor in planned.plan.actors)
  sends = sum(isinstance(i, Send) for instructions in lists for i in instructions)
  return np.array([sum(map(len, lists)), sends, slots])


def test_equations_grow_linearly_in_stages():
  """Each stage more adds equally many equations, also where weights are stacked over stages."""
  few, more, many = (equations(s) for s in (4, 8, 16))
  np.testing.assert_array_equal(many - more, 2 * (more - few))
  assert (more > few).all()


def test_plan_grows_linearly_in_microbatches():
  """Each microbatch more adds equally many instructions, messages and values."""
  few, more, many = (counts(planned(8, 4, m)) for m in (4, 8, 16))
  np.testing.assert_array_equal(many - more, 2 * (more - few))
  assert (more > few).all()


@pytest.mark.parametrize('schedule', ['1f1b', 'interleaved_1f1b', 'zb_h1'])
def test_programs_do_not_grow(schedule):
  """Equal stages are one program, however many they are; so are the actors' outer programs."""
  few, many = (
      planned(s, 4 if schedule == 'interleaved_1f1b' else s, 4, schedule).program for s in (4, 8)
  )
  assert len(few.executables) == len(many.executables)
  for (stage, phase), task in many.tasks.items():
    if 0 < stage < 7:
      assert task.executable == many.tasks[1, phase].executable


def test_many_stages_on_few_actors():
  """48 stages on 8 actors with 64 microbatches compile and make a valid plan."""
  made = planned(48, 8, 64)
  planning.verify(made.plan)
  assert len(made.program.tasks) == 96
  runs = sum(len(a.instructions) for a in made.plan.actors)
  assert runs > 96 * 64
