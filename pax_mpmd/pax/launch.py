"""The command line behind `pax_mpmd.main`: flags, the experiment swapped in, errors as one line."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
import contextlib
import difflib
import functools
import gc
import importlib
import io
import os
import re
from typing import Any
from unittest import mock

from absl import app
from absl import flags
from absl import logging
from fiddle import absl_flags
import jax
from paxml import base_experiment
from paxml import experiment_registry
from paxml import main as paxml_main
import seqio

from pax_mpmd import errors
from pax_mpmd import schedules
from pax_mpmd.pax import backend
from pax_mpmd.pax import dry_run
from pax_mpmd.pax import fiddle_flags
from pax_mpmd.pax import mixin
from pax_mpmd.pax import pax_flags
from pax_mpmd.pax import status as status_lib
from pax_mpmd.pax import transform

__all__ = [
    'experiment_of_flags',
    'find_experiment',
    'mix_in',
    'mpmd_experiment',
    'run',
    'start_backend',
]

FLAGS = flags.FLAGS

flags.DEFINE_bool('mpmd', False, 'Run the pipeline of --exp through MPMD, on actors.')
flags.DEFINE_string(
    'mpmd_schedule',
    None,
    f'Schedule with --mpmd: one of {", ".join(schedules.NAMES)}, or the path of a .csv table.'
    " Default: the experiment's SCHEDULE, else 1f1b, interleaved_1f1b where each actor owns several"
    ' stages.',
)
flags.DEFINE_integer(
    'mpmd_num_actors', None, 'Number of actors with --mpmd. Default: NUM_STAGES.', lower_bound=1
)
flags.DEFINE_integer(
    'mpmd_num_stages',
    None,
    'NUM_STAGES for an experiment that has none: into how many stages its layers are cut.',
    lower_bound=1,
)
flags.DEFINE_integer(
    'mpmd_num_microbatches',
    None,
    'NUM_MICROBATCHES for an experiment that sets neither it nor MICROBATCH_SIZE.',
    lower_bound=1,
)
flags.DEFINE_enum(
    'mpmd_runtime', None, ['ray', 'local'], 'Where actors live with --mpmd. Default: ray.'
)
flags.DEFINE_bool(
    'mpmd_dry_run',
    False,
    'With --mpmd: trace, plan and verify the train step, print it, and start nothing.',
)

_DEVICE_COUNT_FLAG = '--xla_force_host_platform_device_count'


def run(argv: Sequence[str], quiet: bool, started: float) -> None:
  """Runs the command line; ends the process.

  Args:
    argv: the arguments with the program's name first.
    quiet: keep Pax's and JAX's warnings off the terminal, unless --verbosity asks for them.
    started: `time.monotonic()` at the program's start.
  """
  status_lib.status.started = started
  # Python looks for garbage once more when it ends; with all of Pax that takes seconds.
  atexit.register(gc.freeze)
  if quiet:
    logging.set_verbosity(logging.ERROR)
  jax.config.config_with_absl()
  flags.mark_flag_as_required('job_log_dir')
  app.run(_main, argv=list(argv), flags_parser=absl_flags.flags_parser)


def _main(argv: Sequence[str]) -> None:
  if not FLAGS.mpmd:
    if FLAGS.mpmd_dry_run:
      raise app.UsageError('--mpmd_dry_run needs --mpmd.')
    paxml_main.main(argv)
    return
  if not FLAGS['verbosity'].present:
    logging.set_verbosity(logging.ERROR)
  try:
    _run_mpmd(argv)
  except errors.MpmdError as error:
    status_lib.status.say(f'{type(error).__name__}: {error}')
    raise SystemExit(1) from None
  except KeyboardInterrupt:
    status_lib.status.say('interrupted')
    raise SystemExit(130) from None


def _run_mpmd(argv: Sequence[str]) -> None:
  pax_flags.check()
  if FLAGS.mpmd_dry_run and FLAGS.mode != 'train':
    raise errors.ConfigError(
        f'--mpmd_dry_run plans the train step, but --mode={FLAGS.mode}. Leave one of them out.'
    )
  experiment = experiment_of_flags()
  transform.check_experiment(experiment)
  _check_search(experiment)
  start_backend(experiment, cpu_driver=FLAGS.mpmd_runtime != 'local')
  if FLAGS.mpmd_dry_run:
    if FLAGS.tfds_data_dir is not None:
      seqio.set_tfds_data_dir_override(FLAGS.tfds_data_dir)  # as paxml.main does
    dry_run.dry_run(_instance(experiment))
    return
  if FLAGS.mode == 'eval' and not _instance(experiment).eval_datasets():
    status_lib.status.say(
        'nothing to evaluate: no data set of the experiment has is_training = False'
    )
    return
  for note in pax_flags.notes():
    status_lib.status.say(f'note: {note}')
  get_experiment = mock.patch.object(
      paxml_main, 'get_experiment', lambda name: functools.partial(_instance, experiment)
  )
  try:
    with get_experiment, pax_flags.one_process():
      paxml_main.main(argv)
  finally:
    backend.close_all()
  if FLAGS.mode == 'eval':
    folder = FLAGS.job_log_dir / 'summaries'
    status_lib.status.say(f'summaries: tensorboard --logdir={folder}')


def experiment_of_flags() -> Any:
  """The experiment with MPMD mixed in: a class that is registered, or what Fiddle flags built.

  Raises:
    ConfigError: there is none, or flags contradict each other or would be ignored.
  """
  choices = dict(
      schedule=FLAGS.mpmd_schedule,
      num_actors=FLAGS.mpmd_num_actors,
      num_stages=FLAGS.mpmd_num_stages,
      num_microbatches=FLAGS.mpmd_num_microbatches,
      runtime=FLAGS.mpmd_runtime,
  )
  if FLAGS.exp is None:
    if not fiddle_flags.supplied():
      raise app.UsageError(
          '--mpmd needs --exp, the name of a registered experiment, or Fiddle flags that build one'
          ' (--fdl_config).'
      )
    experiment, settings = fiddle_flags.build_experiment()
    mix_in(experiment, **choices)
    fiddle_flags.check_names(experiment, settings)
    FLAGS.exp = f'{type(experiment).__module__}.{type(experiment).__name__}'  # for Pax's messages
    return experiment
  if fiddle_flags.supplied():
    raise errors.ConfigError(
        f'Both --exp={FLAGS.exp} and Fiddle flags (--fdl, --fdl_config) name an experiment; Pax'
        ' takes the first and ignores the others. Leave one of them out.'
    )
  if FLAGS.fdl_set or FLAGS.fiddler or FLAGS.fdl_tags_set:
    raise errors.ConfigError(
        f'--exp={FLAGS.exp} is not built by Fiddle, and Pax ignores --fdl.NAME=VALUE, --fiddler and'
        f' --fdl_tag with it. Give --fdl_config={FLAGS.exp} in place of --exp.'
    )
  experiment = mpmd_experiment(find_experiment(FLAGS.exp), **choices)
  with contextlib.redirect_stderr(io.StringIO()):  # Pax prints that it was registered
    experiment_registry.register(experiment, allow_overwrite=True)
  return experiment


def _instance(experiment: Any) -> Any:
  return experiment() if isinstance(experiment, type) else experiment


def _check_search(experiment: Any) -> None:
  """Raises ConfigError if Pax would tune hyperparameters: a run for each trial."""
  cls = experiment if isinstance(experiment, type) else type(experiment)
  if cls.search is not base_experiment.BaseExperiment.search:
    raise errors.ConfigError(
        f'The experiment {cls.__name__} searches hyperparameters (its method search), which is not'
        ' supported with --mpmd. Tune it without --mpmd, and train what was found with it, as an'
        ' experiment without that method.'
    )


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


def mpmd_experiment(
    experiment: type,
    schedule: Any = None,
    num_actors: int | None = None,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    runtime: Any = None,
) -> type:
  """A subclass of an experiment, of the same name, that runs through MPMD.

  Args:
    experiment: a Pax experiment class, with the mixin or without.
    schedule: overrides SCHEDULE if not None; so do num_actors and runtime.
    num_actors: overrides NUM_ACTORS.
    num_stages: NUM_STAGES where the experiment has none.
    num_microbatches: NUM_MICROBATCHES where the experiment says neither that nor a size.
    runtime: overrides RUNTIME.

  Raises:
    ConfigError: a number was given that the experiment sets already, to another value.
  """
  fields = _fields(experiment, schedule, num_actors, num_stages, num_microbatches, runtime)
  return _with_mixin(experiment, fields)


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
) -> dict[str, Any]:
  """The attributes that flags set, of an experiment or its class."""
  fields = {'SCHEDULE': schedule, 'NUM_ACTORS': num_actors, 'RUNTIME': runtime}
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


def start_backend(experiment: Any, cpu_driver: bool = True) -> None:
  """Starts JAX on the driver with as many devices as the experiment's mesh has.

  Experiments compute their batch from the number of devices, and JAX fixes that number when it
  starts, so this has to happen before anything starts it.

  Args:
    experiment: the experiment or its class.
    cpu_driver: whether the driver computes on the CPU: it leaves accelerators to the actors.

  Raises:
    ConfigError: the experiment was built by something that asked for JAX's devices, and there are
      fewer than its mesh has.
  """
  needed = transform.num_devices(*_mesh_shape(experiment))
  before = os.environ.get('XLA_FLAGS')
  ours = not re.search(_DEVICE_COUNT_FLAG, before or '')
  if ours:
    os.environ['XLA_FLAGS'] = f'{before or ""} {_DEVICE_COUNT_FLAG}={needed}'.strip()
  if cpu_driver and not os.environ.get('JAX_PLATFORMS'):
    jax.config.update('jax_platforms', 'cpu')
  try:
    count = jax.local_device_count()
  finally:
    # For this process only: an actor has its own number of devices.
    if before is None:
      del os.environ['XLA_FLAGS']
    else:
      os.environ['XLA_FLAGS'] = before
  built = not isinstance(experiment, type)
  if built and ours and count < needed and jax.default_backend() == 'cpu':
    raise errors.ConfigError(
        f'JAX was started with {count} devices while the Fiddle config was built, so a batch that'
        f' is computed from their number would be that of {count}, but the mesh of the experiment'
        f' has {needed}. Set the environment variable XLA_FLAGS="{_DEVICE_COUNT_FLAG}={needed}".'
    )


def _mesh_shape(experiment: Any) -> tuple[Any, Any]:
  """(ICI_MESH_SHAPE, DCN_MESH_SHAPE) of an experiment or, of one that has none, of its task."""
  ici = getattr(experiment, 'ICI_MESH_SHAPE', None)
  if ici is None and not isinstance(experiment, type):
    model = experiment.task().model
    return model.ici_mesh_shape, model.dcn_mesh_shape
  return ici, getattr(experiment, 'DCN_MESH_SHAPE', None)
