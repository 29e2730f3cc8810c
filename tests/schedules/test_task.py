"""Tasks and their text form."""

from __future__ import annotations

import pickle

import pytest

from pax_mpmd import errors
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import Task


@pytest.mark.parametrize('text', ['0F0', '2B13', '10I7', '3W0'])
def test_text_round_trips(text):
  """A task's text reads back as the same task."""
  task = Task.parse(text)
  assert str(task) == text
  assert Task.parse(str(task)) == task
  assert hash(pickle.loads(pickle.dumps(task))) == hash(task)


def test_parse_reads_the_parts():
  """Stage comes first, then the phase, then the microbatch."""
  assert Task.parse(' 2F13 ') == Task(stage=2, phase=Phase.F, microbatch=13)


@pytest.mark.parametrize('text', ['', 'F0', '2F', '2X0', '2F0F', '-1F0', '2f0', None, 7])
def test_other_texts_are_refused(text):
  """What isn't a task's text is refused with the text and the form in the message."""
  with pytest.raises(errors.ScheduleError, match='2F0 is the forward of stage 2') as e:
    Task.parse(text)
  assert repr(text) in str(e.value)


def test_tasks_are_ordered_by_stage_then_phase_then_microbatch():
  """Sorting tasks needs no key."""
  texts = ['1F0', '0W1', '0F1', '0F0', '0B2']
  assert list(map(str, sorted(map(Task.parse, texts)))) == ['0B2', '0F0', '0F1', '0W1', '1F0']
