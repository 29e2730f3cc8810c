"""What users are told who make a schedule from the wrong things: class, value, fix, and no more."""

from __future__ import annotations

import pytest

from pax_mpmd import errors
from pax_mpmd import schedules
from tests.messages import assert_readable

LONG = 'q' * 20000
TABLE, CONFIG = errors.ScheduleError, errors.ConfigError


def read(data: bytes):
  """A case: the schedule in a file with these bytes."""

  def make(tmp_path):
    path = tmp_path / 'table.csv'
    path.write_bytes(data)
    return schedules.get(path)

  return make


CASES = {
    'NUL byte': (read(b'0F0,0B0\n1F0,\0,1B0\n'), TABLE, ['table.csv', 'NUL', '0F0,0B0']),
    'not text': (read(b'\xff\xfe\x00'), TABLE, ['table.csv', "can't read", 'utf-8']),
    'long cell': (read(b'0F0,' + LONG.encode()), TABLE, ['actor 0', "'qqq", 'not a task', '2F0']),
    'huge cell': (read(b'0F0,' + LONG.encode() * 10), TABLE, ['table.csv', 'field larger']),
    'huge number': (
        lambda _: schedules.FromTable([['0F0', '9' * 5000 + 'F0']]), TABLE, ['999', 'not a task']
    ),
    'stage left out': (
        lambda _: schedules.validate(schedules.FromTable([['0F0'], ['999999999F0']]), 1),
        TABLE, ['no task of stage 1', 'stage 999999999', 'without gaps'],
    ),
    'no file': (lambda tmp: schedules.get(tmp / 'none.csv'), TABLE, ['none.csv', 'No such file']),
    'folder': (lambda tmp: schedules.FromTable(tmp), TABLE, ['Is a directory']),
    'not a table': (lambda _: schedules.FromTable({LONG: 1}), TABLE, ['path', 'rows', 'qqq']),
    'not a row': (lambda _: schedules.FromTable([['0F0'], 7]), TABLE, ['rows', '7']),
    'not a cell': (lambda _: schedules.FromTable([['0F0', 7]]), TABLE, ['actor 0', '7 is not a']),
    'no name': (lambda _: schedules.get(None, 3), CONFIG, ['None', "'1f1b'"]),
    'wrong name': (lambda _: schedules.get(LONG, 3), CONFIG, ['qqq', 'zb_h1', '.csv']),
    'no stages': (lambda _: schedules.get('1f1b'), CONFIG, ['num_stages=4']),
    'stages as text': (lambda _: schedules.GPipe(LONG), TABLE, ['num_stages', 'whole number']),
    'indivisible': (
        lambda _: schedules.InterleavedOneFOneB(5, 2), TABLE,
        ['num_stages is 5', 'num_actors is 2', '3 x 2 = 6'],
    ),
    'indivisible V': (
        lambda _: schedules.ZeroBubbleV(5, 2), TABLE, ['num_stages is 5', 'num_stages=4']
    ),
    'more actors than stages': (
        lambda _: schedules.GPipe(2, 3), TABLE, ['num_actors is 3', 'num_stages is 2', 'lower it']
    ),
    'costs of nothing': (
        lambda _: schedules.simulate(schedules.GPipe(2), 1, {LONG: 1}), TABLE, ['qqq', 'Phase']
    ),
    'costs as text': (
        lambda _: schedules.simulate(schedules.GPipe(2), 1, {schedules.Phase.F: LONG}), TABLE,
        ['costs[', 'Phase.F', 'finite time', 'qqq'],
    ),
    'costs as a number': (
        lambda _: schedules.simulate(schedules.GPipe(2), 1, 5), TABLE, ['costs', 'dict', '5']
    ),
}


@pytest.mark.parametrize('name', CASES)
def test_message(name, tmp_path):
  """The class, what was got and what is allowed, on a line or two."""
  make, kind, words = CASES[name]
  with pytest.raises(kind) as caught:
    make(tmp_path)
  text = str(caught.value).replace(str(tmp_path), '')
  assert_readable(text)
  assert not [word for word in words if word not in text], text


def test_values_are_shown_on_one_short_line():
  """Whatever is put into a message is cut, also where its repr has many lines."""

  class Many:
    def __repr__(self):
      return 'first\n  second\n' * 100

  assert errors.shown('1f1b') == "'1f1b'" and errors.shown(None) == 'None'
  assert errors.shown(LONG) == f"'{LONG[:80]}'..."
  assert errors.shown(Many()).startswith('first second first') and len(errors.shown(Many())) == 83
