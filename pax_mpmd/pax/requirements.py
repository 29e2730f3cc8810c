"""Checks that the installed Pax is one that this package works with, before importing it."""

from __future__ import annotations

from importlib import metadata
import sys

__all__ = ['check']

# What Pax 1.4.0 was built for. It doesn't pin jaxlib, and a newer one fails at `import jax`.
PINS = {'paxml': '1.4.0', 'praxis': '1.4.0', 'jax': '0.4.26', 'jaxlib': '0.4.26'}
PYTHON = (3, 10)


def check() -> None:
  """Raises ImportError naming what is installed and what is needed, if they differ."""
  wrong = []
  if sys.version_info[:2] != PYTHON:
    wrong.append(f'Python {sys.version_info[0]}.{sys.version_info[1]} (needed: 3.10)')
  for package, needed in PINS.items():
    try:
      found = metadata.version(package)
    except metadata.PackageNotFoundError:
      found = 'missing'
    if found != needed:
      wrong.append(f'{package} {found} (needed: {needed})')
  if wrong:
    raise ImportError(
        'pax_mpmd.pax works with Pax 1.4.0 on Python 3.10; installed are '
        + ', '.join(wrong)
        + '. Set up the environment with `make env`, or install the versions of pyproject.toml.'
        ' The core (import pax_mpmd) does not need Pax.'
    )
