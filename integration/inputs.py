"""Made-up inputs that need no files, and when to stop."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from praxis import base_hyperparams
from praxis import base_input
from praxis import py_utils

__all__ = ['VOCABULARY', 'Prompts', 'Rows', 'StopsAfter']

VOCABULARY = 64


class Rows(base_input.BaseInput):
  """Rows of tokens that repeat themselves, with ragged ends; its position can be saved.

  Attributes:
    length: tokens in a row.
    first: number of the first batch.
  """

  length: int = 16
  first: int = 0

  def __post_init__(self):
    super().__post_init__()
    self._position = self.first

  def get_next(self) -> py_utils.NestedMap:
    rng = np.random.RandomState(self._position)
    self._position += 1
    shape = (self.batch_size, self.length)
    start = rng.randint(1, VOCABULARY, size=(self.batch_size, 1))
    tokens = 1 + (start + np.arange(self.length + 1)) % (VOCABULARY - 1)
    end = rng.randint(self.length // 2, self.length + 1, size=(self.batch_size, 1))
    padded = np.arange(self.length) >= end
    return py_utils.NestedMap(
        ids=tokens[:, :-1].astype(np.int32),
        labels=tokens[:, 1:].astype(np.int32),
        paddings=padded.astype(np.float32),
        weights=(~padded).astype(np.float32),
        segment_ids=(~padded).astype(np.int32),
        segment_pos=np.broadcast_to(np.arange(self.length), shape).astype(np.int32),
    )

  def reset(self) -> None:
    super().reset()
    self._position = self.first

  def _get_state_internal(self) -> bytes:
    return str(self._position).encode()

  def _set_state_internal(self, state: bytes) -> None:
    self._position = int(state)


class Prompts(base_input.BaseInput):
  """One batch of the beginnings of rows, of different lengths, to go on from."""

  length: int = 16

  def __post_init__(self):
    super().__post_init__()
    self._done = False

  def get_next(self) -> py_utils.NestedMap:
    if self._done:
      raise StopIteration
    self._done = True
    shape = (self.batch_size, self.length)
    lengths = 4 + 3 * np.arange(self.batch_size)
    padded = np.arange(self.length) >= lengths[:, None]
    ids = np.random.RandomState(0).randint(40, 120, size=shape)
    return py_utils.NestedMap(
        ids=np.where(padded, 0, ids).astype(np.int32),
        paddings=padded.astype(np.float32),
        weights=(~padded).astype(np.float32),
        prefix_lengths=lengths.astype(np.int32),
    )

  def reset(self) -> None:
    super().reset()
    self._done = False

  def ids_to_strings(self, ids: Any, lengths: Any, key: str | None = None) -> list[str]:
    del key
    return [' '.join(map(str, row[:n])) for row, n in zip(ids, lengths)]


class StopsAfter(base_hyperparams.FiddleBaseParameterizable):
  """Ends training after a step, and writes down what it is asked.

  Attributes:
    step: the step.
  """

  step: int = 0

  def __call__(
      self, metrics: Any, running_mode: Any, step: int, is_last: bool, checkpoint_path: Any
  ) -> bool:
    # How fast it was isn't the same twice.
    numbers = {k: float(v) for k, v in metrics.items() if 'steps_per_sec' not in k}
    asked = dict(step=step, mode=str(running_mode), is_last=is_last, metrics=numbers)
    with (checkpoint_path.parent / 'asked.jsonl').open('a') as f:
      f.write(json.dumps(asked) + '\n')
    return step >= self.step
