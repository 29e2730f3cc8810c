"""What all tests share: the devices, and a cache that isn't the user's."""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path

import pytest

# Before anything imports jax: the CPU, as four devices so that meshes and pipelines have some.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
_DEVICES = '--xla_force_host_platform_device_count'
if _DEVICES not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_DEVICES}=4'.strip()


@pytest.fixture(scope='session')
def session_data_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
  """An empty folder that `configs.stdlib_text` builds in for the whole session."""
  root = tmp_path_factory.mktemp('data')
  before = os.environ.get('PAX_MPMD_DATA_DIR')
  os.environ['PAX_MPMD_DATA_DIR'] = str(root)
  yield root
  if before is None:
    del os.environ['PAX_MPMD_DATA_DIR']
  else:
    os.environ['PAX_MPMD_DATA_DIR'] = before
