"""Lays out texts as a grid: one row per step, one column per actor."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ['IDLE', 'format_columns']

IDLE = '.'
_LEFT_OUT = '...'


def format_columns(
    columns: Sequence[Sequence[str]],
    marks: Collection[tuple[int, int]] = (),
    *,
    header: str = 'step',
    max_rows: int | None = None,
    max_actors: int | None = None,
) -> str:
  """Lays out texts, one column per actor.

  Args:
    columns: for each actor, the texts of its column.
    marks: (actor, row) pairs to put between > and <.
    header: what a row is.
    max_rows: the most rows to print, the header not counted; rows near marks are kept, else the
      first and the last ones. None prints all.
    max_actors: the most columns to print; marked ones and their neighbours are kept. None prints
      all.

  Returns:
    The lines, without a newline at the end.
  """
  marks = set(marks)
  num_rows = max(map(len, columns), default=0)
  rows = _keep(num_rows, {row for _, row in marks}, max_rows)
  actors = _keep(len(columns), {actor for actor, _ in marks}, max_actors)
  table = [[header] + [_LEFT_OUT if a is None else f'actor {a}' for a in actors]]
  for row in rows:
    if row is None:
      table.append([_LEFT_OUT])
      continue
    line = [str(row)]
    for actor in actors:
      if actor is None:
        line.append('')
        continue
      text = columns[actor][row] if row < len(columns[actor]) else IDLE
      line.append(f'>{text}<' if (actor, row) in marks else text)
    table.append(line)
  widths = [max(len(line[i]) for line in table if i < len(line)) for i in range(len(table[0]))]
  return '\n'.join(
      '  '.join([line[0].rjust(widths[0]), *map(str.ljust, line[1:], widths[1:])]).rstrip()
      for line in table
  )


def _keep(count: int, wanted: set[int], limit: int | None) -> list[int | None]:
  """Which of `count` lines to show: those around `wanted`; None stands for a gap."""
  if limit is None or count <= limit:
    return list(range(count))
  wanted = {i for i in wanted if i < count}
  centers = (sorted(wanted) or [0, count - 1])[:limit]
  kept = set(centers)
  for distance in range(1, count):
    if len(kept) >= limit:
      break
    for center in centers:
      for near in (center - distance, center + distance):
        if 0 <= near < count and len(kept) < limit:
          kept.add(near)
  shown: list[int | None] = []
  for i in sorted(kept):
    if i and i - 1 not in kept:
      shown.append(None)
    shown.append(i)
  if shown[-1] != count - 1:
    shown.append(None)
  return shown
