"""Schedules by short name, as command-line flags and configs give them."""

from __future__ import annotations

from collections.abc import Mapping
import os

from pax_mpmd import errors
from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.bfs import LoopedBFS
from pax_mpmd.schedules.dualpipe_v import DualPipeV
from pax_mpmd.schedules.gpipe import GPipe
from pax_mpmd.schedules.interleaved import InterleavedOneFOneB
from pax_mpmd.schedules.one_f_one_b import EagerOneFOneB
from pax_mpmd.schedules.one_f_one_b import OneFOneB
from pax_mpmd.schedules.table import FromTable
from pax_mpmd.schedules.zb_h1 import ZeroBubbleH1
from pax_mpmd.schedules.zb_v import ZeroBubbleV

__all__ = ['NAMES', 'get']

NAMES: Mapping[str, type[Schedule]] = {
    'gpipe': GPipe,
    '1f1b': OneFOneB,
    'eager_1f1b': EagerOneFOneB,
    'interleaved_1f1b': InterleavedOneFOneB,
    'bfs': LoopedBFS,
    'zb_h1': ZeroBubbleH1,
    'zb_v': ZeroBubbleV,
    'dualpipe_v': DualPipeV,
}


def get(
    name_or_path: str | os.PathLike, num_stages: int | None = None, num_actors: int | None = None
) -> Schedule:
  """Builds a schedule from its short name or reads it from a CSV file.

  Args:
    name_or_path: a key of `NAMES`, or the path of a table that ends in .csv.
    num_stages: number of stages; may be None for a table, which says itself.
    num_actors: number of actors; None means one for each stage (one for every two in V schedules),
      or what the table says.

  Returns:
    The schedule.

  Raises:
    ConfigError: there is no schedule of that name, or num_stages is missing.
    ScheduleError: the table can't be read, or the numbers don't suit the schedule.
  """
  if not isinstance(name_or_path, str | os.PathLike):
    raise errors.ConfigError(
        f"A schedule's name must be a text such as '1f1b', or the path of a table, but is "
        f'{errors.shown(name_or_path)}.'
    )
  name = os.fspath(name_or_path)
  if name.endswith('.csv'):
    return FromTable(name, num_stages=num_stages, num_actors=num_actors)
  if name not in NAMES:
    raise errors.ConfigError(
        f'There is no schedule named {errors.shown(name)}. Choose one of {", ".join(NAMES)}, or '
        'give the path of a table that ends in .csv.'
    )
  if num_stages is None:
    raise errors.ConfigError(
        f'The schedule {name!r} needs num_stages, the number of stages of the model: '
        f'get({name!r}, num_stages=4), for example.'
    )
  return NAMES[name](num_stages=num_stages, num_actors=num_actors)
