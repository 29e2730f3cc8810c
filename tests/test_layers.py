"""What each package may import, and what importing pax_mpmd brings in and starts."""

from __future__ import annotations

import ast
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).resolve().parents[1] / 'pax_mpmd'
MODULES = sorted(ROOT.rglob('*.py'))

# From the bottom up; a package may import those before it. '' is pax_mpmd itself, the public names.
ORDER = [
    'errors', 'schedules', 'compile', 'plan', 'timeline', 'runtime', '',
    'signals', 'restarts', 'pax', 'main',
]
# Further limits: (importing package, imported package) -> the only pairs of modules allowed.
ONLY = {
    ('plan', 'compile'): {('*', 'compile.program')},
    ('runtime', 'compile'): {
        ('*', 'compile.program'), ('runtime.step', '*'), ('runtime.arguments', '*'),
        ('runtime.deferred', '*'),
    },
}
# Packages from outside -> those of ours that may import them.
OUTSIDE = {
    'ray': {'runtime'},
    'paxml': {'pax', 'main'},
    'praxis': {'pax', 'main'},
    'fiddle': {'pax', 'main'},
    'tensorflow': {'pax', 'main'},
    'jax': {'compile', 'runtime', 'pax', 'main'},
}


def imports(path: Path) -> set[str]:
  """The full names of the modules that a file imports anywhere in it."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      names.add(node.module)
      names.update(f'{node.module}.{alias.name}' for alias in node.names)
  return names


def name_of(path: Path) -> str:
  """`compile.trace` for pax_mpmd/compile/trace.py."""
  return '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('__init__').rstrip('.')


def is_module(name: str) -> bool:
  path = ROOT.joinpath(*name.split('.'))
  return path.with_suffix('.py').exists() or path.is_dir()


@pytest.mark.parametrize('path', MODULES, ids=name_of)
def test_layers(path):
  """A package imports only packages below it."""
  module = name_of(path)
  package = module.split('.')[0]
  for name in imports(path):
    if not name.startswith('pax_mpmd'):
      outside = name.split('.')[0]
      assert outside not in OUTSIDE or package in OUTSIDE[outside], f'{module} imports {name}'
      continue
    name = name.removeprefix('pax_mpmd').lstrip('.')
    if not name or not is_module(name):
      continue  # a name in a module, which stands in the set by itself
    other = name.split('.')[0]
    if other == package:
      continue
    assert ORDER.index(other) < ORDER.index(package), f'{module} imports {name}'
    allowed = ONLY.get((package, other))
    if allowed is not None and name != other:
      assert ('*', name) in allowed or (module, '*') in allowed, f'{module} imports {name}'


def test_every_package_is_in_the_order():
  """A new package needs a place."""
  assert {name_of(path).split('.')[0] for path in MODULES} == set(ORDER)


@pytest.mark.parametrize(
    'use',
    [
        'import pax_mpmd',
        'import pax_mpmd.schedules, pax_mpmd.plan, pax_mpmd.errors',
        'import pax_mpmd as m; [getattr(m, n) for n in m.__all__ if n != "RayRuntime"]',
        'import pax_mpmd as m; m.mpmd_jit(lambda: 0, schedule=m.schedules.GPipe(num_stages=2),'
        ' runtime=m.LocalRuntime())',
    ],
)
def test_import_is_light(use):
  """It imports neither Ray, Pax nor TensorFlow, and starts no JAX backend."""
  code = (
      f'{use}\n'
      'import sys\n'
      'heavy = {"ray", "paxml", "praxis", "tensorflow", "fiddle", "seqio"} & set(sys.modules)\n'
      'assert not heavy, heavy\n'
      'bridge = sys.modules.get("jax._src.xla_bridge")\n'
      'assert bridge is None or not bridge._backends, bridge._backends\n'
  )
  done = subprocess.run(
      [sys.executable, '-c', code], cwd=ROOT.parent, capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr


def test_schedules_need_no_jax():
  """Schedules are plain Python."""
  code = 'import pax_mpmd.schedules, sys; assert "jax" not in sys.modules'
  subprocess.run([sys.executable, '-c', code], cwd=ROOT.parent, check=True, timeout=120)
