"""Variables that the forward pass updates (moving averages, counters), over microbatches.

Pax's pipeline carries them from one microbatch to the next: after M microbatches a variable is
f_M-1(... f_0(x)). Microbatches that run on several actors in any order have no such chain, but the
updates there are have the form f_m(x) = a x + b_m with a constant `a` (the decay of a moving
average, 1 for a counter), and then the result is a^M x + sum_m(a^(M-1-m) b_m), a plain sum. That
the update has this form is checked on its derivative, and that nothing else of a microbatch's
results depends on such a variable, or on one through what has no derivative (a comparison, the
nearest of several centroids).

Outside of a pipeline Pax updates once, by the whole batch; there the changes of the microbatches
are averaged, which is Pax's own rule for replicas of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np
from praxis import base_layer

from pax_mpmd import errors
from pax_mpmd.compile import jax_compat
from pax_mpmd.pax import outputs

__all__ = ['UpdateRules', 'find_update_rules', 'in_pipeline']

NON_TRAINABLE = base_layer.NON_TRAINABLE


@dataclasses.dataclass(frozen=True)
class UpdateRules:
  """How each updated variable follows from those of the microbatches.

  Attributes:
    decays: path of a variable in a pipeline -> its `a`, a float or an array like the variable.
    var_weight_hparams: Praxis' metadata of the model's variables.
    num_microbatches: M.
  """

  decays: dict[str, Any]
  var_weight_hparams: Any
  num_microbatches: int

  def sums_of(self, updated_vars: Any, mdl_vars: Any, index: Any) -> Any:
    """What the loop sums for one microbatch.

    Args:
      updated_vars: collection -> variables after its forward pass.
      mdl_vars: the model's variables before.
      index: the number m of the microbatch, an int32 scalar.
    """

    def change(path, new, old):
      if old.dtype == jnp.bool_:
        return new.astype(jnp.float32) - old.astype(jnp.float32)
      decay = self.decays.get(_name(path), 1.0)
      if _is_one(decay):
        return new - old
      decay = jnp.asarray(decay, old.dtype)
      later = (self.num_microbatches - 1 - index).astype(old.dtype)
      return decay**later * (new - decay * old)

    return {
        name: jax.tree_util.tree_map_with_path(change, tree, mdl_vars[name])
        for name, tree in updated_vars.items()
        if name in mdl_vars
    }

  def combine(self, sums: Any, mdl_vars: Any) -> Any:
    """The variables after the batch from the sums over its microbatches."""

    def merge(path, total, old, hparams):
      name = _name(path)
      if name in self.decays:
        decay = self.decays[name]
        power = 1 if _is_one(decay) else jnp.asarray(decay, old.dtype) ** self.num_microbatches
        return (power * old + total).astype(old.dtype)
      if base_layer.var_requires_mean_sync(hparams):
        mean = total / self.num_microbatches
        total = jnp.round(mean) if jnp.issubdtype(old.dtype, jnp.integer) else mean
      new = old.astype(total.dtype) + total
      return (new > 0.5 if old.dtype == jnp.bool_ else new).astype(old.dtype)

    return {
        name: jax.tree_util.tree_map_with_path(
            merge, tree, mdl_vars[name], self.var_weight_hparams[name]
        )
        for name, tree in sums.items()
    }


def find_update_rules(
    update_fn: Callable[..., Any],
    mdl_vars: Any,
    inputs: Any,
    prng_key: Any,
    var_weight_hparams: Any,
    num_microbatches: int,
) -> UpdateRules:
  """Finds how a model's forward pass updates its variables, by tracing it once more if it has any.

  Args:
    update_fn: (mdl_vars, inputs, prng_key) -> the loss, and the updated variables by collection.
    mdl_vars: the variables, arrays or tracers.
    inputs: a batch.
    prng_key: a key.
    var_weight_hparams: Praxis' metadata of the variables.
    num_microbatches: M.

  Raises:
    ConfigError: a variable in a pipeline is updated in a way that has no such sum.
  """
  old = mdl_vars.get(NON_TRAINABLE, {})
  flat = jax.tree_util.tree_flatten_with_path(old)[0]
  pipelined = [(_name(path), x) for path, x in flat if in_pipeline(path)]
  rules = UpdateRules({}, var_weight_hparams, num_microbatches)
  if num_microbatches == 1 or not pipelined:
    return rules
  _check_no_chain(update_fn, mdl_vars, inputs, prng_key, [name for name, _ in pipelined])
  floats = [(n, x) for n, x in pipelined if jnp.issubdtype(x.dtype, jnp.floating)]
  decays: dict[str, Any] = {n: 1.0 for n, x in pipelined if x.dtype != jnp.bool_}
  if floats:
    decays |= _decays_of(update_fn, mdl_vars, inputs, prng_key, [n for n, _ in floats])
  return dataclasses.replace(rules, decays=decays)


def _check_no_chain(update_fn, mdl_vars, inputs, prng_key, names):
  """Raises ConfigError where more than a variable itself depends on its updates so far."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(mdl_vars)
  number = {_name(path[1:]): i for i, (path, _) in enumerate(leaves) if _is_updated_kind(path)}
  closed = jax.make_jaxpr(
      lambda *args: [
          (result[0], jax.tree_util.tree_leaves(result[1][NON_TRAINABLE]))
          for result in [update_fn(*args)]
      ]
  )(mdl_vars, inputs, prng_key)
  jaxpr = closed.jaxpr
  of_leaf = [_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(
      mdl_vars[NON_TRAINABLE])[0]]
  result = {name: 1 + of_leaf.index(name) for name in names}
  updated = [n for n in names if jaxpr.outvars[result[n]] is not jaxpr.invars[number[n]]]
  for i in (0, *(result[name] for name in updated)):
    wanted = [j == i for j in range(len(jaxpr.outvars))]
    only, used = jax_compat.dce(jaxpr, wanted, instantiate=False)
    kept = [v for v, u in zip(jaxpr.invars, used) if u]
    for name in updated:
      if used[number[name]] and i != result[name]:
        raise _order_matters(name, 'the loss' if i == 0 else of_leaf[i - 1])
      variable = jaxpr.invars[number[name]]
      if i == result[name] and used[number[name]]:
        start = only.invars[kept.index(variable)]
        if not _differentiable(only, {start}, variable.aval.dtype):
          raise _order_matters(name, 'its own update')


def _is_updated_kind(path: tuple[Any, ...]) -> bool:
  return _name(path[:1]) == NON_TRAINABLE


# How a count may reach its new value, where there is no derivative to look at.
_COUNTING = frozenset((
    'add', 'broadcast_in_dim', 'concatenate', 'convert_element_type', 'copy', 'dynamic_slice',
    'dynamic_update_slice', 'expand_dims', 'gather', 'pad', 'reshape', 'scatter', 'select_n',
    'slice', 'squeeze',
))
_WITHOUT_DERIVATIVE = frozenset((
    'ceil', 'cond', 'floor', 'round', 'sign', 'stop_gradient', 'while',
))


def _differentiable(jaxpr: Any, tainted: set[Any], dtype: Any) -> bool:
  """Whether the tainted variables act only through what shows in a derivative."""
  floating = jnp.issubdtype(dtype, jnp.floating)
  tainted = set(tainted)
  for eqn in jaxpr.eqns:
    hit = [not isinstance(x, jax_compat.Literal) and x in tainted for x in eqn.invars]
    if not any(hit):
      continue
    name, inner = eqn.primitive.name, jax_compat.inner_jaxprs(eqn)
    if floating and name in _WITHOUT_DERIVATIVE:
      return False
    if inner and (len(inner) != 1 or len(inner[0].invars) != len(hit)):
      return False
    if inner:
      entering = {v for v, h in zip(inner[0].invars, hit) if h}
      if not _differentiable(inner[0], entering, dtype):
        return False
    elif floating and not all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars):
      return False
    elif not floating and name not in _COUNTING:
      return False
    tainted.update(eqn.outvars)
  return True


def _decays_of(update_fn, mdl_vars, inputs, prng_key, names):
  """The constant derivatives of updates by the variables they update."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(mdl_vars[NON_TRAINABLE])
  paths = [_name(path) for path, _ in leaves]
  positions = [paths.index(name) for name in names]

  def updates(floats, values, inputs, prng_key):
    values = dict(values)
    inner = [x for _, x in jax.tree_util.tree_flatten_with_path(values[NON_TRAINABLE])[0]]
    for i, x in zip(positions, floats):
      inner[i] = x
    values[NON_TRAINABLE] = jax.tree_util.tree_unflatten(treedef, inner)
    new = jax.tree_util.tree_leaves(update_fn(values, inputs, prng_key)[1][NON_TRAINABLE])
    return [new[i] for i in positions]

  def derivatives(tangents, values, inputs, prng_key):
    def fn(floats):
      return updates(floats, values, inputs, prng_key)

    return jax.jvp(fn, ([leaves[i][1] for i in positions],), (tangents,))[1]

  tangents = [jnp.ones_like(leaves[i][1]) for i in positions]
  closed = jax.make_jaxpr(derivatives)(tangents, mdl_vars, inputs, prng_key)
  return {
      name: _constant_factor(closed, i, np.shape(x), name)
      for i, (name, x) in enumerate(zip(names, tangents))
  }


def _constant_factor(closed, i, shape, name):
  """c where result i is c times input i for a constant c."""
  dtype = closed.jaxpr.invars[i].aval.dtype
  probe = np.random.RandomState(0).uniform(1.0, 2.0, size=shape)
  ones, other = (
      outputs.constant_output(closed, i, {i: np.asarray(x, dtype)}) for x in (np.ones(shape), probe)
  )
  if ones is not None and np.allclose(other, ones * probe, rtol=1e-5):
    first = ones.flat[0] if ones.size else 1.0
    return float(first) if np.all(ones == first) else ones
  raise _order_matters(name, 'its own update')


def _order_matters(name: str, what: str) -> errors.ConfigError:
  return errors.ConfigError(
      f'The forward pass updates the variable {NON_TRAINABLE}/{name} in the pipeline, and {what}'
      ' depends on it, in a way that depends on the order of the microbatches: Pax hands the'
      ' variable from one to the next. With MPMD a variable x may become a * x + b with a constant'
      ' a (moving averages, counters) that nothing else in the step uses. Leave the layer out of'
      ' the pipeline stage, or set NUM_MICROBATCHES=1.'
  )


def _is_one(decay: Any) -> bool:
  return isinstance(decay, float) and decay == 1.0


def _name(path: tuple[Any, ...]) -> str:
  return '/'.join(str(getattr(key, 'key', getattr(key, 'name', key))) for key in path)


def in_pipeline(path: tuple[Any, ...]) -> bool:
  """Whether a variable belongs to the stages of a Praxis pipeline, which names its children so."""
  return '/pipeline/body/' in _name(path)
