"""`python -m pax_mpmd.schedules show`."""

from __future__ import annotations

import itertools
from pathlib import Path
import runpy
import sys
import xml.etree.ElementTree

import pytest

from pax_mpmd import errors
from pax_mpmd import schedules
from pax_mpmd.schedules import show
from pax_mpmd.schedules.task import Phase


def _run(monkeypatch, *args: str) -> None:
  monkeypatch.setattr(sys, 'argv', ['schedules', 'show', *args])
  runpy.run_module('pax_mpmd.schedules', run_name='__main__')


def test_text_and_picture(monkeypatch, capsys, tmp_path: Path):
  """The grid, the numbers of the simulator, and a picture with a box for each task."""
  path = tmp_path / 'x.svg'
  _run(monkeypatch, 'zb_v', '--stages', '4', '--microbatches', '6', '--svg', str(path))
  out = capsys.readouterr().out
  schedule = schedules.get('zb_v', 4)
  result = schedules.simulate(schedule, 6)
  assert out.startswith(schedules.format_grid(schedule, 6) + '\n')
  assert f'time of a step: {result.makespan:g}\n' in out
  assert f'bubble: {result.bubble_fraction:.1%}\n' in out
  assert 'stages, by actor: 0 3; 1 2\n' in out
  boxes = xml.etree.ElementTree.parse(path).getroot().findall('{*}g')
  assert sorted(box.find('{*}title').text.split(':')[0] for box in boxes) == sorted(
      map(str, result.order)
  )
  # Boxes of a row lie beside each other.
  rows: dict[str, list[tuple[float, float]]] = {}
  for box in boxes:
    rect = box.find('{*}rect')
    start, width = float(rect.get('x')), float(rect.get('width'))
    rows.setdefault(rect.get('y'), []).append((start, start + width))
  assert len(rows) == 2
  for spans in rows.values():
    spans.sort()
    assert all(a[1] <= b[0] + 0.02 for a, b in itertools.pairwise(spans))


def test_a_table_says_its_numbers_itself(monkeypatch, capsys, tmp_path: Path):
  path = tmp_path / 'own.csv'
  path.write_text('0F0,0B0\n1F0,1B0\n')
  _run(monkeypatch, str(path), '--microbatches', '1', '--costs', 'F=2,B=3,1B=5')
  assert 'time of a step: 12\n' in capsys.readouterr().out


def test_costs():
  """Times of phases, and of a stage's phase."""
  assert show.parse_costs('F=1, 12B=2.5') == {Phase.F: 1.0, (12, Phase.B): 2.5}
  for text in ('Q=1', 'F', 'F=x', 'xF=1', '=1'):
    with pytest.raises(errors.ConfigError, match='--costs has'):
      show.parse_costs(text)


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['1f1b'], '--stages is missing'),
        (['1f', '--stages', '4'], "no schedule named '1f'"),
        (['zb_v', '--stages', '3'], 'num_stages'),
        (['1f1b', '--stages', '4', '--costs', '7F=1'], 'a stage of 0 to 3'),
        (['1f1b', '--stages', '4', '--measured', 'nowhere.json'], 'it is no trace'),
        (['1f1b', '--stages', '4', '--microbatches', '0'], 'microbatches'),
    ],
    ids=lambda x: ' '.join(x) if isinstance(x, list) else '',
)
def test_wrong_command_lines(args, message, monkeypatch, capsys):
  """One line that says what is wrong, and the usage."""
  with pytest.raises(SystemExit) as end:
    _run(monkeypatch, *args)
  assert end.value.code == 2
  error = capsys.readouterr().err
  assert message in error and 'Traceback' not in error


def test_other_words(monkeypatch):
  """What isn't `show` is told how it goes."""
  monkeypatch.setattr(sys, 'argv', ['schedules', 'draw'])
  with pytest.raises(SystemExit, match='show --help'):
    runpy.run_module('pax_mpmd.schedules', run_name='__main__')
