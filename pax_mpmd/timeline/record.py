"""What actors write down while steps run. All times are seconds of one clock."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

Span = tuple[float, float]  # start, end


@dataclasses.dataclass(frozen=True)
class ActorRecord:
  """One step on one actor.

  Attributes:
    began: when it began to handle the step's message.
    ended: when all its results were there.
    spans: for each of `plan.operations` when it began and ended.
    sent: for each receiving actor, when each message was written to the channel, in order.
    received: for each sending actor, when each message was read: from the arrival of its first
      byte on.
    live: bytes of the actor's arrays after each operation, in a step that counts them; counting
      takes time, so such a step's spans say little.
  """

  began: float
  ended: float
  spans: tuple[Span, ...]
  sent: Mapping[int, tuple[Span, ...]]
  received: Mapping[int, tuple[Span, ...]]
  live: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepRecord:
  """One step.

  Attributes:
    step: its number.
    sent: when the driver began to send it to the actors.
    actors: by rank.
  """

  step: int
  sent: float
  actors: tuple[ActorRecord, ...]
