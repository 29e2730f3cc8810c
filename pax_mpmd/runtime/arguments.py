"""What the functions of `mpmd_jit` are called with: checked, flat, and with its shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pax_mpmd.compile.trace import mesh_sizes
from pax_mpmd.errors import ConfigError
from pax_mpmd.errors import shown

__all__ = ['flatten', 'key', 'next_values', 'partition_specs']


def flatten(args: Any, kwargs: Any) -> tuple[list[Any], Any, list[jax.ShapeDtypeStruct]]:
  """(leaves, tree of (args, kwargs), shape and dtype of each leaf) of a call.

  Raises:
    ConfigError: a leaf is not an array of numbers.
  """
  leaves, in_tree = jax.tree_util.tree_flatten((args, kwargs))
  arrays, avals = [], []
  for position, leaf in enumerate(leaves):
    if not hasattr(leaf, 'shape') or not hasattr(leaf, 'dtype'):
      leaf = np.asarray(leaf)
    problem = _problem(leaf)
    if problem:
      path = jax.tree_util.tree_flatten_with_path((args, kwargs))[0][position][0]
      raise ConfigError(
          f'mpmd_jit: argument {jax.tree_util.keystr(path)} of the step (of (args, kwargs)) is'
          f' {_described(leaves[position])}, {problem}'
      )
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    arrays.append(leaf)
    avals.append(jax.ShapeDtypeStruct(tuple(leaf.shape), dtype))
  return arrays, in_tree, avals


def _described(value: Any) -> str:
  """An argument, for messages: arrays by shape and dtype."""
  if hasattr(value, 'shape') and hasattr(value, 'dtype'):
    return f'{value.dtype}{list(value.shape)}'
  return shown(value)


def _problem(array: Any) -> str:
  """What is wrong with an argument, or nothing."""
  if isinstance(array, jax.core.Tracer):
    return (
        'a traced array: the function is called inside jax.jit, jax.grad, jax.vmap or the like. It'
        ' runs on other processes or threads and compiles the step by itself, so call it as it is,'
        ' and put what you would wrap around it into the step.'
    )
  if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
    return (
        'typed random keys, which can be used within a step but not be passed in or out. Pass'
        ' jax.random.key_data(key), and in the step use jax.random.wrap_key_data(data).'
    )
  if array.dtype == object or array.dtype.kind in 'USMm':
    return (
        'not an array of numbers or booleans. Let the step close over it, for example by'
        ' functools.partial, if it is the same in every call.'
    )
  return ''


def key(in_tree: Any, avals: Sequence[Any]) -> Any:
  """What calls that share a plan have in common."""
  return in_tree, tuple((a.shape, str(a.dtype)) for a in avals)


def next_values(args: Sequence[Any], traced: Any) -> dict[int, int]:
  """Pairs results with the arguments they replace: equal trees of equal arrays, in order."""
  out_avals = [(tuple(v.aval.shape), v.aval.dtype) for v in traced.jaxpr.outvars]
  outs = jax.tree_util.tree_unflatten(traced.out_tree, list(range(len(out_avals))))
  candidates = [outs, *outs] if isinstance(outs, (tuple, list)) else [outs]
  pairs: dict[int, int] = {}
  position = 0
  for arg in args:
    arg_leaves, arg_tree = jax.tree_util.tree_flatten(arg)
    for candidate in candidates:
      out_leaves, out_tree = jax.tree_util.tree_flatten(candidate)
      if out_tree != arg_tree or not out_leaves or out_leaves[0] in pairs:
        continue
      if all(
          out_avals[o] == (tuple(a.shape), a.dtype) for o, a in zip(out_leaves, arg_leaves)
      ):
        pairs.update((o, position + k) for k, o in enumerate(out_leaves))
        break
    position += len(arg_leaves)
  return pairs


def partition_specs(
    in_shardings: Any, args: Sequence[Any], kwargs: Any, mesh: jax.sharding.Mesh | None
) -> list[Any]:
  """Per flat argument its PartitionSpec, or None; checked against the mesh."""
  specs: list[Any] = []
  if in_shardings is None:
    in_shardings = (None,) * len(args)
  if not isinstance(in_shardings, (tuple, list)) or len(in_shardings) != len(args):
    raise ConfigError(
        f'mpmd_jit: in_shardings={shown(in_shardings)} must be a tuple with one entry for each of'
        f' the {len(args)} positional arguments.'
    )

  def is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (jax.sharding.PartitionSpec, jax.sharding.NamedSharding))

  def spread(spec: Any, part: Any) -> None:
    if not is_spec(spec):
      raise ConfigError(
          f'mpmd_jit: in_shardings has {shown(spec)}; its leaves must be PartitionSpecs,'
          ' NamedShardings or None.'
      )
    if mesh is not None and isinstance(spec, jax.sharding.NamedSharding):
      if mesh_sizes(spec.mesh) != mesh_sizes(mesh):
        raise ConfigError(
            f'mpmd_jit: in_shardings has {shown(spec)}, on a mesh of {mesh_sizes(spec.mesh)};'
            f' the argument `mesh` has {mesh_sizes(mesh)}. Use that mesh, or PartitionSpecs.'
        )
    spec = getattr(spec, 'spec', spec)
    leaves = jax.tree_util.tree_leaves(part)
    if mesh is not None and spec is not None:
      _check_spec(spec, leaves, mesh)
    specs.extend([spec] * len(leaves))

  for i, (sharding, arg) in enumerate(zip(in_shardings, args)):
    try:
      jax.tree_util.tree_map(spread, sharding, arg, is_leaf=is_spec)
    except ValueError as error:
      raise ConfigError(
          f'mpmd_jit: in_shardings[{i}] is not a prefix of the tree of argument {i}: {error}'
      ) from error
  return specs + [None] * len(jax.tree_util.tree_leaves(kwargs))


def _check_spec(spec: Any, leaves: Sequence[Any], mesh: jax.sharding.Mesh) -> None:
  axes = [
      axis
      for entry in spec
      for axis in (entry if isinstance(entry, (tuple, list)) else (entry,))
      if axis is not None
  ]
  unknown = [axis for axis in axes if axis not in mesh.axis_names]
  rank = min((np.ndim(leaf) for leaf in leaves), default=len(spec))
  what = ''
  if unknown:
    what = f'{unknown[0]!r} is no axis of the mesh, whose axes are {tuple(mesh.axis_names)}'
  elif len(set(axes)) < len(axes):
    what = 'an axis stands in it twice'
  elif len(spec) > rank:
    what = f'it has {len(spec)} entries for an array of {rank} dimensions'
  if what:
    raise ConfigError(f'mpmd_jit: in_shardings has {spec}: {what}.')
