"""The delayed sum of a shared weight's gradients.

A weight used by several stages (a tied embedding) has a gradient that is a sum of one part per
use. Summed inside the loop, a weight-sized part would cross between actors for every microbatch.
In: an unstacked step. Out: the same step, in which the loop accumulates one sum per stage, and the
parts are added once, after the loop:

  sum_i (a_i + b_i)  =  sum_i a_i + sum_i b_i

Precondition, checked for every addition taken apart: its result is used for nothing else inside
the loop, so nobody can see the per-microbatch total. Where it doesn't hold the addition stays, the
parts are sent, and a note says so. The split is by stage, not by actor, so that results don't
depend on the placement.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.segments import find_segments
from pax_mpmd.compile.segments import FREE
from pax_mpmd.compile.segments import Segments
from pax_mpmd.compile.trace import loop_of
from pax_mpmd.compile.unstack import UnstackedStep


def delay_shared_sums(step: UnstackedStep, num_stages: int) -> UnstackedStep:
  """Accumulates the gradient parts of different stages apart. See the module's docstring."""
  loop = loop_of(step.jaxpr)
  body = loop.params['jaxpr'].jaxpr
  num_summed = loop.params['num_summed']
  segments = find_segments(body, num_stages)
  producer = {v: e for e in body.eqns for v in e.outvars}
  uses = collections.Counter(v for e in body.eqns for v in e.invars if isinstance(v, jc.Var))
  uses.update(v for v in body.outvars if isinstance(v, jc.Var))

  notes = list(step.notes)
  new_eqns: list[Any] = []  # in the body
  after: list[Any] = []  # in the step, right after the loop
  body_outs: list[Any] = []
  outvars: list[Any] = []
  for v, out in zip(body.outvars[:num_summed], loop.outvars[:num_summed]):
    groups = _by_stage(_terms(v, producer, uses), segments)
    if len(groups) < 2:
      body_outs.append(v)
      outvars.append(out)
      _note_kept_sum(v, producer, uses, segments, notes)
      continue
    parts = []
    for terms in groups:
      total = terms[0]
      for t in terms[1:]:
        total = _add(new_eqns, total, t)
      part = jc.new_var(out.aval)
      body_outs.append(total)
      outvars.append(part)
      parts.append(part)
    total = parts[0]
    for part in parts[1:-1]:
      total = _add(after, total, part)
    after.append(jc.new_eqn([total, parts[-1]], [out], jax.lax.add_p, {}, loop))

  params = dict(loop.params, num_summed=len(outvars))
  new_body = jc.new_jaxpr(
      (), body.invars, [*body_outs, *body.outvars[num_summed:]], [*body.eqns, *new_eqns]
  )
  new_body, _ = jc.dce(new_body, [True] * len(new_body.outvars))
  params['jaxpr'] = jc.ClosedJaxpr(new_body, ())
  new_loop = loop.replace(outvars=[*outvars, *loop.outvars[num_summed:]], params=params)
  eqns: list[Any] = []
  for eqn in step.jaxpr.eqns:
    eqns.extend([new_loop, *after] if eqn is loop else [eqn])
  jaxpr = jc.new_jaxpr(step.jaxpr.constvars, step.jaxpr.invars, step.jaxpr.outvars, eqns)
  return dataclasses.replace(step, jaxpr=jaxpr, notes=tuple(notes))


def _is_sum(eqn: Any | None) -> bool:
  if eqn is None or eqn.primitive.name not in ('add', 'add_any'):
    return False
  shape = eqn.outvars[0].aval.shape
  return all(x.aval.shape == shape for x in eqn.invars)


def _terms(v: Any, producer: dict[Any, Any], uses: collections.Counter) -> list[Any]:
  """The terms of the sum `v`, taken apart as far as the precondition allows, in plain order."""
  eqn = producer.get(v) if isinstance(v, jc.Var) else None
  if not _is_sum(eqn) or uses[v] > 1:
    return [v]
  return [t for x in eqn.invars for t in _terms(x, producer, uses)]


def _by_stage(terms: list[Any], segments: Segments) -> list[list[Any]]:
  """Terms grouped by the stage that makes them, in the order of first appearance."""
  groups: dict[int, list[Any]] = {}
  free: list[Any] = []
  for t in terms:
    segment = segments.of(t)
    if segment == FREE:
      free.append(t)
    else:
      groups.setdefault(segments.stage(segment), []).append(t)
  out = list(groups.values())
  if free:
    out[0:1] = [[*out[0], *free]] if out else [free]
  return out


def _add(eqns: list[Any], x: Any, y: Any) -> Any:
  out = jc.new_var(x.aval)
  eqns.append(jc.new_eqn([x, y], [out], jax.lax.add_p, {}))
  return out


def _note_kept_sum(v, producer, uses, segments: Segments, notes: list[str]) -> None:
  """Notes a sum over stages that stays inside the loop because something else reads it."""
  eqn = producer.get(v) if isinstance(v, jc.Var) else None
  if not _is_sum(eqn) or uses[v] < 2:
    return
  stages = {segments.stage(segments.of(x)) for x in eqn.invars if segments.of(x) != FREE}
  if len(stages) > 1:
    notes.append(
        f'the gradient {v.aval.str_short()} is summed over the stages {sorted(stages)} for every'
        f' microbatch, not once after the loop: it is used inside the loop (sum at'
        f' {jc.source_of(eqn)})'
    )
