"""What an environment without Pax says when it is asked for Pax."""

from __future__ import annotations

import importlib.util
from pathlib import Path
import subprocess
import sys

ROOT = Path(__file__).resolve().parents[1]


def test_pax_is_there_or_asked_for():
  """`import pax_mpmd.pax` gets as far as Pax, or ends in one error that says what is needed."""
  code = (
      'import sys\n'
      'sys.modules["praxis"] = sys.modules["paxml"] = None\n'  # so that nothing big is loaded
      'import pax_mpmd.pax\n'
  )
  done = subprocess.run(
      [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=120
  )
  assert done.returncode != 0
  last = done.stderr.strip().splitlines()[-1]
  if importlib.util.find_spec('paxml') is not None:
    assert 'halted; None in sys.modules' in last
    return
  assert last.startswith('ImportError: pax_mpmd.pax works with Pax 1.4.0 on Python 3.10;')
  assert 'paxml missing (needed: 1.4.0)' in last and 'The core (import pax_mpmd)' in last
