"""The code in docs/schedules.md runs as it stands and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
import re

import pytest

from pax_mpmd import schedules
from pax_mpmd.schedules import Phase

PAGE = (Path(__file__).resolve().parents[2] / 'docs' / 'schedules.md').read_text()
BLOCKS = re.findall(r'^```python\n(.*?)^```\n\n```text\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)


def test_every_block_is_run_here():
  """No Python block of the page is without the output that belongs to it."""
  assert len(BLOCKS) == PAGE.count('```python') == 3


@pytest.mark.parametrize('number', range(3))
def test_block(number):
  """A block prints exactly what the page says."""
  code, expected = BLOCKS[number]
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    exec(code, {'__name__': 'page'})
  assert printed.getvalue() == expected


@pytest.mark.parametrize('name', schedules.NAMES)
@pytest.mark.parametrize('num_actors', [1, 2, 3])
def test_named_schedules_add_in_ascending_order(name, num_actors):
  """As the plain program does, whatever the number of microbatches."""
  schedule = schedules.get(name, 2 * num_actors, num_actors)
  for num_microbatches in (1, 2, 5, 8):
    for tasks in schedule.tasks(num_microbatches):
      for phases in ({Phase.F}, {Phase.B, Phase.I}, {Phase.B, Phase.W}):
        for stage in {task.stage for task in tasks}:
          order = [t.microbatch for t in tasks if t.stage == stage and t.phase in phases]
          assert order == list(range(num_microbatches))
