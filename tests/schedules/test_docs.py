"""The code in docs/schedules.md runs as it stands and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
import re

import pytest

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
