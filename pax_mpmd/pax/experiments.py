"""Experiments by name, and with MPMD mixed in."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from paxml import base_experiment
from paxml import experiment_registry

from pax_mpmd import errors
from pax_mpmd.pax import mixin

__all__ = ['find_experiment', 'mix_in', 'mpmd_experiment']


def find_experiment(name: str) -> type:
  """The registered experiment of that name; imports its module if needed.

  Raises:
    ConfigError: there is none; names similar ones.
  """
  found = experiment_registry.get(name)
  module = name.rpartition('.')[0]
  if found is None and module:
    try:
      importlib.import_module(module)
    except ModuleNotFoundError as error:
      if not (error.name and (module + '.').startswith(error.name + '.')):
        raise  # the experiment's own import is broken
    found = experiment_registry.get(name)
  if found is not None:
    return found
  known = sorted(experiment_registry.get_all())
  last = name.rpartition('.')[2]
  near = [k for k in known if k.rpartition('.')[2].lower() == last.lower()]
  near += difflib.get_close_matches(name, known, n=5, cutoff=0.5)
  near = list(dict.fromkeys(near)) or known[:10]
  hint = f' Similar ones: {", ".join(near)}.' if near else ''
  raise errors.ConfigError(
      f'--exp={name}: there is no registered experiment of this name.{hint} Give the full name,'
      ' module.Class, of a class with @experiment_registry.register, importable from here.'
  )


def mpmd_experiment(experiment: type, **choices: Any) -> type:
  """A subclass of an experiment, of the same name, that runs through MPMD.

  Args:
    experiment: a Pax experiment class, with the mixin or without.
    **choices: see `_fields`.

  Raises:
    ConfigError: a number was given that the experiment sets already, to another value.
  """
  return _with_mixin(experiment, _fields(experiment, **choices))


def mix_in(experiment: base_experiment.BaseExperiment, **choices: Any) -> None:
  """Makes an experiment that has been built run through MPMD, in place; see `mpmd_experiment`."""
  fields = _fields(experiment, **choices)
  # Of the instance, since that is where Fiddle flags set attributes.
  for name, value in fields.items():
    setattr(experiment, name, value)
  experiment.__class__ = _with_mixin(type(experiment), {})


def _with_mixin(experiment: type, fields: dict[str, Any]) -> type:
  bases = (experiment,)
  if not issubclass(experiment, mixin.MpmdPipelineMixin):
    bases = (mixin.MpmdPipelineMixin, experiment)
  names = dict(__module__=experiment.__module__, __doc__=experiment.__doc__)
  return type(experiment.__name__, bases, {**fields, **names})


def _fields(
    experiment: Any,
    schedule: Any = None,
    num_actors: int | None = None,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    runtime: Any = None,
    trace_steps: int | None = None,
) -> dict[str, Any]:
  """The attributes that flags set, of an experiment or its class.

  Args:
    experiment: the experiment.
    schedule: overrides SCHEDULE if not None; likewise num_actors, runtime and trace_steps.
    num_actors: NUM_ACTORS.
    num_stages: NUM_STAGES where the experiment has none.
    num_microbatches: NUM_MICROBATCHES where the experiment says neither that nor a size.
    runtime: RUNTIME.
    trace_steps: TRACE_STEPS.

  Raises:
    ConfigError: a number was given that the experiment sets already, to another value.
  """
  fields = {
      'SCHEDULE': schedule,
      'NUM_ACTORS': num_actors,
      'RUNTIME': runtime,
      'TRACE_STEPS': trace_steps,
  }
  fields = {name: value for name, value in fields.items() if value is not None}
  cls = experiment if isinstance(experiment, type) else type(experiment)
  for name, value, flag in (
      ('NUM_STAGES', num_stages, '--mpmd_num_stages'),
      ('NUM_MICROBATCHES', num_microbatches, '--mpmd_num_microbatches'),
  ):
    old = getattr(experiment, name, None)
    if value is None or value == old:
      continue
    if old is None and name == 'NUM_MICROBATCHES':
      name, old = 'MICROBATCH_SIZE', getattr(experiment, 'MICROBATCH_SIZE', None)
    if old is not None:
      raise errors.ConfigError(
          f'{flag}={value}: the experiment {cls.__name__} has {name}={old} of its own; the flag is'
          f' for experiments without. Leave the flag out, or set {name} in a subclass, or with'
          f' --fdl_config=... --fdl.{name}=... in place of --exp.'
      )
    name = flag.removeprefix('--mpmd_').upper()
    fields[name] = value
  return fields
