"""Traces of steps that ran: what stands in the files, and that the step is the same."""

from __future__ import annotations

import collections
import json
from pathlib import Path
import time
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pax_mpmd as mpmd
from pax_mpmd import schedules
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.schedules import show
from tests.core import toy

STAGES, MICROBATCHES, STEPS = 3, 4, 2


def _loss(weights, microbatch):
  x = microbatch['x']
  for i, w in enumerate(weights):
    x = toy.dense(w, x)
    if i < len(weights) - 1:
      x = mpmd.pipeline_yield(x)
  return toy.mse(x, microbatch['y'])


@pytest.fixture(scope='module', params=['ray', 'local'])
def traced(request, tmp_path_factory: pytest.TempPathFactory):
  """(folder, plan, results of all steps, those of jax.jit, whether there are processes)."""
  folder = tmp_path_factory.mktemp('trace')
  runtime = mpmd.RayRuntime() if request.param == 'ray' else mpmd.LocalRuntime()
  with runtime:
    step = mpmd.mpmd_jit(
        toy.train_step(_loss),
        schedule=schedules.OneFOneB(num_stages=STAGES),
        runtime=runtime,
        donate_argnums=0,
        trace_steps=STEPS,
        trace_dir=folder,
    )
    plan = step.plan(toy.weights(), toy.batch()).plan
    plain = jax.jit(toy.train_step(_loss))
    weights, expected, got = toy.weights(), [], []
    for i in range(STEPS + 3):
      weights, out = plain(weights, toy.batch(seed=i))
      expected.append(out)
    weights = toy.weights()
    for i in range(STEPS + 3):
      weights, out = step(weights, toy.batch(seed=i))
      got.append(mpmd.device_get(out))
  return folder, plan, got, expected, request.param == 'ray'


def _wait(path: Path) -> Path:
  """The trace's writer is a thread; the table comes last."""
  for _ in range(1000):
    if path.with_suffix('.txt').exists():
      return path
    time.sleep(0.01)
  raise AssertionError(f'{path} was not written')


def test_results_are_the_same(traced):
  """Recording changes nothing."""
  _, _, got, expected, _ = traced
  jax.tree_util.tree_map(lambda a, b: np.testing.assert_allclose(a, b, 2e-6), got, expected)


def test_trace(traced):
  """Each program and message of each step is there once; arrows go from sends to receives."""
  folder, plan, _, _, several = traced
  trace = json.loads(_wait(folder / 'step.json').read_text())
  events = trace['traceEvents']
  names = {e['pid']: e['args']['name'] for e in events if e['name'] == 'process_name'}
  assert sorted(names.values()) == sorted(
      f'actor {a}{suffix}' for a in range(STAGES) for suffix in ('', ' (planned)')
  )
  found = collections.Counter(
      (names[e['pid']], e['cat'] in ('send', 'recv'), e['args']['instruction'])
      for e in events
      if e['ph'] == 'X' and e['cat'] not in ('wait', 'recv')
  )
  wanted = collections.Counter()
  for actor in plan.actors:
    for i, instruction in enumerate(actor.instructions):
      name = f'actor {actor.actor}'
      if isinstance(instruction, Run):
        wanted[name, False, i] += STEPS
      elif isinstance(instruction, Send) and several:
        wanted[name, True, i] += STEPS
      if isinstance(instruction, (Run, Send)):
        wanted[f'{name} (planned)', isinstance(instruction, Send), i] += 1
  assert found == wanted

  tasks = [e for e in events if e['ph'] == 'X' and 'stage' in e['args']]
  assert {(e['args']['stage'], e['args']['microbatch']) for e in tasks} == {
      (s, m) for s in range(STAGES) for m in range(MICROBATCHES)
  }
  sends = [e for e in events if e['ph'] == 'X' and e['cat'] == 'send']
  assert all(e['args']['bytes'] > 0 for e in sends)
  arrows = collections.defaultdict(dict)
  for e in events:
    if e['ph'] in 'sf':
      arrows[e['id']][e['ph']] = e
  assert len(arrows) == len(sends)
  # One clock for all actors: nothing has been read before it was written.
  assert all(set(a) == {'s', 'f'} and a['s']['ts'] <= a['f']['ts'] for a in arrows.values())
  counters = [e for e in events if e['ph'] == 'C']
  assert {names[e['pid']] for e in counters} == {f'actor {a}' for a in range(STAGES)}


def test_measured_peak_is_the_plans(traced):
  """What an actor's process holds at its worst is what the plan says, to the byte."""
  folder, _, _, _, several = traced
  table = _wait(folder / 'step.json').with_suffix('.txt').read_text()
  rows = [line.split() for line in table.splitlines() if line.lstrip()[:1].isdigit()]
  assert len(rows) == STAGES
  for row in rows:
    measured, planned = row[-2], row[-1].strip('()')
    assert measured == (planned if several else '-')
    assert int(planned.replace(',', '')) > 0
  assert 'measured / planned' in table and 'critical path' in table


def test_picture(traced):
  """The SVG is well formed and has a box for each program, measured and planned."""
  folder, plan, _, _, _ = traced
  root = xml.etree.ElementTree.parse(_wait(folder / 'step.json').with_suffix('.svg')).getroot()
  boxes = root.findall('{*}g')
  runs = sum(isinstance(i, Run) for actor in plan.actors for i in actor.instructions)
  assert len(boxes) == 2 * runs


def test_its_times_draw_schedules(traced, tmp_path: Path, capsys):
  """`show --measured` takes the times of the stages from it."""
  folder = traced[0]
  path = str(_wait(folder / 'step.json'))
  costs = show.measured_costs(path)
  phases = [schedules.Phase.F, schedules.Phase.B]
  assert set(costs) == {(s, phase) for s in range(STAGES) for phase in phases}
  assert all(0 < value < 10_000 for value in costs.values())
  picture = tmp_path / 'x.svg'
  show.main(['gpipe', '--stages', '3', '--measured', path, '--svg', str(picture)])
  assert 'time of a step' in capsys.readouterr().out
  xml.etree.ElementTree.parse(picture)


def test_wrong_numbers():
  """An error before anything runs."""
  for value in (-1, 2.5, True, 'all'):
    with pytest.raises(mpmd.ConfigError, match='trace_steps'):
      mpmd.mpmd_jit(
          lambda: 0,
          schedule=schedules.GPipe(num_stages=2),
          runtime=mpmd.LocalRuntime(),
          trace_steps=value,
      )


def test_two_shapes_have_two_traces(tmp_path: Path):
  """Batches of another size are another plan: its trace gets a name of its own."""
  with mpmd.LocalRuntime() as runtime:
    step = mpmd.mpmd_jit(
        toy.train_step(_loss),
        schedule=schedules.GPipe(num_stages=STAGES),
        runtime=runtime,
        trace_steps=1,
        trace_dir=tmp_path,
    )
    for size in (2, 4):
      for _ in range(3):
        jnp.asarray(np.asarray(step(toy.weights(), toy.batch(size))[1][1]))
  for name in ('step', 'step-2'):
    _wait(tmp_path / f'{name}.json')
