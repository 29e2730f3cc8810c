"""Only one process trains in a folder."""

from __future__ import annotations

from pathlib import Path
import subprocess
import sys

import pytest

from pax_mpmd import errors
from pax_mpmd.pax import owner

_HOLDS = """
import sys, time
from pax_mpmd.pax import owner
owner.hold(sys.argv[1])
print('held', flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path):
  """It is told who has the folder; another folder is free, and so is this one after a kill -9."""
  folder = tmp_path / 'run'
  first = subprocess.Popen(
      [sys.executable, '-c', _HOLDS, str(folder)],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
  )
  try:
    assert first.stdout.readline() == 'held\n'
    with pytest.raises(errors.ConfigError, match=f'process {first.pid} on ') as caught:
      owner.hold(folder)
    assert str(folder) in str(caught.value)
    owner.hold(tmp_path / 'other')
  finally:
    first.kill()
    first.wait(30)
  owner.hold(folder)


def test_what_cannot_be_locked_is_left_to_pax(tmp_path: Path):
  """A folder below a file, or in an object store, gives no error of ours."""
  (tmp_path / 'file').touch()
  owner.hold(tmp_path / 'file' / 'run')
  owner.hold('gs://bucket/run')
