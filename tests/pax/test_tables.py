"""The tables of docs/experiments.md."""

from __future__ import annotations

import pytest

from tests.pax import tables


@pytest.mark.parametrize('name', list(tables.TABLES))
def test_the_docs_have_the_generated_table(name):
  """docs/experiments.md has what `python -m tests.pax.tables` prints."""
  start, end = tables.marks(name)
  table, found, _ = tables.DOCS.read_text().partition(start)[2].partition(end)
  assert found
  assert table == tables.TABLES[name]()
