"""What must be the same in the driver and in its workers."""

from __future__ import annotations

import importlib.metadata
import platform

__all__ = ['differences', 'versions']


def versions() -> dict[str, str]:
  """Versions by name. Imports none of the packages."""
  return {'python': platform.python_version()} | {
      name: _version(name) for name in ('jax', 'jaxlib', 'pax-mpmd')
  }


def _version(distribution: str) -> str:
  try:
    return importlib.metadata.version(distribution)
  except importlib.metadata.PackageNotFoundError:
    return 'not installed'


def differences(driver: dict[str, str], worker: dict[str, str]) -> list[str]:
  """One text per package whose versions differ; for Python only major.minor counts."""

  def relevant(name: str, version: str | None) -> str:
    return '.'.join((version or 'unknown').split('.')[:2]) if name == 'python' else str(version)

  return [
      f'{name} {version} here, {worker.get(name)} there'
      for name, version in driver.items()
      # A worker finds pax_mpmd on the driver's path, installed or not.
      if name != 'pax-mpmd' or 'not installed' not in (version, worker.get(name))
      if relevant(name, version) != relevant(name, worker.get(name))
  ]
