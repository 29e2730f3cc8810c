"""How much is compiled, computed and sent: the numbers that a step should have."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from pax_mpmd.compile.program import OperandKind
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from tests.core import test_models
from tests.core import toy
from tests.core import transformer


def plan(step, args, num_stages, num_actors, schedule='1f1b'):
  fn = mpmd.mpmd_jit(
      step,
      schedule=mpmd.schedules.get(schedule, num_stages=num_stages, num_actors=num_actors),
      runtime=mpmd.LocalRuntime(),
  )
  return fn.plan(*args)


@functools.cache
def transformer_plan(num_stages, num_actors, num_microbatches, schedule='1f1b'):
  args = (transformer.init(num_stages), transformer.batch(num_microbatches))
  return plan(transformer.train_step, args, num_stages, num_actors, schedule)


def sends(planned):
  """(from, to) -> the byte sizes of each message, in order."""
  out = collections.defaultdict(list)
  for actor in planned.plan.actors:
    for instruction in actor.instructions:
      if isinstance(instruction, Send):
        sizes = [actor.slots[slot].nbytes for slot in instruction.slots]
        out[actor.actor, instruction.dst].append(sizes)
  return dict(out)


@pytest.mark.parametrize('num_actors', [2, 4, 8])
def test_identical_stages_are_one_program(num_actors):
  """Of 8 stages the 6 inner ones share a forward and a backward program."""
  planned = transformer_plan(8, num_actors, 8)
  tasks = planned.program.tasks
  for phase in 'FB':
    inner = {tasks[stage, phase].executable for stage in range(1, 7)}
    assert len(inner) == 1
    ends = {tasks[stage, phase].executable for stage in (0, 7) if (stage, phase) in tasks}
    assert not inner & ends
  assert len({task.executable for task in tasks.values()}) <= 6


def test_outer_programs_are_few():
  """Each actor's prologue and epilogue are a few programs, not one per equation or array."""
  planned = transformer_plan(4, 4, 4)
  per_actor = collections.Counter(p.actor for p in planned.program.epilogue)
  assert max(per_actor.values()) <= 4
  per_actor = collections.Counter(p.actor for p in planned.program.prologue)
  assert max(per_actor.values(), default=0) <= 2


@pytest.mark.parametrize('schedule', ['gpipe', '1f1b'])
def test_bytes_between_stages(schedule):
  """Per microbatch one activation goes forward and its gradient back; nothing else."""
  m = 8
  activation = 4 * 2 * transformer.LENGTH * transformer.DIM
  few, many = (sends(transformer_plan(4, 4, k, schedule)) for k in (m, 2 * m))
  assert set(few) == set(many)
  for src, dst in few:
    grown = sum(map(sum, many[src, dst])) - sum(map(sum, few[src, dst]))
    adjacent = abs(src - dst) == 1
    assert grown == (m * activation if adjacent else 0), (src, dst)
    assert len(many[src, dst]) - len(few[src, dst]) == (m if adjacent else 0)
    # What isn't per microbatch: scalars, and the two parts of the tied embedding once each way.
    once = sum(map(sum, few[src, dst])) - (m * activation if adjacent else 0)
    embedding = 4 * transformer.VOCAB * transformer.DIM
    assert once <= (2 * embedding + 256 if {src, dst} == {0, 3} else 256), (src, dst)


def test_messages_per_step():
  """2 M per boundary, and a few for the norm and the shared weight; not one for each array."""
  m = 8
  planned = transformer_plan(4, 4, m)
  total = sum(len(x) for x in sends(planned).values())
  assert 2 * m * 3 < total <= 2 * m * 3 + 4 * 3 * 2


def test_tasks_are_run_once():
  """Every task program runs M times, every outer program once."""
  planned = transformer_plan(4, 2, 4, 'interleaved_1f1b')
  runs = collections.Counter(
      i.executable for a in planned.plan.actors for i in a.instructions if isinstance(i, Run)
  )
  expected = collections.Counter()
  for task in planned.program.tasks.values():
    expected[task.executable] += 4
  for outer in (*planned.program.prologue, *planned.program.epilogue):
    expected[outer.executable] += 1
  assert runs == expected


def _primitives(module: bytes) -> str:
  from jax._src.interpreters import mlir
  from jaxlib.mlir import ir

  with mlir.make_ir_context():
    return str(ir.Module.parse(module))


def test_loop_invariant_work_is_hoisted():
  """A weight's cosine and its cast run once per step, not once per microbatch."""

  def loss(ws, mb):
    x = mb['x']
    for i, w in enumerate(ws):
      x = toy.dense(jnp.cos(w).astype(jnp.bfloat16).astype(jnp.float32), x)
      x = mpmd.pipeline_yield(x) if i < 2 else x
    return toy.mse(x, mb['y'])

  def step(ws, batch):
    return mpmd.accumulate_grads(lambda mb: (loss(ws, mb), ()), batch)

  planned = plan(step, (toy.weights(), toy.batch()), 3, 3)
  program = planned.program
  text = {key: _primitives(x.module) for key, x in program.executables.items()}
  in_tasks = [text[task.executable] for task in program.tasks.values()]
  in_prologue = [text[outer.executable] for outer in program.prologue]
  assert not any('cosine' in t for t in in_tasks)
  assert sum('cosine' in t for t in in_prologue) == 3
  assert all('tanh' in t for t in in_tasks)


def test_masks_are_not_sent():
  """What each stage can compute from the batch is neither sent nor kept."""

  def loss(ws, mb):
    mask = (mb['x'] > 0)[:, :, None] & (mb['x'] > 0.1)[:, None, :]
    x = mb['x']
    for i, w in enumerate(ws):
      x = toy.dense(w, jnp.einsum('bij,bj->bi', jnp.where(mask, 0.5, 0.1), x))
      x = mpmd.pipeline_yield(x) if i < 2 else x
    return toy.mse(x, mb['y'])

  planned = plan(toy.train_step(loss), (toy.weights(), toy.batch()), 3, 3)
  edges = {
      planned.program.values[op.id]
      for task in planned.program.tasks.values()
      for op in task.outputs
      if op.kind is OperandKind.EDGE
  }
  assert not any(v.dtype == 'bool' for v in edges)
  assert max(v.nbytes for v in edges) == 2 * 8 * 4


def test_batch_goes_to_those_who_read_it():
  """Tokens go to the first stage's actor, labels to the last's, and no array to all."""
  planned = transformer_plan(4, 4, 4)
  by_name = {leaf.name: leaf for leaf in planned.program.inputs}
  holders = {
      name: {a for piece in leaf.pieces for a in piece.actors} for name, leaf in by_name.items()
  }
  tokens = next(v for k, v in holders.items() if 'tokens' in k)
  labels = next(v for k, v in holders.items() if 'labels' in k)
  # The embedding's gradient is made on the first actor; the loss on the last.
  assert tokens == {0} and labels == {3}
  for leaf in planned.program.inputs:
    if 'layers' in leaf.name:
      assert [piece.actors for piece in leaf.pieces] == [(0,), (1,), (2,), (3,)], leaf.name


def test_results_of_the_state_stay_where_its_arguments_are():
  """Each piece of the next state is on the actors that need it in the next step."""
  planned = transformer_plan(4, 4, 4)
  num = len(jax.tree_util.tree_leaves(transformer.init(4)))
  for x, y in zip(planned.program.inputs[:num], planned.program.outputs[:num]):
    before, after = ([(p.start, p.actors) for p in leaf.pieces] for leaf in (x, y))
    assert before == after, x.name


def test_arguments_are_not_copied_to_all():
  """The bytes that the actors hold of the state are those of the state, but for shared weights."""
  planned = transformer_plan(4, 4, 4)
  state = transformer.init(4)
  whole = sum(np.asarray(x).nbytes for x in jax.tree_util.tree_leaves(state))
  num = len(jax.tree_util.tree_leaves(state))
  held = sum(
      planned.program.values[piece.value].nbytes * len(piece.actors)
      for leaf in planned.program.inputs[:num]
      for piece in leaf.pieces
  )
  embedding = state.params['embedding'].nbytes
  assert whole <= held <= whole + embedding + 64


@pytest.mark.parametrize('name', ['encoder_decoder', 'encoder_decoder_outside_the_yields'])
def test_cross_attention_runs_where_its_weights_belong(name):
  """Keys and values of the encoder's output are made by each decoder stage, not by the encoder.

  So each stage's weights are on its actor alone, and per microbatch the memory and the streams go
  forward, their gradients back.
  """
  case = test_models.CASES[name]
  planned = plan(case.step, case.args, 4, 4)
  params = [leaf for leaf in planned.program.inputs if leaf.name.startswith('[0][0]')]
  for leaf in params:
    stage = int(leaf.name.removeprefix('[0][0][')[0])
    held = {actor for piece in leaf.pieces for actor in piece.actors}
    assert held <= {stage}, leaf.name
  memory, stream, scalars = 4 * 2 * 5 * 8, 4 * 2 * 3 * 8, 64
  through = name == 'encoder_decoder'
  expected = {
      (0, 1): memory,
      (1, 2): memory + (0 if through else stream),
      (1, 3): memory,
      (2, 3): stream,
      (3, 2): stream + memory,
      (2, 1): memory + (0 if through else stream),
      (1, 0): memory,
  }
  total = {link: sum(map(sum, sizes)) for link, sizes in sends(planned).items()}
  for link, size in total.items():
    assert 0 <= size - 4 * expected.get(link, 0) <= scalars, link
