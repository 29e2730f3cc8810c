"""Schedules from tables, and by name."""

from __future__ import annotations

import pickle

import fiddle as fdl
import pytest

from pax_mpmd import errors
from pax_mpmd import schedules
from pax_mpmd.schedules import format_grid
from pax_mpmd.schedules import FromTable
from pax_mpmd.schedules import get
from pax_mpmd.schedules import GPipe
from pax_mpmd.schedules import InterleavedOneFOneB
from pax_mpmd.schedules import OneFOneB
from pax_mpmd.schedules import Task
from pax_mpmd.schedules import to_csv
from pax_mpmd.schedules import validate


@pytest.mark.parametrize(
    'schedule', [get(name, 6, 3) for name in schedules.NAMES], ids=list(schedules.NAMES)
)
def test_csv_and_grid_round_trip(schedule, tmp_path):
  """What is written as CSV or as a grid reads back as the same schedule."""
  path = tmp_path / 'schedule.csv'
  path.write_text(to_csv(schedule, 5))
  lists = schedule.tasks(5)
  texts = [[str(task) for task in tasks] for tasks in lists]
  text = ''.join(' '.join(row) + '\n' for row in texts)
  grid = format_grid(schedule, 5)
  for table in (str(path), path, to_csv(schedule, 5), grid, text, texts, lists):
    read = FromTable(table)
    assert read.tasks(5) == schedule.tasks(5)
    assert read.placement() == schedule.placement()
    assert (read.num_stages, read.num_actors) == (schedule.num_stages, schedule.num_actors)
    assert to_csv(read, 5) == path.read_text() and format_grid(read, 5) == grid


def test_rows_with_blanks():
  """Blank cells are idle steps; cells may be tasks."""
  table = FromTable([['0F0', '', '.', None, '0B0'], [None, Task.parse('1F0'), ' 1B0 ', '-']])
  assert [' '.join(map(str, tasks)) for tasks in table.tasks(1)] == ['0F0 0B0', '1F0 1B0']
  validate(table, 1)


def test_torch_like_csv():
  """One row per rank, cells separated by commas, idle steps empty."""
  text = '0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n'
  assert FromTable(text).tasks(2) == OneFOneB(2).tasks(2)


def test_rows_can_be_steps():
  """Without a header, rows are steps if one says so; short rows end in idle steps."""
  text = '0F0\n0F1 1F0\n. 1B0\n0B0 1F1\n. 1B1\n0B1\n'
  assert FromTable(text, rows_are='steps').tasks(2) == OneFOneB(2).tasks(2)


def test_fiddle_and_pickle(tmp_path):
  """A table is configurable, and once read needs its file no more."""
  path = tmp_path / 's.csv'
  path.write_text(to_csv(OneFOneB(2), 3))
  built = fdl.build(fdl.Config(FromTable, table=str(path)))
  path.unlink()
  copy = pickle.loads(pickle.dumps(built))
  assert copy == built and copy.tasks(3) == OneFOneB(2).tasks(3)
  assert hash(copy) == hash(FromTable(to_csv(OneFOneB(2), 3)))


@pytest.mark.parametrize(
    'make, words',
    [
        (lambda: FromTable('missing.csv'), ['missing.csv', 'No such file']),
        (lambda: FromTable('0F0 0B0\n1F0 1Z0\n'), ['actor 1', "'1Z0'"]),
        (lambda: FromTable([]), ['no task']),
        (lambda: FromTable([['0F0'], ['']]), ['no task for actor 1']),
        (lambda: FromTable('0F0'), ['0F0', "can't read"]),
        (lambda: FromTable(['0F0']), ['rows of cells']),
        (lambda: FromTable(7), ['rows of cells', '7']),
        (lambda: FromTable([['0F0']], rows_are='columns'), ['rows_are', 'columns']),
        (lambda: FromTable([['0F0']], num_stages=2), ['num_stages is 2', 'has 1 stages']),
        (lambda: FromTable([['0F0']], num_actors=3), ['num_actors is 3', 'has 1 actors']),
        (lambda: FromTable([['0F0'], ['0B0']]).placement(), ['num_actors is 2', 'num_stages']),
        (lambda: FromTable([['0F0', '2F0']]).placement(), ['no task of stage 1']),
        (lambda: FromTable([['0F0', '0B0']]).tasks(2), ['made for 1', 'has 2']),
    ],
)
def test_wrong_tables(make, words):
  """A table that can't be read or used is refused with the place or the numbers."""
  with pytest.raises(errors.ScheduleError) as e:
    make()
  for word in words:
    assert word in str(e.value)


@pytest.mark.parametrize(
    'table, words',
    [
        ('0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1 0B1\n', ['0B1', 'actor 1', 'stage 0 on actor 0']),
        ('0F0 0F1 0B0\n1F0 1B0 1F1 1B1 0B1\n', ['0B1', 'actor 1', 'stage 0 on actor 0']),
        ('0F0 0F1 0B0 0B1 0B1\n1F0 1B0 1F1 1B1\n', ['0B1 stands twice']),
        ('0F0 0F1 0B0 0B1\n1F0 1B0 1F1\n', ['never runs 1B1', '>1F1<']),
        ('0F0 0F1 0B0 0B1\n1F0 1B0 1B1 1F1\n', ['1B1 (actor 1) needs 1F1', '>1B1<']),
    ],
)
def test_faults_in_a_table_are_marked(table, words):
  """A misplaced, doubled, missing or out-of-order task is marked in the grid."""
  with pytest.raises(errors.ScheduleError) as e:
    validate(FromTable(table), 2)
  for word in (*words, 'place  actor 0', '<'):
    assert word in str(e.value)


def test_get_by_name():
  """Every name builds its class."""
  assert get('gpipe', 4) == GPipe(4)
  assert get('1f1b', 4, 2) == OneFOneB(4, 2)
  assert get('interleaved_1f1b', num_stages=8, num_actors=4) == InterleavedOneFOneB(8, 4)
  assert get('zb_v', 8) == get('zb_v', 8, 4)
  for name in schedules.NAMES:
    validate(get(name, 4, 2), 3)


def test_get_by_path(tmp_path):
  """A path that ends in .csv is a table, whose numbers must be those asked for."""
  path = tmp_path / 's.csv'
  path.write_text(to_csv(GPipe(3), 2))
  assert get(str(path)) == get(path, 3, 3) == FromTable(path)
  with pytest.raises(errors.ScheduleError, match='num_stages is 4'):
    get(path, 4)


def test_unknown_names_list_the_choices():
  """An unknown name is refused with all the names there are."""
  with pytest.raises(errors.ConfigError, match=r"'2f2b'.*\.csv") as e:
    get('2f2b', 4)
  assert (
      'gpipe, 1f1b, eager_1f1b, interleaved_1f1b, bfs, zb_h1, zb_v, dualpipe_v,' in str(e.value)
  )
  with pytest.raises(errors.ConfigError, match='num_stages'):
    get('gpipe')
