"""The two marks a user puts into a step: `pipeline_yield` and `accumulate_grads`.

Under plain JAX both are ordinary computation: the identity and a sequential loop. `mpmd_jit` finds
them in the traced step and cuts there.

What autodiff does to `pipeline_yield`. Its JVP binds the mark once more, on the tangents; that
second mark is linear, and its transpose is a mark again, on the cotangents, with
`direction='backward'`. So the gradient of a function with marks f_0 | f_1 | f_2 is cut at the same
places in reverse: the backward mark of a boundary separates the backward pass of the stage after
it from that of the stage before it.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.errors import PartitionError
from pax_mpmd.errors import shown

__all__ = ['accumulate_grads', 'accumulate_grads_p', 'pipeline_yield', 'pipeline_yield_p']

pipeline_yield_p = jc.Primitive('pipeline_yield')
accumulate_grads_p = jc.Primitive('accumulate_grads')

_yield_ids = itertools.count()

# Names the scan of a loop that is differentiated or vmapped as a whole, which can't be cut.
LOOP_SCOPE = 'accumulate_grads_loop'

# So that messages name the user's line, not the one in here.
jc.hide_in_sources(__file__)


def pipeline_yield(tree: Any, name: str | None = None) -> Any:
  """Ends a pipeline stage: what comes after it in the data flow is the next stage.

  The identity, differentiable any number of times. Call it S-1 times between S stages; a final
  call after the last stage is allowed and then separates the stage from what follows it (the
  loss). Call it where `accumulate_grads` traces the loss function, not inside a `scan`, `cond`,
  `while` or `checkpoint`.

  Args:
    tree: the values that flow on to the next stage: any pytree of arrays.
    name: a name of the boundary for error messages.

  Returns:
    `tree`.
  """
  if name is not None and not isinstance(name, str):
    raise PartitionError(f'pipeline_yield: name must be a text, but is {shown(name)}.')
  leaves, treedef = jax.tree_util.tree_flatten(tree)
  if not leaves:
    return tree
  leaves = _arrays('pipeline_yield', tree)
  outs = pipeline_yield_p.bind(
      *leaves, id=next(_yield_ids), name=name or '', direction='forward'
  )
  return jax.tree_util.tree_unflatten(treedef, outs)


def _yield_jvp(primals, tangents, *, id, name, direction):
  outs = pipeline_yield_p.bind(*primals, id=id, name=name, direction=direction)
  live = [
      i
      for i, t in enumerate(tangents)
      if not isinstance(t, jc.Zero) and not jc.is_float0(jc.aval_of_value(t))
  ]
  tangents_out = [jc.zero_like_tangent(p) for p in outs]
  if live:
    marked = pipeline_yield_p.bind(
        *(tangents[i] for i in live), id=id, name=name, direction='tangent'
    )
    for i, t in zip(live, marked):
      tangents_out[i] = t
  return outs, tangents_out


def _yield_transpose(cotangents, *operands, id, name, direction):
  del operands  # linear in all of them
  live = [i for i, ct in enumerate(cotangents) if not isinstance(ct, jc.Zero)]
  outs: list[Any] = list(cotangents)
  if live:
    marked = pipeline_yield_p.bind(
        *(cotangents[i] for i in live),
        id=id,
        name=name,
        direction='backward' if direction == 'tangent' else 'tangent',
    )
    for i, ct in zip(live, marked):
      outs[i] = ct
  return outs


def _yield_batch(args, dims, **params):
  return pipeline_yield_p.bind(*args, **params), dims


def _yield_dce(used_outputs, eqn):
  kept = [i for i, used in enumerate(used_outputs) if used]
  if not kept:
    return [False] * len(eqn.invars), None
  new = eqn.replace(
      invars=[eqn.invars[i] for i in kept], outvars=[eqn.outvars[i] for i in kept]
  )
  return list(used_outputs), new


jc.register(
    pipeline_yield_p,
    impl=lambda *xs, **_: list(xs),
    abstract_eval=lambda *avals, **_: list(avals),
    lowering=lambda ctx, *xs, **_: xs,
    jvp=_yield_jvp,
    batch=_yield_batch,
    transpose=_yield_transpose,
    dce=_yield_dce,
)


def accumulate_grads(fn: Callable[[Any], tuple[Any, Any]], batch: Any) -> tuple[Any, Any]:
  """Runs `fn` on every microbatch, one after the other, and accumulates what it returns.

  The plain meaning, which is also the definition of the result:

    summed = zeros
    for i in range(M):
      s, y = fn(tree_map(lambda x: x[i], batch))
      summed = summed + s
      stacked[i] = y

  Args:
    fn: maps one microbatch to `(summed, stacked)`, two pytrees of arrays. Whatever it closes over
      (parameters, say) is the same for all microbatches.
    batch: a pytree of arrays `[M, microbatch, ...]`; M is the number of microbatches.

  Returns:
    `(summed, stacked)`: the first summed over the microbatches, in order; the second stacked
    along a new leading axis of size M.

  Raises:
    PartitionError: if the leaves of `batch` don't agree in their leading axis, or `fn` doesn't
      return a pair.
  """
  treedef = jax.tree_util.tree_structure(batch)
  leaves = _arrays('accumulate_grads: batch', batch)
  sizes = {x.shape[:1] for x in leaves}
  if len(sizes) != 1 or sizes == {()} or sizes == {(0,)}:
    raise PartitionError(
        'accumulate_grads: every leaf of `batch` must have the number of microbatches (at least 1)'
        f' as its leading axis; got {_some_shapes(batch)}. Reshape the batch to'
        ' [M, microbatch, ...] first.'
    )
  (num_microbatches,) = sizes.pop()
  out_trees: list[Any] = []

  def flat_fn(*flat_microbatch):
    out = fn(jax.tree_util.tree_unflatten(treedef, flat_microbatch))
    if not isinstance(out, tuple) or len(out) != 2:
      raise PartitionError(
          'accumulate_grads: `fn` must return a pair (summed, stacked); got'
          f' {_kind(out)}. Write `return grads, loss`, or `return grads, ()` if there is'
          ' nothing to stack.'
      )
    summed_tree, stacked_tree = map(jax.tree_util.tree_structure, out)
    summed = _arrays('accumulate_grads: summed', out[0])
    stacked = _arrays('accumulate_grads: stacked', out[1])
    for path, leaf in zip(_paths(out[0]), summed):
      if leaf.dtype == jnp.bool_ or not (
          jnp.issubdtype(leaf.dtype, jnp.number)
      ):
        raise PartitionError(
            f'accumulate_grads: summed{path} has dtype {leaf.dtype}, which has no sum. Return it'
            ' in the second, stacked, part, or convert it to a number.'
        )
    out_trees[:] = [summed_tree, stacked_tree, len(summed)]
    return summed + stacked

  avals = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves]
  closed = jax.make_jaxpr(flat_fn)(*avals)
  summed_tree, stacked_tree, num_summed = out_trees
  jaxpr = jc.new_jaxpr(
      (),
      [*closed.jaxpr.constvars, *closed.jaxpr.invars],
      closed.jaxpr.outvars,
      closed.jaxpr.eqns,
  )
  outs = accumulate_grads_p.bind(
      *closed.consts,
      *leaves,
      jaxpr=jc.ClosedJaxpr(jaxpr, ()),
      num_consts=len(closed.consts),
      num_summed=num_summed,
      num_microbatches=num_microbatches,
  )
  return (
      jax.tree_util.tree_unflatten(summed_tree, outs[:num_summed]),
      jax.tree_util.tree_unflatten(stacked_tree, outs[num_summed:]),
  )


def _arrays(what: str, tree: Any) -> list[Any]:
  """The leaves of a tree as arrays."""
  arrays = []
  for path, leaf in zip(_paths(tree), jax.tree_util.tree_leaves(tree)):
    try:
      arrays.append(jnp.asarray(leaf))
    except (TypeError, ValueError) as e:
      raise PartitionError(
          f'{what}{path} is {shown(leaf)}, which is not an array. Leave it out, or close over it.'
      ) from e
  return arrays


def _kind(value: Any) -> str:
  """What a value is, for messages: tracers are arrays to users."""
  return 'an array' if hasattr(value, 'dtype') else f'a {type(value).__name__}'


def _some_shapes(batch: Any) -> str:
  """The shapes of a few leaves, one for each size of the leading axis first."""
  named = {
      path: jnp.shape(x) for path, x in zip(_paths(batch), jax.tree_util.tree_leaves(batch))
  }
  if not named:
    return 'no leaves'
  first = {shape[:1]: path for path, shape in reversed(named.items())}
  chosen = dict.fromkeys([*sorted(first.values()), *named])
  text = ', '.join(f'batch{path} {named[path]}' for path in list(chosen)[:6])
  return f'the shapes {text}' + (f' and {len(named) - 6} more' if len(named) > 6 else '')


def _paths(tree: Any) -> list[str]:
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return [jax.tree_util.keystr(path) for path, _ in leaves]


def _loop(*args, jaxpr, num_consts, num_summed, num_microbatches):
  """The plain meaning of `accumulate_grads`, as a scan."""
  consts, batch = args[:num_consts], args[num_consts:]
  fn = jc.jaxpr_as_fun(jaxpr)

  def body(sums, microbatch):
    outs = fn(*consts, *microbatch)
    sums = [a + x for a, x in zip(sums, outs[:num_summed])]
    return sums, outs[num_summed:]

  zeros = [jnp.zeros(a.shape, a.dtype) for a in jaxpr.out_avals[:num_summed]]
  with jax.named_scope(LOOP_SCOPE):
    sums, stacked = jax.lax.scan(body, zeros, list(batch), length=num_microbatches)
  return [*sums, *stacked]


def _loop_abstract(*avals, jaxpr, num_consts, num_summed, num_microbatches):
  outs = [jc.strip_weak_type(a) for a in jaxpr.out_avals]
  stacked = [a.update(shape=(num_microbatches, *a.shape)) for a in outs[num_summed:]]
  return [*outs[:num_summed], *stacked]


def _loop_jvp(primals, tangents, **params):
  # Differentiating the whole loop is not what the mark is for; it is right all the same, as a scan.
  tangents = [jc.instantiate_zeros(t) for t in tangents]
  return jax.jvp(functools.partial(_loop, **params), tuple(primals), tuple(tangents))


def _loop_batch(args, dims, **params):
  outs = jax.vmap(functools.partial(_loop, **params), in_axes=tuple(dims))(*args)
  return outs, [0] * len(outs)


def _loop_dce(used_outputs, eqn):
  if not any(used_outputs):
    return [False] * len(eqn.invars), None
  params = dict(eqn.params)
  jaxpr, used_inputs = jc.dce(params['jaxpr'].jaxpr, used_outputs, instantiate=False)
  num_consts = params['num_consts']
  if not any(used_inputs[num_consts:]):
    # Without a batch operand the loop would lose its length's witness; keep the first.
    used_inputs = [*used_inputs[:num_consts], True, *used_inputs[num_consts + 1 :]]
    kept = [v for v, used in zip(params['jaxpr'].jaxpr.invars, used_inputs) if used]
    jaxpr = jc.new_jaxpr((), kept, jaxpr.outvars, jaxpr.eqns)
  params.update(
      jaxpr=jc.ClosedJaxpr(jaxpr, ()),
      num_consts=sum(used_inputs[:num_consts]),
      num_summed=sum(used_outputs[: params['num_summed']]),
  )
  new = eqn.replace(
      invars=[v for v, used in zip(eqn.invars, used_inputs) if used],
      outvars=[v for v, used in zip(eqn.outvars, used_outputs) if used],
      params=params,
  )
  return list(used_inputs), new


jc.register(
    accumulate_grads_p,
    impl=lambda *args, **params: jax.jit(functools.partial(_loop, **params))(*args),
    abstract_eval=_loop_abstract,
    lowering=jc.lower_fun(_loop),
    jvp=_loop_jvp,
    batch=_loop_batch,
    dce=_loop_dce,
)
