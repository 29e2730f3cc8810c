"""Several devices an actor: programs partitioned over a mesh, on every path arrays take."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import pax_mpmd as mpmd
from tests import oracle

STAGES, MICROBATCHES, ROWS, DIM, HIDDEN = 2, 4, 4, 8, 16
OPTIMIZER = optax.adam(1e-2)
PARAM_SPECS = {'up': P(None, 'data', 'mdl'), 'down': P(None, 'mdl', 'data')}


def mesh_of(data: int, mdl: int) -> jax.sharding.Mesh:
  devices = np.asarray(jax.devices()[: data * mdl]).reshape(data, mdl)
  return jax.sharding.Mesh(devices, ('data', 'mdl'))


def make_step(mesh: jax.sharding.Mesh):
  """Two feed-forward stages, stacked, rematerialised, with constraints on `mesh`."""

  def on(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

  @jax.checkpoint
  def stage(w, x):
    hidden = on(jax.nn.gelu(x @ w['up']), 'data', 'mdl')
    return on(x + hidden @ w['down'], 'data', None)

  def loss_fn(params, microbatch):
    x = microbatch['x']
    for s in range(STAGES):
      x = stage(jax.tree_util.tree_map(operator.itemgetter(s), params), x)
      if s < STAGES - 1:
        x = mpmd.pipeline_yield(x)
    return jnp.mean((x - microbatch['y']) ** 2)

  def step(state, batch):
    params, slots = state

    def grads_fn(microbatch):
      loss, grads = jax.value_and_grad(loss_fn)(params, microbatch)
      return grads, loss

    grads, losses = mpmd.accumulate_grads(grads_fn, batch)
    grads = jax.tree_util.tree_map(lambda g: g / MICROBATCHES, grads)
    updates, slots = OPTIMIZER.update(grads, slots, params)
    return (optax.apply_updates(params, updates), slots), (losses, optax.global_norm(grads))

  return step


def arguments():
  rng = np.random.default_rng(0)
  params = {
      'up': rng.normal(size=(STAGES, DIM, HIDDEN)).astype(np.float32) * 0.3,
      'down': rng.normal(size=(STAGES, HIDDEN, DIM)).astype(np.float32) * 0.3,
  }
  batch = {k: rng.normal(size=(MICROBATCHES, ROWS, DIM)).astype(np.float32) for k in 'xy'}
  return (params, jax.device_get(OPTIMIZER.init(params))), batch


def in_shardings(state):
  """Weights and moments over both axes, the batch's rows over `data`."""
  adam, *rest = jax.tree_util.tree_map(lambda x: P(), state[1])
  slots = (adam._replace(mu=PARAM_SPECS, nu=PARAM_SPECS), *rest)
  return ((PARAM_SPECS, slots), P(None, 'data'))


def options(mesh):
  return dict(
      mesh=mesh, in_shardings=in_shardings(arguments()[0]), donate_argnums=0, num_stages=STAGES
  )


@pytest.mark.parametrize('schedule', ['1f1b', 'gpipe', 'zb_h1'])
@pytest.mark.parametrize('shape', [(2, 2), (2, 1), (1, 2)])
def test_equal_to_jit(schedule, shape):
  """Three steps, state handed on, are those of plain jit; also with devices shared by actors."""
  mesh = mesh_of(*shape)
  planned = oracle.check(
      make_step(mesh), *arguments(), schedule=schedule, num_calls=3, **options(mesh)
  )
  # Gradient sums and the next state are sharded as the weights.
  program = planned.program
  state = [x for leaf in program.inputs if "['up']" in leaf.name for x in leaf.pieces]
  sharded = {program.values[piece.value].sharding for piece in state}
  assert len(sharded) == 1 and None not in sharded
  weights = {program.values[piece.value] for piece in state}
  carries = {program.values[c.final] for c in program.carries}
  assert weights <= carries
  assert weights <= {program.values[p.value] for leaf in program.outputs for p in leaf.pieces}


def test_between_processes():
  """Ray's actors have as many devices as the mesh, and sharded arrays travel between them."""
  mesh = mesh_of(2, 2)
  with mpmd.RayRuntime() as runtime:
    oracle.check(make_step(mesh), *arguments(), num_calls=2, runtime=runtime, **options(mesh))


def test_channels_without_room():
  """Sharded arrays are handed over, not shared, where each Send waits for its Recv."""
  mesh = mesh_of(1, 2)
  with mpmd.LocalRuntime(channel_capacity=0) as runtime:
    oracle.check(make_step(mesh), *arguments(), num_calls=2, runtime=runtime, **options(mesh))


def test_an_argument_of_another_step():
  """What one step leaves sharded in its way another reads in its own."""
  mesh = mesh_of(2, 2)
  state, batch = arguments()
  schedule = mpmd.schedules.OneFOneB(num_stages=STAGES)
  desired = state
  with mpmd.LocalRuntime() as runtime:
    first = mpmd.mpmd_jit(
        make_step(mesh), schedule=schedule, runtime=runtime, mesh=mesh,
        in_shardings=in_shardings(state),
    )
    second = mpmd.mpmd_jit(make_step(mesh), schedule=schedule, runtime=runtime, mesh=mesh)
    actual = state
    for fn in (first, second, first):
      actual, _ = fn(actual, batch)
      desired, _ = jax.jit(make_step(mesh))(desired, batch)
    oracle.assert_trees_close(actual, desired)


def test_without_a_mesh_constraints_say_nothing():
  """A step with constraints runs on one device an actor, too."""
  oracle.check(make_step(mesh_of(2, 2)), *arguments(), num_stages=STAGES)


def test_refused():
  """Meshes and shardings that don't fit are errors that name the argument."""
  mesh, step = mesh_of(2, 2), make_step(mesh_of(2, 2))
  args = arguments()

  def make(**more):
    schedule = mpmd.schedules.OneFOneB(num_stages=STAGES)
    return mpmd.mpmd_jit(step, schedule=schedule, runtime=mpmd.LocalRuntime(), **more)

  with pytest.raises(mpmd.ConfigError, match='in_shardings needs mesh'):
    make(in_shardings=(P(), P()))
  with pytest.raises(mpmd.ConfigError, match=r'mesh=.*must be a jax.sharding.Mesh'):
    make(mesh=(2, 2))
  with pytest.raises(mpmd.ConfigError, match='one entry for each of the 2'):
    make(mesh=mesh, in_shardings=(P(),)).plan(*args)
  with pytest.raises(mpmd.ConfigError, match=r'in_shardings\[1\] is not a prefix'):
    make(mesh=mesh, in_shardings=(None, {'x': P()})).plan(*args)
  with pytest.raises(mpmd.ConfigError, match="'zz' is no axis of the mesh"):
    make(mesh=mesh, in_shardings=(None, P(None, 'zz'))).plan(*args)
  with pytest.raises(mpmd.ConfigError, match='an axis stands in it twice'):
    make(mesh=mesh, in_shardings=(None, P('data', 'data'))).plan(*args)
  with pytest.raises(mpmd.ConfigError, match='4 entries for an array of 3 dimensions'):
    make(mesh=mesh, in_shardings=(None, P(None, None, None, 'mdl'))).plan(*args)
  with pytest.raises(mpmd.ConfigError, match='its leaves must be PartitionSpecs'):
    make(mesh=mesh, in_shardings=(None, 'data')).plan(*args)
  with pytest.raises(mpmd.PartitionError, match=r"mesh of \{'data': 2, 'mdl': 2\}.*\{'mdl': 2\}"):
    make(mesh=mesh_of(1, 2)).plan(*args)
  few = mpmd.LocalRuntime(devices=jax.devices()[:2])
  schedule = mpmd.schedules.OneFOneB(num_stages=STAGES)
  with pytest.raises(mpmd.ConfigError, match='mesh has 4 devices, and LocalRuntime has 2'):
    mpmd.mpmd_jit(step, schedule=schedule, runtime=few, mesh=mesh)(*args)


def test_steps_of_one_runtime_have_meshes_of_one_size():
  """A runtime's actors keep their devices."""
  mesh = mesh_of(1, 2)
  args = arguments()
  schedule = mpmd.schedules.OneFOneB(num_stages=STAGES)
  with mpmd.LocalRuntime() as runtime:
    mpmd.mpmd_jit(make_step(mesh), schedule=schedule, runtime=runtime, mesh=mesh)(*args)
    with pytest.raises(mpmd.ConfigError, match=r'have 2 devices each.*mesh of 1'):
      mpmd.mpmd_jit(make_step(mesh), schedule=schedule, runtime=runtime)(*args)
