"""What a fresh clone installs."""

from __future__ import annotations

from pathlib import Path
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
import pytest
import tomli

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomli.loads((REPOSITORY / 'pyproject.toml').read_text())
# Lock -> the Pythons it is for.
LOCKS = {
    'requirements.lock': ['3.10'],
    'requirements-core-latest.lock': ['3.11', '3.12', '3.13'],
}


def lines(lock: str) -> list[str]:
  text = (REPOSITORY / lock).read_text()
  return [line for line in text.splitlines() if line and not line.startswith('#')]


def environment(python: str) -> dict[str, str]:
  return {'python_version': python, 'python_full_version': f'{python}.0', 'extra': ''}


def locked(lock: str = 'requirements.lock', python: str = '3.10') -> dict[str, str]:
  """Returns {package: version} of a lock, as a Python installs it."""
  out = {}
  for line in lines(lock):
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate(environment(python)):
      name = canonicalize_name(requirement.name)
      assert name not in out, f'{name} twice'
      out[name] = str(requirement.specifier).removeprefix('==')
  return out


@pytest.mark.parametrize('lock', LOCKS)
def test_lock_is_pinned_and_names_no_registry(lock):
  """Each line is name==version, in the lock for several Pythons with a marker: no index, no URL."""
  pin = r'[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+'
  if len(LOCKS[lock]) > 1:
    pin += r"( ; (python_full_version|sys_platform) [<>=]+ '[a-z0-9.*]+')?"
  assert lines(lock)
  assert not [x for x in lines(lock) if not re.fullmatch(pin, x)]
  assert '://' not in (REPOSITORY / lock).read_text()


@pytest.mark.parametrize('lock, python', [(x, y) for x, ys in LOCKS.items() for y in ys])
def test_lock_holds_what_the_package_asks_for(lock, python):
  """Every direct requirement, the development ones too, is met by the lock."""
  project = PROJECT['project']
  asked = map(Requirement, project['dependencies'] + project['optional-dependencies']['dev'])
  versions = locked(lock, python)
  unmet = [
      str(x)
      for x in asked
      if x.marker is None or x.marker.evaluate(environment(python))
      if not x.specifier.contains(versions.get(canonicalize_name(x.name), '0'), prereleases=True)
  ]
  assert unmet == []


@pytest.mark.parametrize('python', LOCKS['requirements-core-latest.lock'])
def test_the_core_s_lock_has_no_pax(python):
  """Neither Pax nor TensorFlow, and a JAX with its own jaxlib."""
  versions = locked('requirements-core-latest.lock', python)
  assert not {'paxml', 'praxis', 'tensorflow', 'tensorflow-cpu', 'lingvo'} & versions.keys()
  assert versions['jaxlib'] == versions['jax'] != locked()['jax']


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
