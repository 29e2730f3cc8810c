"""Plans played with given times."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from pax_mpmd import schedules
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.timeline import events as events_lib
from pax_mpmd.timeline import simulate

WIDTH = 4


def _plan(name: str, num_microbatches: int, num_stages: int = 4, num_actors: int | None = None):
  """A plan of a plain chain of stages, and its schedule."""

  def loss(weights, x):
    for s in range(num_stages):
      x = jnp.tanh(x @ weights[s])
      if s < num_stages - 1:
        x = mpmd.pipeline_yield(x)
    return jnp.mean(x)

  def step(weights, batch):
    def microbatch(x):
      value, grads = jax.value_and_grad(loss)(weights, x)
      return grads, value

    return mpmd.accumulate_grads(microbatch, batch)

  schedule = schedules.get(name, num_stages, num_actors)
  fn = mpmd.mpmd_jit(step, schedule=schedule, runtime=mpmd.LocalRuntime())
  weights = [np.ones((WIDTH, WIDTH), np.float32)] * num_stages
  batch = np.ones((num_microbatches, 2, WIDTH), np.float32)
  return fn.plan(weights, batch).plan, schedule


def _times(plan, costs, write=0.0, read=0.0):
  """Programs cost what their phase does, and nothing outside of the loop."""
  run, writes, reads = {}, {}, {}
  for actor in plan.actors:
    for i, instruction in enumerate(actor.instructions):
      if isinstance(instruction, Run):
        kind = events_lib.kind_of(instruction)
        run[actor.actor, instruction.executable] = costs.get(kind, 0.0)
      elif isinstance(instruction, Send):
        writes[actor.actor, i] = write
      else:
        reads[actor.actor, i] = read
  return simulate.Times(run, writes, reads)


def _check(plan, played):
  """What `simulate` promises of its events."""
  for actor in plan.actors:
    own = [e for e in played.events if e.actor == actor.actor and e.lane != events_lib.SEND]
    assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    runs = [e.index for e in own if e.lane == events_lib.COMPUTE and e.kind != 'wait']
    assert runs == [i for i, x in enumerate(actor.instructions) if isinstance(x, Run)]
  sent = {
      (e.actor, e.peer, e.number): e for e in played.events if e.lane == events_lib.SEND
  }
  received = [e for e in played.events if e.lane == events_lib.RECEIVE]
  assert len(sent) == len(received) > 0
  for event in received:
    message = sent[event.peer, event.actor, event.number]
    assert message.end <= event.start and message.label == event.label
    assert message.nbytes == event.nbytes
  # The critical path has no holes and is as long as the step.
  assert played.critical[0].start == 0
  assert all(a.end == b.start for a, b in itertools.pairwise(played.critical))
  assert played.critical[-1].end == played.makespan


@pytest.mark.parametrize(
    ('name', 'num_stages', 'num_actors'),
    [('gpipe', 4, 4), ('1f1b', 4, 4), ('interleaved_1f1b', 4, 2), ('zb_h1', 4, 4), ('zb_v', 4, 2)],
)
def test_equals_the_schedules_own_simulation(name, num_stages, num_actors):
  """Where messages and everything outside of the loop take no time, the two must agree."""
  plan, schedule = _plan(name, 8, num_stages, num_actors)
  costs = {'F': 1.0, 'B': 2.0, 'I': 1.0, 'W': 1.0}
  played = simulate.play(plan, _times(plan, costs))
  _check(plan, played)
  by_phase = {schedules.Phase(kind): seconds for kind, seconds in costs.items()}
  by_phase[0, schedules.Phase.I] = 0.0  # nobody needs the gradient of a batch: it isn't computed
  expected = schedules.simulate(schedule, 8, by_phase)
  assert played.makespan == expected.makespan
  ends = {event.task: event.end for event in played.events if event.task is not None}
  assert ends == {task: expected.end[task] for task in ends}
  left_out = {task for task in expected.end if task not in ends}
  assert all((task.stage, task.phase) == (0, schedules.Phase.I) for task in left_out)


def test_messages_take_time_where_nothing_hides_them():
  """On the way forward and back each of the 3 + 3 first messages is written and read in turn."""
  plan, _ = _plan('gpipe', 1)
  played = simulate.play(plan, _times(plan, {'F': 1.0, 'B': 2.0}, write=0.25, read=0.5))
  _check(plan, played)
  assert played.makespan == pytest.approx(4 * 3 + 6 * 0.75)
  kinds = [event.kind for event in played.critical]
  assert kinds.count('send') == kinds.count('recv') == 6


def test_writing_does_not_hold_up_the_next_program():
  """A slow channel costs its own time, not that of the sender's programs."""
  plan, _ = _plan('1f1b', 8, 2, 2)
  free = simulate.play(plan, _times(plan, {'F': 1.0, 'B': 2.0})).makespan
  slow = simulate.play(plan, _times(plan, {'F': 1.0, 'B': 2.0}, write=0.5)).makespan
  assert free == 8 * 3 + 1 * 3  # all of an actor's own tasks, and the other's first F and last B
  assert free < slow <= free + 0.5 * 16


def test_times_are_medians():
  """Of a program over all its microbatches and steps; waiting isn't in them."""
  plan, _ = _plan('1f1b', 4)
  times = _times(plan, {'F': 1.0, 'B': 2.0}, 0.125, 0.25)
  played = simulate.play(plan, times)
  found = simulate.times_of(plan, [played.events, played.events])
  assert simulate.play(plan, found) == played
