"""Wrong versions are named before Pax is imported."""

from __future__ import annotations

from importlib import metadata

import pytest

from pax_mpmd.pax import requirements


def test_the_installed_versions_are_the_needed_ones():
  """The environment of the tests passes the check."""
  requirements.check()


def test_a_newer_jaxlib_and_a_missing_pax_are_named(monkeypatch):
  """The error tells every version that is wrong, and the one that is needed."""
  real = metadata.version

  def version(name):
    if name == 'paxml':
      raise metadata.PackageNotFoundError(name)
    return '0.6.2' if name == 'jaxlib' else real(name)

  monkeypatch.setattr(metadata, 'version', version)
  with pytest.raises(ImportError) as info:
    requirements.check()
  assert 'jaxlib 0.6.2 (needed: 0.4.26)' in str(info.value)
  assert 'paxml missing (needed: 1.4.0)' in str(info.value)
  assert 'praxis' not in str(info.value)
