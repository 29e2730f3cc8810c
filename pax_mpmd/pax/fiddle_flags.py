"""Experiments that Fiddle flags build as in Pax: `--fdl_config`, `--fdl_config_file` or `--fdl`."""

from __future__ import annotations

import difflib
import re
from typing import Any

from absl import flags
import fiddle as fdl
from fiddle import absl_flags
from praxis import pax_fiddle

from pax_mpmd import errors

__all__ = ['build_experiment', 'check_names', 'supplied']

FLAGS = flags.FLAGS


def supplied() -> bool:
  """Whether the command line has Fiddle flags that name an experiment."""
  return absl_flags.fdl_flags_supplied() or FLAGS['fdl'].present > 0


def build_experiment() -> tuple[Any, list[str]]:
  """The experiment that the Fiddle flags describe, built as `paxml.main` builds it.

  The base may be a function that returns a Fiddle config of an experiment, or an experiment class:
  settings such as `--fdl.NUM_LAYERS=4` are then attributes of its instance.

  Returns:
    The experiment, and the settings of attributes, NAME=VALUE; see `check_names`. None of those
    where there is a Fiddle config, which checks names itself.

  Raises:
    ConfigError: what is built isn't an experiment.
  """
  if absl_flags.fdl_flags_supplied():
    settings = list(FLAGS.fdl_set)
    config = absl_flags.create_buildable_from_flags(module=None, allow_imports=True)
  else:
    # Fiddle forgets the flag's values as it reads them.
    values = list(getattr(FLAGS['fdl'], '_remaining_directives', ()))
    settings = [value.removeprefix('set:') for value in values if value.startswith('set:')]
    config = FLAGS.fdl
  experiment = pax_fiddle.build(config)
  if not callable(getattr(experiment, 'task', None)):
    raise errors.ConfigError(
        f'The Fiddle flags give {errors.shown(experiment)}, which is not an experiment. Name an'
        ' experiment class, or a function that returns a Fiddle config of one.'
    )
  return experiment, [] if isinstance(config, fdl.Buildable) else settings


def check_names(experiment: Any, settings: list[str]) -> None:
  """Checks that settings of an experiment's attributes name attributes that its class has.

  Fiddle sets on an instance whatever it is told, so that a misspelt name would do nothing.

  Args:
    experiment: the experiment, with the attributes that MPMD adds to it.
    settings: NAME=VALUE, or NAME.FIELD=VALUE.

  Raises:
    ConfigError: there is no attribute of that name; names similar ones.
  """
  for setting in settings:
    name = re.split(r'[.\[=]', setting, maxsplit=1)[0]
    if hasattr(type(experiment), name):
      continue
    known = [x for x in dir(type(experiment)) if x.isupper()]
    near = difflib.get_close_matches(name.upper(), known, n=3)
    hint = f' Similar ones: {", ".join(near)}.' if near else ''
    raise errors.ConfigError(
        f'--fdl.{setting}: the experiment {type(experiment).__name__} has no attribute'
        f' {name!r}.{hint} A Fiddle flag can set the attributes that the class defines.'
    )
