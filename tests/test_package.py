"""What a fresh clone installs."""

from __future__ import annotations

from pathlib import Path
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
import tomli

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomli.loads((REPOSITORY / 'pyproject.toml').read_text())
LOCK_LINES = [
    line
    for line in (REPOSITORY / 'requirements.lock').read_text().splitlines()
    if line and not line.startswith('#')
]


def locked() -> dict[str, str]:
  """Returns {package: version} of the lock."""
  return {canonicalize_name(line.split('==')[0]): line.split('==')[1] for line in LOCK_LINES}


def test_lock_is_pinned_and_names_no_registry():
  """Each line is name==version: no index, no URL, no marker, nothing twice."""
  assert LOCK_LINES
  assert not [x for x in LOCK_LINES if not re.fullmatch(r'[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+', x)]
  assert len(locked()) == len(LOCK_LINES)
  assert '://' not in (REPOSITORY / 'requirements.lock').read_text()


def test_lock_holds_what_the_package_asks_for():
  """Every direct requirement, the development ones too, is met by the lock."""
  project = PROJECT['project']
  texts = project['dependencies'] + project['optional-dependencies']['dev']
  versions = locked()
  unmet = [
      text
      for text in texts
      if not Requirement(text).specifier.contains(
          versions.get(canonicalize_name(Requirement(text).name), '0'), prereleases=True
      )
  ]
  assert unmet == []


def test_lock_holds_one_provider_of_each_module():
  """tensorflow and tensorflow_datasets would each be installed twice over without our choice."""
  versions = locked()
  assert 'tensorflow-cpu' in versions and 'tensorflow' not in versions
  assert 'tensorflow-datasets' in versions and 'tfds-nightly' not in versions


def test_lock_holds_the_pins_that_pax_leaves_out():
  """Without these three a fresh install fails at import, or starts Ray processes slowly."""
  versions = locked()
  assert versions['jaxlib'] == versions['jax']
  assert int(versions['setuptools'].split('.')[0]) < 81
  assert tuple(map(int, versions['jsonschema'].split('.')[:2])) < (4, 25)
