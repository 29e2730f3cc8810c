"""One pass through the stages, where the user's code asks for the same one several times.

`return jax.grad(loss)(params, mb), loss(params, mb)` runs the stages twice, and `jax.jit` computes
once what is computed twice alike. A schedule has one forward task per stage and microbatch, so the
compiler has to see that there is one.
In: a traced step. Out: the same, with equal equations of the loop's body merged, if its marks are
more than the stages and merging makes them fit. Else the step as it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.trace import loop_of
from pax_mpmd.compile.trace import TracedStep
from pax_mpmd.errors import PartitionError


def merge_repeats(step: TracedStep, num_stages: int) -> TracedStep:
  """Merges repeated passes through the stages. See the module's docstring.

  Raises:
    PartitionError: the stages are run several times for each microbatch, and these passes aren't
      the same equations.
  """
  loop = loop_of(step.jaxpr)
  body = loop.params['jaxpr'].jaxpr
  if len(_forward_marks(body)) <= num_stages:
    return step
  merged = _merge(body)
  if len(_forward_marks(merged)) > num_stages:
    _check_one_pass(merged, num_stages)
    return step
  params = dict(loop.params, jaxpr=jc.ClosedJaxpr(merged, ()))
  eqns = [e.replace(params=params) if e is loop else e for e in step.jaxpr.eqns]
  jaxpr = jc.new_jaxpr(step.jaxpr.constvars, step.jaxpr.invars, step.jaxpr.outvars, eqns)
  return dataclasses.replace(step, jaxpr=jaxpr)


def _is_mark(eqn: Any) -> bool:
  return eqn.primitive.name == 'pipeline_yield'


def _forward_marks(body: Any) -> list[Any]:
  return [e for e in body.eqns if _is_mark(e) and e.params['direction'] == 'forward']


def _check_one_pass(body: Any, num_stages: int) -> None:
  """Refuses a body in which marks stand side by side in several passes of the right length."""
  depth: dict[Any, int] = {}
  for eqn in body.eqns:
    forward = _is_mark(eqn) and eqn.params['direction'] == 'forward'
    before = max((depth.get(v, 0) for v in eqn.invars if isinstance(v, jc.Var)), default=0)
    depth.update((v, before + forward) for v in eqn.outvars)
  marks = _forward_marks(body)
  longest = max(depth[v] for e in marks for v in e.outvars)
  passes, rest = divmod(len(marks), longest)
  if longest not in (num_stages - 1, num_stages) or rest or passes < 2:
    return
  where = ''.join(f'\n  {line}' for line in dict.fromkeys(map(jc.source_of, marks[:4])))
  raise PartitionError(
      f'Each microbatch runs through the {num_stages} stages {passes} times; a schedule runs each'
      ' stage once. Call the loss function once: jax.value_and_grad(loss,'
      ' has_aux=True) gives its value and whatever else it returns beside the gradient. To apply'
      ' the stages to several inputs, concatenate these along the batch axis. The'
      f' {len(marks)} pipeline_yield calls:{where}'
  )


def _merge(body: Any) -> Any:
  """`body` with each equation left out that computes what an earlier one has."""
  env: dict[Any, Any] = {}
  known: dict[Any, list[Any]] = {}
  ids: dict[int, int] = {}  # of a mark left out -> of the one that stands for it
  eqns: list[Any] = []

  def read(atom: Any) -> Any:
    return atom if isinstance(atom, jc.Literal) else env.get(atom, atom)

  for eqn in body.eqns:
    eqn = eqn.replace(invars=[read(v) for v in eqn.invars])
    if _is_mark(eqn) and eqn.params['id'] in ids:
      eqn = eqn.replace(params=dict(eqn.params, id=ids[eqn.params['id']]))
    same = known.setdefault((eqn.primitive.name, *map(_key, eqn.invars)), [])
    earlier = next((e for e in same if _are_equal(e, eqn)), None)
    if earlier is None or eqn.effects:
      same.append(eqn)
      eqns.append(eqn)
      continue
    env.update(zip(eqn.outvars, earlier.outvars))
    if _is_mark(eqn):
      ids[eqn.params['id']] = earlier.params['id']
  outvars = [read(v) for v in body.outvars]
  return jc.new_jaxpr((), body.invars, outvars, eqns)


def _key(atom: Any) -> Any:
  if isinstance(atom, jc.Literal):
    value = np.asarray(atom.val)
    return str(value.dtype), value.shape, value.tobytes()
  return atom


def _are_equal(x: Any, y: Any) -> bool:
  """Whether two equations of one primitive on the same operands compute the same."""
  if any(jc.is_drop(a) and not jc.is_drop(b) for a, b in zip(x.outvars, y.outvars)):
    return False
  if x.params.keys() != y.params.keys():
    return False
  ignored = {'id', 'name'} if _is_mark(x) else set()
  return all(_same_param(v, y.params[k]) for k, v in x.params.items() if k not in ignored)


def _same_param(a: Any, b: Any) -> bool:
  if a is b:
    return True
  if type(a) is not type(b):
    return False
  if isinstance(a, (tuple, list)):
    return len(a) == len(b) and all(map(_same_param, a, b))
  if isinstance(a, jc.ClosedJaxpr):
    same_consts = len(a.consts) == len(b.consts) and all(
        x is y for x, y in zip(a.consts, b.consts)
    )
    return same_consts and str(a.jaxpr) == str(b.jaxpr)
  if isinstance(a, jc.Jaxpr):
    return str(a) == str(b)
  try:
    return bool(a == b)
  except (TypeError, ValueError):
    return False
