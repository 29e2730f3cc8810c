"""In which of its operands an equation of the loop's body is linear.

An equation f is linear in operand x here if f(a + b) = f(a) + f(b), the other operands being what
they are, and if those others are known wherever a part of x may be made: they belong to no stage
(step values, or what follows from the microbatch's inputs), or are small and of the forward pass
while x is of the backward pass. A cast to a smaller type counts as linear; the parts are rounded
before they are added instead of after.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.classes import invariant_vars
from pax_mpmd.compile.segments import FREE
from pax_mpmd.compile.segments import Segments

_SUMS = frozenset({'add', 'add_any', 'sub'})
# One operand, linear whatever the parameters.
_UNARY = frozenset(
    """
    broadcast_in_dim copy copy_p cumsum expand_dims imag neg real reduce_precision reduce_sum
    reshape rev sharding_constraint slice split squeeze transpose unstack
    """.split()
)
# A factor of at most this many elements may be sent to where the parts are.
_SMALL_ELEMENTS = 4


def is_sum(eqn: Any) -> bool:
  """Whether the equation adds (or subtracts) arrays of one shape."""
  if eqn.primitive.name not in _SUMS:
    return False
  return all(x.aval.shape == eqn.outvars[0].aval.shape for x in eqn.invars)


def is_backward_mark(eqn: Any) -> bool:
  """Whether the equation is a mark on gradients: the identity, result by result."""
  return eqn.primitive.name == 'pipeline_yield' and eqn.params['direction'] != 'forward'


class Linearity:
  """Says of each equation of a loop's body in which operands it is linear."""

  def __init__(self, body: Any, num_consts: int, segments: Segments):
    self._segments = segments
    self._invariant = invariant_vars(body, num_consts)
    self._zeros: set[Any] = set()
    for eqn in body.eqns:
      if eqn.primitive.name in ('broadcast_in_dim', 'convert_element_type', 'reshape', 'copy'):
        if self._is_zeros(eqn.invars[0]):
          self._zeros.add(eqn.outvars[0])

  def operands(self, eqn: Any) -> tuple[int, ...]:
    """Positions of the operands in which the equation is linear; of a sum's jointly."""
    name, xs = eqn.primitive.name, eqn.invars
    if is_sum(eqn):
      return (0, 1)
    if name in _UNARY:
      return (0,) if len(xs) == 1 else ()
    if name == 'convert_element_type':
      types = (xs[0].aval.dtype, eqn.outvars[0].aval.dtype)
      return (0,) if all(jnp.issubdtype(t, jnp.inexact) for t in types) else ()
    if name == 'mul':
      return tuple(i for i in (0, 1) if self._is_factor(xs[1 - i], xs[i]))[:1]
    if name == 'div':
      inexact = jnp.issubdtype(xs[0].aval.dtype, jnp.inexact)
      return (0,) if inexact and self._is_factor(xs[1], xs[0]) else ()
    if name == 'pad':
      return (0,) if self._is_zeros(xs[1]) else ()
    if name == 'select_n':
      others = [i for i in range(1, len(xs)) if not self._is_zeros(xs[i])]
      return tuple(others) if len(others) == 1 and self._is_free(xs[0]) else ()
    if name == 'dynamic_slice':
      return (0,) if all(map(self._is_free, xs[1:])) else ()
    if name == 'dynamic_update_slice' and all(map(self._is_free, xs[2:])):
      return tuple(i for i in (0, 1) if self._is_zeros(xs[1 - i]))[:1]
    # Where the other operand differs from microbatch to microbatch, these make a gradient of an
    # activation, and it is the activation's that should be sent.
    if name == 'gather':
      fill = eqn.params['fill_value'] or 0
      inexact = jnp.issubdtype(xs[0].aval.dtype, jnp.inexact)
      return (0,) if self._is_invariant(xs[1]) and inexact and fill == 0 else ()
    if name == 'scatter':
      return (0,) if self._is_zeros(xs[2]) and self._is_invariant(xs[1]) else ()
    if name == 'scatter-add':
      return (2,) if self._is_zeros(xs[0]) and self._is_invariant(xs[1]) else ()
    if name == 'dot_general':
      return tuple(i for i in (0, 1) if self._is_invariant(xs[1 - i]))[:1]
    return ()

  def _is_zeros(self, atom: Any) -> bool:
    if isinstance(atom, jc.Literal):
      return not atom.aval.shape and bool(atom.val == 0)
    return atom in self._zeros

  def _is_free(self, atom: Any) -> bool:
    return self._segments.of(atom) == FREE

  def _is_invariant(self, atom: Any) -> bool:
    return isinstance(atom, jc.Literal) or atom in self._invariant

  def _is_factor(self, y: Any, x: Any) -> bool:
    """Whether `y` is known wherever a part of `x` may be made."""
    if self._is_free(y):
      return True
    forward = self._segments.of(y) < self._segments.num_stages <= self._segments.of(x)
    return forward and math.prod(y.aval.shape) <= _SMALL_ELEMENTS
