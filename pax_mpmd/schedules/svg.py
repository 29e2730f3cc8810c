"""Timelines as pictures: rows of boxes, in SVG."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from xml.sax import saxutils

__all__ = ['Box', 'COLOURS', 'draw']

# A colour-blind-safe palette (Okabe and Ito, 2008), lightened so that black text can be read on it.
COLOURS = {
    'F': '#8cc5ec',
    'B': '#8fd3b6',
    'I': '#bfe3a8',
    'W': '#f2d08a',
    'prologue': '#d9c2e0',
    'epilogue': '#e0b3c8',
    'send': '#bbbbbb',
    'recv': '#bbbbbb',
}
_NAMES = {
    'F': 'forward', 'B': 'backward', 'I': 'input gradient', 'W': 'weight gradient',
    'send': 'message', 'recv': 'message',
}
_ROW, _GAP, _LEFT, _TOP = 26, 6, 96, 30
_WIDTH = 1200
_CHARACTER = 6.2  # pixels of a character of the labels


@dataclasses.dataclass(frozen=True)
class Box:
  """Something that takes time in a row.

  Attributes:
    row: index into the picture's rows.
    start: when it begins, in the unit of the picture.
    end: when it ends.
    kind: a key of COLOURS.
    label: written into the box where there is room, and shown by browsers on hovering.
  """

  row: int
  start: float
  end: float
  kind: str
  label: str


def draw(rows: Sequence[str], boxes: Sequence[Box], title: str, unit: str = '') -> str:
  """Draws a timeline.

  Args:
    rows: names of the rows, the first on top.
    boxes: what to draw; time starts at 0.
    title: a line above the picture.
    unit: of the boxes' times, for the axis.

  Returns:
    The SVG document.
  """
  span = max((box.end for box in boxes), default=0.0) or 1.0
  scale = _WIDTH / span
  height = _TOP + len(rows) * (_ROW + _GAP) + 48
  out = [
      f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
      'font-family="sans-serif" font-size="11">',
      '<rect width="100%" height="100%" fill="white"/>',
      f'<text x="8" y="18" font-size="13">{_escaped(title)}</text>',
  ]
  for i, name in enumerate(rows):
    y = _TOP + i * (_ROW + _GAP)
    out.append(f'<text x="8" y="{y + 17}">{_escaped(name)}</text>')
    out.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW}" fill="#f4f4f4"/>')
  for box in boxes:
    x, y = _LEFT + box.start * scale, _TOP + box.row * (_ROW + _GAP)
    width = max((box.end - box.start) * scale, 0.5)
    tip = f'{box.label}: {box.start:.4g} to {box.end:.4g} {unit}'.rstrip()
    out.append(
        f'<g><title>{_escaped(tip)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
        f'height="{_ROW}" fill="{COLOURS[box.kind]}" stroke="#555" stroke-width="0.4"/>'
    )
    if len(box.label) * _CHARACTER < width - 2:
      out.append(
          f'<text x="{x + width / 2:.2f}" y="{y + 17}" text-anchor="middle">'
          f'{_escaped(box.label)}</text>'
      )
    out.append('</g>')
  out += _axis(span, scale, unit, _TOP + len(rows) * (_ROW + _GAP) + 4)
  out += _legend([box.kind for box in boxes], height - 12)
  return '\n'.join([*out, '</svg>', ''])


def _axis(span: float, scale: float, unit: str, y: float) -> list[str]:
  step = _round_step(span / 8)
  out = []
  at = 0.0
  while at <= span * 1.0001:
    x = _LEFT + at * scale
    out.append(f'<line x1="{x:.2f}" y1="{y - 4}" x2="{x:.2f}" y2="{y}" stroke="#555"/>')
    out.append(f'<text x="{x:.2f}" y="{y + 11}" text-anchor="middle">{at:g}</text>')
    at = round(at + step, 10)
  out.append(f'<text x="8" y="{y + 11}">{_escaped("time" + (f" ({unit})" if unit else ""))}</text>')
  return out


def _round_step(least: float) -> float:
  """The smallest of 1, 2, 5 times a power of ten that is at least this."""
  power = 1.0
  while power > least:
    power /= 10
  while power * 10 <= least:
    power *= 10
  return next(power * k for k in (1, 2, 5, 10) if power * k >= least * 0.999)


def _legend(kinds: Sequence[str], y: float) -> list[str]:
  out, x, seen = [], float(_LEFT), set()
  for kind in (k for k in COLOURS if k in kinds):
    name = _NAMES.get(kind, kind)
    if name in seen:
      continue
    seen.add(name)
    out.append(f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{COLOURS[kind]}"/>')
    out.append(f'<text x="{x + 16}" y="{y}">{name}</text>')
    x += 34 + len(name) * _CHARACTER
  return out


def _escaped(text: str) -> str:
  return saxutils.escape(text)
