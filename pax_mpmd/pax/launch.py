"""The command line behind `pax_mpmd.main`: flags, the experiment swapped in, errors as one line."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
import contextlib
import functools
import gc
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
from paxml import checkpoint_paths
from paxml import experiment_registry
from paxml import main as paxml_main
import seqio

from pax_mpmd import errors
from pax_mpmd import restarts
from pax_mpmd import schedules
from pax_mpmd import signals
from pax_mpmd.pax import backend
from pax_mpmd.pax import dry_run
from pax_mpmd.pax import experiments
from pax_mpmd.pax import fiddle_flags
from pax_mpmd.pax import fits
from pax_mpmd.pax import owner
from pax_mpmd.pax import pax_flags
from pax_mpmd.pax import status as status_lib
from pax_mpmd.pax import stored_tree
from pax_mpmd.pax import transform
from pax_mpmd.runtime import ray_join

__all__ = ['experiment_of_flags', 'run', 'start_backend']

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
flags.DEFINE_integer(
    'mpmd_max_restarts',
    0,
    'With --mpmd: how many times to start again, from the newest checkpoint, when an actor dies,'
    ' fails or gets stuck.',
    lower_bound=0,
)
flags.DEFINE_integer(
    'mpmd_trace_steps',
    None,
    'With --mpmd: how many steps to show in traces, from the third on, in job_log_dir/mpmd_trace.',
    lower_bound=0,
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
    for name in ('mpmd_dry_run', 'mpmd_max_restarts', 'mpmd_trace_steps'):
      if FLAGS[name].value:
        raise app.UsageError(f'--{name} needs --mpmd.')
    paxml_main.main(argv)
    return
  if not FLAGS['verbosity'].present:
    logging.set_verbosity(logging.ERROR)
  say = status_lib.status.say
  signals.handlers.say = say
  signals.handlers.importing = False
  try:
    _run_mpmd(argv)
  except SystemExit:
    if signals.handlers.raised is not None:  # Ray raises one with a status of its own instead
      raise signals.Ended(signals.handlers.raised) from None
    raise
  except Exception as error:
    signals.handlers.begin_end()
    cause = _known_cause(error)
    if cause is None:
      raise
    say(f'{type(cause).__name__}: {cause}')
    if isinstance(cause, errors.ActorError) and signals.handlers.received is None:
      limit = FLAGS.mpmd_max_restarts
      if not restarts.restarts.at_exit(limit, _where_to_go_on) and limit:
        say(f'not started again: that was the last of {limit} restarts (--mpmd_max_restarts)')
    raise SystemExit(1) from None


def _known_cause(error: BaseException | None) -> errors.MpmdError | None:
  """The error of ours that an exception is, or that it was raised for, as by a thread of Orbax."""
  while error is not None and not isinstance(error, errors.MpmdError):
    error = error.__cause__
  return error


def _where_to_go_on() -> str:
  if FLAGS.mode == 'eval':
    return 'evaluating the newest checkpoint'
  newest = checkpoint_paths.latest_checkpoint_if_exists(FLAGS.job_log_dir / 'checkpoints')
  if newest is None:
    return 'from the beginning, there is no checkpoint yet'
  return f'from the checkpoint of step {checkpoint_paths.get_step_from_checkpoint_asset(newest)}'


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
  if FLAGS.mode == 'train':
    owner.hold(FLAGS.job_log_dir)
    stored_tree.check_all(FLAGS.job_log_dir / 'checkpoints')
  address = os.environ.get('RAY_ADDRESS')
  if address and address != 'local' and getattr(experiment, 'RUNTIME', None) in (None, 'ray'):
    ray_join.check(address, 'The environment variable RAY_ADDRESS')  # before the data is read
  for note in pax_flags.notes():
    status_lib.status.say(f'note: {note}')
  get_experiment = mock.patch.object(
      paxml_main, 'get_experiment', lambda name: functools.partial(_instance, experiment)
  )
  try:
    with get_experiment, pax_flags.one_process(), fits.evaluating():
      paxml_main.main(argv)
  finally:
    signals.handlers.begin_end()
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
      trace_steps=FLAGS.mpmd_trace_steps,
  )
  if FLAGS.exp is None:
    if not fiddle_flags.supplied():
      raise app.UsageError(
          '--mpmd needs --exp, the name of a registered experiment, or Fiddle flags that build one'
          ' (--fdl_config).'
      )
    experiment, settings = fiddle_flags.build_experiment()
    experiments.mix_in(experiment, **choices)
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
  experiment = experiments.mpmd_experiment(
      experiments.find_experiment(FLAGS.exp), **choices
  )
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
