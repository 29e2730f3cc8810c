"""Programs and their keys."""

from __future__ import annotations

import functools
import hashlib
import pickle

import numpy as np

import pax_mpmd as mpmd
from tests.core import toy


def loss(bias, ws, mb):
  x = mb['x']
  for i, w in enumerate(ws):
    x = toy.dense(w, x + bias[i])
    x = mpmd.pipeline_yield(x) if i < 3 else x
  return toy.mse(x, mb['y'])


def program(*bias):
  """The program of a step with a constant vector per stage."""
  step = toy.train_step(functools.partial(loss, bias))
  schedule = mpmd.schedules.OneFOneB(num_stages=4)
  fn = mpmd.mpmd_jit(step, schedule=schedule, runtime=mpmd.LocalRuntime())
  return fn.plan(toy.weights(4), toy.batch()).program


A, B = np.arange(8, dtype=np.float32), np.ones(8, np.float32)


def test_constants_are_part_of_a_program():
  """Inner stages that differ in a constant array are different programs; equal ones are one."""
  forward = lambda p: [p.tasks[s, 'F'].executable for s in (1, 2)]
  assert len(set(forward(program(A, A, A.copy(), A)))) == 1
  assert len(set(forward(program(A, A, B, A)))) == 2


def test_keys_are_the_same_in_every_compilation():
  """Two compilations of equal steps name equal programs alike, of others not."""
  first, second, other = program(A, A, A, A), program(A, A, A, A), program(B, B, B, B)
  assert first.executables.keys() == second.executables.keys()
  tasks = lambda p: {t.executable for t in p.tasks.values() if t.phase == 'F'}
  assert not tasks(first) & tasks(other)


def test_a_key_names_one_module():
  """No two modules share a key, no two keys a module with the same donations."""
  executables = program(A, B, A, B).executables
  digests = {(hashlib.sha256(x.module).hexdigest(), x.donated) for x in executables.values()}
  assert len(digests) == len(executables)
  assert all(key == x.key for key, x in executables.items())


def test_a_program_is_plain_data():
  """It pickles, so that a process without the step can plan and run it."""
  made = program(A, B, A, B)
  copy = pickle.loads(pickle.dumps(made))
  assert copy == made
