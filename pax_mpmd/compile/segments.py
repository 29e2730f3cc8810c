"""Where in the pipeline each value of the loop's body can first exist.

The body's equations fall into 2S segments in the order of execution of one microbatch:

  segment:   0    1   ...  S-1     S     ...  2S-1
  task:     F_0  F_1  ... F_S-1  B_S-1  ...  B_0

A forward mark k ends F_k, so its results exist from segment k+1 on; the backward mark of boundary
k starts B_k, so its results exist from segment 2S-1-k on. Everything else exists from the latest
segment of its operands on. A value that depends on no mark has the segment FREE.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.errors import PartitionError

FREE = -1


@dataclasses.dataclass(frozen=True)
class Segments:
  """The earliest segments of a loop body.

  Attributes:
    num_stages: S.
    earliest: per variable its earliest segment; FREE for what depends on no mark.
    marks: per index of a mark's equation: (direction, boundary).
    has_backward: whether a backward mark is there. Without one (no gradient is taken, or S = 1)
      everything runs in the forward tasks.
  """

  num_stages: int
  earliest: dict[Any, int]
  marks: dict[int, tuple[str, int]]
  has_backward: bool

  def of(self, atom: Any) -> int:
    return FREE if isinstance(atom, jc.Literal) else self.earliest.get(atom, FREE)

  def stage(self, segment: int) -> int:
    """The stage that a segment belongs to."""
    return segment if segment < self.num_stages else 2 * self.num_stages - 1 - segment

  def phase(self, segment: int) -> str:
    return 'F' if segment < self.num_stages else 'B'

  def backward(self, stage: int) -> int:
    """The segment of a stage's backward task."""
    return 2 * self.num_stages - 1 - stage


def find_segments(body: Any, num_stages: int) -> Segments:
  """Numbers the marks of `body` and finds every variable's earliest segment.

  Raises:
    PartitionError: the number of `pipeline_yield` calls doesn't fit `num_stages`.
  """
  marks, has_backward = _number_marks(body, num_stages)
  earliest: dict[Any, int] = {}
  for i, eqn in enumerate(body.eqns):
    segment = FREE
    for v in eqn.invars:
      if not isinstance(v, jc.Literal):
        segment = max(segment, earliest.get(v, FREE))
    if i in marks:
      direction, boundary = marks[i]
      start = 2 * num_stages - 1 - boundary if direction == 'backward' else boundary + 1
      segment = max(segment, start)
      if not has_backward:
        segment = min(segment, num_stages - 1)
    for v in eqn.outvars:
      earliest[v] = segment
  return Segments(num_stages, earliest, marks, has_backward)


def _number_marks(body: Any, num_stages: int) -> tuple[dict[int, tuple[str, int]], bool]:
  forward: list[tuple[int, Any]] = []
  backward: list[tuple[int, Any]] = []
  tangent: list[tuple[int, Any]] = []
  kinds = {'forward': forward, 'backward': backward, 'tangent': tangent}
  for i, eqn in enumerate(body.eqns):
    if eqn.primitive.name == 'pipeline_yield':
      kinds[eqn.params['direction']].append((i, eqn))
  if len(forward) not in (num_stages - 1, num_stages):
    lines = collections.Counter(
        jc.source_of(e) + (f' {e.params["name"]!r}' if e.params['name'] else '')
        for _, e in forward
    )
    where = ''.join(
        f'\n  {line}' + (f', {n} times' if n > 1 else '') for line, n in list(lines.items())[:6]
    )
    raise PartitionError(
        f'The schedule has num_stages={num_stages}, so the loss function must call pipeline_yield'
        f' {num_stages - 1} times (or {num_stages}, with one after the last stage); the traced'
        f' step has {len(forward)} calls that its results depend on'
        + (f':{where}' if where else '.')
        + f'\nAdd or remove calls, or choose a schedule with num_stages={len(forward) + 1}.'
    )
  marks: dict[int, tuple[str, int]] = {}
  # One call traced once may be run several times (a jitted stage function): its forward marks
  # share an id. The backward pass meets them in reverse order.
  open_calls: dict[int, list[int]] = {}
  for k, (i, eqn) in enumerate(forward):
    marks[i] = ('forward', k)
    open_calls.setdefault(eqn.params['id'], []).append(k)
  seen: dict[int, int] = {}
  for i, eqn in tangent:
    calls = open_calls[eqn.params['id']]
    n = seen.get(eqn.params['id'], 0)
    seen[eqn.params['id']] = n + 1
    marks[i] = ('tangent', calls[min(n, len(calls) - 1)])
  remaining = {key: list(calls) for key, calls in open_calls.items()}
  for i, eqn in backward:
    calls = remaining.get(eqn.params['id'])
    if not calls:
      raise PartitionError(
          'The stages are differentiated more than once: more backward passes than forward ones go'
          f' through the pipeline_yield at {jc.source_of(eqn)}. A schedule has one backward pass'
          ' for each microbatch. Add up the losses before you differentiate, and take no second'
          ' derivatives through the stages.'
      )
    marks[i] = ('backward', calls.pop())
  return marks, bool(backward)
