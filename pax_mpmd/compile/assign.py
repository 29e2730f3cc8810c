"""Which task each equation of the loop's body runs in.

In: a body, its segments (segments.py), and the stages whose backward pass is split. Out: an
`Assignment`: the equations, some of them taken apart (backward_split.py), each with its slot.
Holds: an equation's operands are made in its own slot or an earlier one; what another stage reads
of a split stage's backward pass is made in I.

Slots number the tasks of one microbatch in the order in which they can run, two to a segment:

  slot:   0    2   ...  2S-2    2S        2S+1     ...  4S-2    4S-1
  task:  F_0  F_1  ...  F_S-1  B|I_S-1    W_S-1    ...  B|I_0   W_0

Where an equation goes:
  * loop-invariant (it depends on no microbatch): no slot; it runs in front of the loop;
  * derived from the microbatch's inputs alone, and light: no slot; each task that uses it repeats
    it, so that masks and positions are never sent nor kept;
  * what the next stages or the stacked results need: the stage's forward task, as early as its
    operands allow;
  * what only the backward pass needs: the stage's backward task. Is that split, then I gets what
    other stages depend on, and W the rest: also when that is everything, as in a first stage whose
    input has no gradient;
  * what only later stages use, and can make of what they get anyway (keys and values of an
    encoder's output): the first of these stages;
  * the rest: the first task in which all operands exist.
"""

from __future__ import annotations

from collections.abc import Collection
import dataclasses
import math
from typing import Any

import numpy as np

from pax_mpmd.compile import jax_compat as jc
from pax_mpmd.compile.backward_split import split
from pax_mpmd.compile.primitives import HEAVY
from pax_mpmd.compile.segments import FREE
from pax_mpmd.compile.segments import Segments

# A constant up to this size may be an operand of a repeated equation, whatever the result's size.
SMALL_BYTES = 4096


def nbytes(aval: Any) -> int:
  """The memory of a value."""
  stored = jc.physical_aval(aval)
  return math.prod(stored.shape) * np.dtype(stored.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Assignment:
  """The equations of a loop's body with their slots.

  Attributes:
    segments: the segments that the slots divide.
    split_stages: the stages that have I and W in place of B.
    eqns: the equations. What was taken apart stands as two equations.
    slots: per equation its slot; None for marks and for what runs outside the loop or repeatedly.
    alias: a mark's result -> the value that it marks.
  """

  segments: Segments
  split_stages: frozenset[int]
  eqns: tuple[Any, ...]
  slots: tuple[int | None, ...]
  alias: dict[Any, Any]

  def stage(self, slot: int) -> int:
    """The stage that a slot belongs to."""
    return self.segments.stage(slot // 2)

  def phase(self, slot: int) -> str:
    """The letter of the slot's phase."""
    phase = self.segments.phase(slot // 2)
    if phase == 'F' or self.stage(slot) not in self.split_stages:
      return phase
    return 'W' if slot % 2 else 'I'

  def resolve(self, atom: Any) -> Any:
    """The atom that `atom` stands for."""
    return _resolve(self.alias, atom)


def assign(
    body: Any,
    segments: Segments,
    invariant: set[Any],
    num_consts: int,
    num_summed: int,
    split_stages: Collection[int],
) -> Assignment:
  """Gives every equation of `body` its slot. See the module's docstring.

  Args:
    body: the jaxpr of one microbatch.
    segments: its segments.
    invariant: its loop-invariant variables.
    num_consts: how many of its arguments are the same for every microbatch.
    num_summed: how many of its results are summed.
    split_stages: stages whose backward pass is split into I and W.
  """
  alias = _aliases(body, segments)
  light = _light(body, segments, alias, invariant, num_consts)
  needed = _needed_forward(body, segments, alias, num_summed)
  eqns: list[Any] = []
  slots: list[int | None] = []
  end = 4 * segments.num_stages  # of the microbatch: its results are read there
  uses: dict[Any, set[int]] = {}
  producer = {v: e for e in body.eqns for v in e.outvars}
  everywhere = invariant | light

  def use(atom: Any, slot: int) -> None:
    atom = _resolve(alias, atom)
    if not isinstance(atom, jc.Literal):
      uses.setdefault(atom, set()).add(slot)

  def bytes_to_make(eqn: Any, slot: int, depth: int = 6) -> int:
    """How much more than it reads so far `slot` would have to get, to run `eqn` itself."""
    total = 0
    for x in eqn.invars:
      x = _resolve(alias, x)
      if isinstance(x, jc.Literal) or x in everywhere or slot in uses.get(x, ()):
        continue
      size = nbytes(x.aval)
      if depth and x in producer:
        size = min(size, bytes_to_make(producer[x], slot, depth - 1))
      total += size
    return total

  def belongs_later(eqn: Any, segment: int, used: list[set[int]], first_use: int) -> bool:
    """Whether another stage is the first to use `eqn`, and gets fewer bytes if it runs it."""
    if segment >= segments.num_stages or first_use == end or first_use % 2:
      return False  # W hands nothing to other stages
    if segments.stage(first_use // 2) == segment:
      return False
    sent = sum(nbytes(v.aval) for v, slots in zip(eqn.outvars, used) if slots)
    return bytes_to_make(eqn, first_use) < sent

  def put(eqn: Any, slot: int) -> None:
    eqns.append(eqn)
    slots.append(slot)
    for x in eqn.invars:
      use(x, slot)

  for v in body.outvars:
    use(v, end)
  for i in reversed(range(len(body.eqns))):
    eqn = body.eqns[i]
    if i in segments.marks:
      direction, boundary = segments.marks[i]
      last = segments.backward(boundary + 1) if direction == 'backward' else boundary
      for x in eqn.invars:
        use(x, 2 * last)  # it must exist when the stage before the mark ends
    if i in segments.marks or eqn.outvars[0] in invariant or eqn.outvars[0] in light:
      eqns.append(eqn)
      slots.append(None)
      continue
    used = [uses.get(v, set()) for v in eqn.outvars]
    segment = _segment(eqn, segments, any(v in needed for v in eqn.outvars), used)
    first_use = min((slot for slots in used for slot in slots), default=end)
    if belongs_later(eqn, segment, used, first_use):
      put(eqn, first_use)
      continue
    if segment < segments.num_stages or segments.stage(segment) not in split_stages:
      put(eqn, 2 * segment)
      continue
    in_w = 2 * segment + 1
    early = [bool(u - {in_w, end}) for u in used]
    parts = None
    if any(early) and not all(e or not u for e, u in zip(early, used)):
      parts = split(eqn, early)
    if parts is None:
      put(eqn, 2 * segment if any(early) else in_w)
    else:
      put(parts[1], in_w)
      put(parts[0], 2 * segment)
  return Assignment(
      segments=segments,
      split_stages=frozenset(split_stages),
      eqns=tuple(reversed(eqns)),
      slots=tuple(reversed(slots)),
      alias=alias,
  )


def _segment(eqn: Any, segments: Segments, needed_forward: bool, used: list[set[int]]) -> int:
  """The segment of an equation whose results are used in the slots `used`."""
  num_stages = segments.num_stages
  last = 2 * num_stages - 1 if segments.has_backward else num_stages - 1
  first_use = min([last, *(slot // 2 for slots in used for slot in slots)])
  earliest = max((segments.of(x) for x in eqn.invars), default=FREE)
  if needed_forward or not segments.has_backward:
    return earliest if earliest != FREE else min(first_use, num_stages - 1)
  if earliest == FREE:
    return first_use
  if earliest < num_stages and first_use >= segments.backward(earliest):
    return segments.backward(earliest)
  return earliest


def _aliases(body: Any, segments: Segments) -> dict[Any, Any]:
  """Marks are identities: each of their results stands for its operand."""
  alias: dict[Any, Any] = {}
  for i in sorted(segments.marks):
    eqn = body.eqns[i]
    for v, x in zip(eqn.outvars, eqn.invars):
      alias[v] = _resolve(alias, x)
  return alias


def _resolve(alias: dict[Any, Any], atom: Any) -> Any:
  """What `atom` stands for; a constant, where one was passed through a mark."""
  return atom if isinstance(atom, jc.Literal) else alias.get(atom, atom)


def _light(
    body: Any, segments: Segments, alias: dict[Any, Any], invariant: set[Any], num_consts: int
) -> set[Any]:
  """Variables to be recomputed, from the microbatch's inputs, wherever they are used."""
  light = set(body.invars[num_consts:])
  for i, eqn in enumerate(body.eqns):
    if eqn.outvars[0] in invariant or eqn.effects or i in segments.marks:
      continue
    if eqn.primitive.name in HEAVY:
      continue
    budget = max(sum(nbytes(v.aval) for v in eqn.outvars), SMALL_BYTES)
    fits = True
    for x in eqn.invars:
      x = _resolve(alias, x)
      if not isinstance(x, jc.Literal) and x not in light:
        fits &= x in invariant and nbytes(x.aval) <= budget
    if fits and all(segments.of(x) < segments.num_stages for x in eqn.invars):
      light.update(eqn.outvars)
  return light


def _needed_forward(
    body: Any, segments: Segments, alias: dict[Any, Any], num_summed: int
) -> set[Any]:
  """Variables that the forward marks and the stacked results depend on."""
  needed: set[Any] = set()

  def need(atom: Any) -> None:
    atom = _resolve(alias, atom)
    if not isinstance(atom, jc.Literal) and segments.of(atom) < segments.num_stages:
      needed.add(atom)

  for v in body.outvars[num_summed:]:
    need(v)
  for i in reversed(range(len(body.eqns))):
    eqn = body.eqns[i]
    if i in segments.marks:
      if segments.marks[i][0] != 'backward':
        for x in eqn.invars:
          need(x)
    elif any(v in needed for v in eqn.outvars):
      for x in eqn.invars:
        need(x)
  return needed
