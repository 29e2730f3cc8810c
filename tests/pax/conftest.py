"""What the tests of Pax experiments share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope='module', autouse=True)
def quick_compilation() -> Iterator[None]:
  """Compiles with few optimizations: each test compiles whole train steps and runs them thrice."""
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', before)
