"""Equations that take the examples of a batch together, so that a microbatch shows something else.

A sum over the batch adds up over microbatches if each summand is made of one example. These look at
single equations for signs that it isn't: numbers of the whole batch that go into arrays of examples
(weights divided by their sum), sorting along the batch, products of examples with each other; or
functions of sums that don't add up (a perplexity). An axis is taken for the batch's by its size, so
that a sign can be overlooked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pax_mpmd.compile import jax_compat

__all__ = ['has_batch', 'of_examples', 'of_statistics', 'sums_over_batch']

_ALONG_AXIS = {
    'cumlogsumexp': 'axis',
    'cummax': 'axis',
    'cummin': 'axis',
    'cumprod': 'axis',
    'cumsum': 'axis',
    'sort': 'dimension',
}


def has_batch(atom: Any, batch_size: int) -> bool:
  """Whether an array has an axis over the examples, or over parts of them."""
  return any(n > 0 and n % batch_size == 0 for n in getattr(atom.aval, 'shape', ()))


def sums_over_batch(eqn: Any, batch_size: int) -> bool:
  """Whether a `dot_general` sums over the examples."""
  (left, _), _ = eqn.params['dimension_numbers']
  shape = eqn.invars[0].aval.shape
  summed = any(shape[i] > 0 and shape[i] % batch_size == 0 for i in left)
  return summed and not has_batch(eqn.outvars[0], batch_size)


def of_statistics(eqn: Any) -> str:
  """What is wrong with a result in which the examples are gone and that is no sum of them.

  Nothing for loops and the like, which are not looked into.
  """
  if jax_compat.inner_jaxprs(eqn):
    return ''
  return (
      f'is made of the whole batch by {eqn.primitive.name} (at {jax_compat.source_of(eqn)}), which'
      ' is no sum, mean or quotient of sums'
  )


def of_examples(eqn: Any, varying: Sequence[bool], batch_size: int) -> str:
  """How an equation makes an array of examples depend on several of them; nothing if it doesn't.

  Args:
    eqn: the equation.
    varying: which of its operands differ between microbatches.
    batch_size: examples of the batch.
  """
  name = eqn.primitive.name
  if jax_compat.inner_jaxprs(eqn) or not has_batch(eqn.outvars[0], batch_size):
    return ''
  where = f'(at {jax_compat.source_of(eqn)})'
  if any(v and not has_batch(x, batch_size) for v, x in zip(varying, eqn.invars)):
    return f'sums up what depends on a number of the whole batch {where}'
  shapes = [x.aval.shape for x in eqn.invars]
  axis = 0 if name == 'top_k' and len(shapes[0]) == 1 else None
  if name in _ALONG_AXIS:
    axis = eqn.params[_ALONG_AXIS[name]]
  if axis == 0 and varying[0] and shapes[0][0] % batch_size == 0:
    return f'sums up what {name} makes of the whole batch {where}'
  if name == 'dot_general' and all(varying):
    contracted, batched = eqn.params['dimension_numbers']

    def over_batch(shape: Sequence[int], axes: Sequence[int]) -> bool:
      return any(shape[i] > 0 and shape[i] % batch_size == 0 for i in axes)

    side_by_side = any(map(over_batch, shapes, batched))
    free = [set(range(len(s))) - {*c, *b} for s, c, b in zip(shapes, contracted, batched)]
    if not side_by_side and all(map(over_batch, shapes, free)):
      return f'multiplies examples of the batch with each other {where}'
  return ''
