"""MPMD pipeline parallelism for Pax and for plain JAX.

The public names; see README.md for how they fit together.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = '0.1.0'

# Where each public name lives. Looked up at first use, so that a process that only plans, or only
# works for an actor, loads what it needs and no more.
_HOMES = {
    'ActorError': 'errors',
    'CheckpointError': 'errors',
    'ConfigError': 'errors',
    'DeferredArray': 'runtime.deferred',
    'LocalRuntime': 'runtime.local',
    'MpmdArray': 'runtime.arrays',
    'MpmdError': 'errors',
    'PartitionError': 'errors',
    'PlanError': 'errors',
    'RayRuntime': 'runtime.ray_runtime',
    'ScheduleError': 'errors',
    'accumulate_grads': 'compile.marks',
    'deferred': 'runtime.deferred',
    'device_get': 'runtime.arrays',
    'mpmd_jit': 'runtime.step',
    'pipeline_yield': 'compile.marks',
    'schedules': None,
}

__all__ = [
    'ActorError',
    'CheckpointError',
    'ConfigError',
    'DeferredArray',
    'LocalRuntime',
    'MpmdArray',
    'MpmdError',
    'PartitionError',
    'PlanError',
    'RayRuntime',
    'ScheduleError',
    'accumulate_grads',
    'deferred',
    'device_get',
    'mpmd_jit',
    'pipeline_yield',
    'schedules',
]


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  home = _HOMES[name]
  if home is None:
    value = importlib.import_module(f'{__name__}.{name}')
  else:
    value = getattr(importlib.import_module(f'{__name__}.{home}'), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted([*globals(), *__all__])
