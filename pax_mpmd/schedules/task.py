"""The unit of a schedule: one phase of one stage for one microbatch."""

from __future__ import annotations

import dataclasses
import enum
import re

from pax_mpmd import errors

__all__ = ['Phase', 'Task']


class Phase(str, enum.Enum):
  """What a task computes. A stage's backward pass is either B, or I followed by W."""

  F = 'F'  # forward
  B = 'B'  # whole backward
  I = 'I'  # noqa: E741  gradient with respect to the stage's input
  W = 'W'  # gradient with respect to the stage's weights

  def __str__(self) -> str:
    return self.value


_TEXT = re.compile(r'([0-9]{1,9})([FBIW])([0-9]{1,9})')


@dataclasses.dataclass(frozen=True, order=True)
class Task:
  """Phase `phase` of stage `stage` for microbatch `microbatch`; as text '2F0'."""

  stage: int
  phase: Phase
  microbatch: int

  def __str__(self) -> str:
    return f'{self.stage}{self.phase.value}{self.microbatch}'

  def __hash__(self) -> int:
    # Tasks are the keys of every table here; this is several times faster than the generated
    # hash, which calls the enum's own.
    return hash((self.stage, self.phase._value_, self.microbatch))

  @classmethod
  def parse(cls, text: str) -> Task:
    """Reads the text form.

    Args:
      text: stage number, phase letter, microbatch number, e.g. '2F0'.

    Returns:
      The task.

    Raises:
      ScheduleError: the text isn't of that form.
    """
    match = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
      raise errors.ScheduleError(
          f'{errors.shown(text)} is not a task. A task is written stage, phase, microbatch, where '
          'the phase is F (forward), B (backward), I (input gradient) or W (weight gradient): 2F0 '
          'is the forward of stage 2 for microbatch 0.'
      )
    return cls(int(match[1]), Phase(match[2]), int(match[3]))
