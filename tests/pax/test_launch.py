"""The command line's parts: finding an experiment, mixing MPMD in, schedules and runtimes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import os
import subprocess
import sys
from typing import Any

from absl.testing import flagsaver
import fiddle as fdl
from fiddle import absl_flags
import jax
from paxml import experiment_registry
from paxml import parameterized_experiment
from praxis import pax_fiddle
import pytest

import pax_mpmd
from pax_mpmd import errors
from pax_mpmd import main
from pax_mpmd import schedules
from pax_mpmd.pax import backend
from pax_mpmd.pax import experiments
from pax_mpmd.pax import launch
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import mixin
from pax_mpmd.pax import pax_flags
from pax_mpmd.pax import transform
from tests.pax import tiny

_PIPELINE = transform.PipelineConfig(4, 1, microbatches.Microbatching(8), 4)
_CIRCULAR = transform.PipelineConfig(2, 3, microbatches.Microbatching(8), 2)


class Unset(tiny.TinyLm):
  """An experiment that leaves the number of stages and microbatches open."""

  NUM_STAGES = None
  NUM_MICROBATCHES = None


def test_help_is_instant_and_tells_the_flags(capsys):
  """--help prints without importing Pax, and names every --mpmd flag."""
  main.run(['pax-mpmd', '--help'])
  text = capsys.readouterr().out
  for flag in launch.FLAGS.flags_by_module_dict()[launch.__name__]:
    assert f'--{flag.name}' in text
  code = (
      'import sys; from pax_mpmd import main; main.run(["x", "--help"]);'
      ' sys.exit("paxml" in sys.modules or "jax" in sys.modules)'
  )
  subprocess.run([sys.executable, '-c', code], check=True, stdout=subprocess.DEVNULL)


def test_an_unknown_experiment_lists_similar_names():
  """A typing error in --exp gets the names that are close to it."""
  experiment_registry.register(tiny.TinyCircular, allow_overwrite=True)
  with pytest.raises(errors.ConfigError, match=r'tiny\.TinyCircular'):
    experiments.find_experiment('tests.pax.tiny.TinyCircula')
  with pytest.raises(errors.ConfigError, match='no registered experiment'):
    experiments.find_experiment('no_such_module.Experiment')


def test_an_experiment_module_with_a_broken_import_shows_that(tmp_path, monkeypatch):
  """A module that exists but can't be imported isn't reported as an unknown experiment."""
  (tmp_path / 'broken_experiments.py').write_text('import module_that_is_not_there\n')
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ModuleNotFoundError, match='module_that_is_not_there'):
    experiments.find_experiment('broken_experiments.Lm')


def test_mixing_in():
  """The class keeps its name and fields, gets the flags' values, and the mixin comes first."""
  mixed = experiments.mpmd_experiment(tiny.TinyLm, schedule='gpipe', num_actors=4, runtime='local')
  assert (mixed.__name__, mixed.__module__) == ('TinyLm', tiny.TinyLm.__module__)
  assert mixed.__mro__[1] is mixin.MpmdPipelineMixin
  assert (mixed.SCHEDULE, mixed.NUM_ACTORS, mixed.RUNTIME) == ('gpipe', 4, 'local')
  again = experiments.mpmd_experiment(mixed, schedule='1f1b')
  assert (again.SCHEDULE, again.RUNTIME) == ('1f1b', 'local')
  assert again.__mro__.count(mixin.MpmdPipelineMixin) == 1


def test_numbers_for_an_experiment_that_leaves_them_open():
  """--mpmd_num_stages and --mpmd_num_microbatches fill what is None and override nothing."""
  mixed = experiments.mpmd_experiment(Unset, num_stages=4, num_microbatches=2)
  pipeline = mixed().mpmd_pipeline()
  assert (pipeline.num_ranks, pipeline.circular_repeat, pipeline.num_devices) == (4, 1, 4)
  assert pipeline.microbatching == microbatches.Microbatching(num_microbatches=2)
  with pytest.raises(errors.ConfigError, match=r'--mpmd_num_stages=2.*NUM_STAGES=4'):
    experiments.mpmd_experiment(tiny.TinyLm, num_stages=2)


@pytest.mark.parametrize(
    'spec, pipeline, expected',
    [
        (None, _PIPELINE, schedules.OneFOneB(num_stages=4)),
        (None, _CIRCULAR, schedules.InterleavedOneFOneB(num_stages=6, num_actors=2)),
        ('gpipe', _PIPELINE, schedules.GPipe(num_stages=4)),
        (pax_fiddle.Config(schedules.GPipe), _PIPELINE, schedules.GPipe(num_stages=4)),
        (schedules.GPipe(num_stages=4), _PIPELINE, schedules.GPipe(num_stages=4)),
    ],
)
def test_schedules(spec, pipeline, expected):
  """Names, Fiddle configs without numbers and objects give the schedule of the pipeline."""
  actual = backend.make_schedule(spec, pipeline)
  assert type(actual) is type(expected)
  assert actual.placement() == expected.placement()
  assert actual.tasks(12) == expected.tasks(12)


def test_a_schedule_of_another_pipeline_is_refused():
  """The numbers of both are named."""
  with pytest.raises(errors.ConfigError, match='for 3 stages, but the experiment has 4'):
    backend.make_schedule(schedules.GPipe(num_stages=3), _PIPELINE)


def test_runtimes():
  """'local', a Fiddle config and an object are runtimes; other names are refused."""
  assert isinstance(backend.make_runtime('local'), pax_mpmd.LocalRuntime)
  config = pax_fiddle.Config(pax_mpmd.LocalRuntime)
  assert isinstance(backend.make_runtime(config), pax_mpmd.LocalRuntime)
  with pytest.raises(errors.ConfigError, match="'slurm'"):
    backend.make_runtime('slurm')


def test_the_batch_is_that_of_the_whole_pipeline(monkeypatch):
  """A driver with one device builds data sets for as many as the mesh has, and no longer after."""

  class Counting:
    """Stands for a data set mixin that computes its batch from the devices."""

    def datasets(self):
      return [jax.local_device_count()]

  experiment = type('Lm', (mixin.MpmdPipelineMixin, Counting, tiny.TinyLm), {})()
  monkeypatch.setattr(jax, 'local_device_count', lambda: 1)
  assert experiment.datasets() == [4]
  assert jax.local_device_count() == 1


def test_the_driver_gets_the_devices_of_the_mesh_and_actors_do_not():
  """JAX starts with as many CPU devices as the mesh has; the environment is as before."""
  code = (
      'import os, jax; from pax_mpmd.pax import launch; from tests.pax import tiny;'
      ' launch.start_backend(tiny.TinyCircular); print(jax.device_count());'
      ' print("XLA_FLAGS" in os.environ)'
  )
  env = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  done = subprocess.run(
      [sys.executable, '-c', code], env=env, check=True, capture_output=True, text=True
  )
  assert done.stdout.split()[-2:] == ['2', 'False']


@pytest.fixture
def command_line() -> Iterator[Callable[..., None]]:
  """A function that reads flags as the command line does; undone afterwards."""

  def parse(*args: str) -> None:
    argv = ['pax-mpmd', '--mpmd', '--job_log_dir=/nowhere', *args]
    absl_flags.flags_parser(argv)

  with flagsaver.flagsaver():
    yield parse
  launch.FLAGS.unparse_flags()
  for name in ('fdl_config', 'fdl_set', 'fiddler', 'exp'):
    launch.FLAGS[name].unparse()


@pytest.mark.parametrize(
    'flag, words',
    [
        ('--mode=decode_once', r'=decode_once .*train or eval.*without --mpmd.*not pipelined'),
        ('--mode=infer', r'--mode=infer .*train or eval.*without --mpmd'),
        ('--decode_during_train', r'--decode_during_train=True .*--mode=decode'),
        ('--enable_auto_sharding', r'--enable_auto_sharding=True .*schedule.*Leave'),
        ('--maybe_use_persistence_checkpointing', r'persistence.*1\.4\.0.*Leave'),
        ('--multiprocess_gpu', r'--multiprocess_gpu=True .*driver is one process'),
        ('--study=a', r'--study=a .*tun'),
    ],
)
def test_flags_of_pax_that_are_refused(flag: str, words: str, command_line):
  """What can't be had is refused by name, with what to do instead; so it is under stock Pax."""
  command_line(flag)
  with pytest.raises(errors.ConfigError, match=words):
    pax_flags.check()
  experiment = experiments.mpmd_experiment(tiny.TinyLm, runtime='local')()
  with pytest.raises(errors.ConfigError, match=words):
    experiment.partitioner()


def test_settings_of_jax_that_would_not_reach_the_actors(command_line):
  """JAX looks for NaN where it runs a program itself, which is not where the stages run."""
  command_line()
  pax_flags.check()
  with jax.debug_nans(True), pytest.raises(errors.ConfigError, match=r'jax_debug_nans.*driver'):
    pax_flags.check()


def parameterized() -> Any:
  """A Fiddle config of an experiment, as `--fdl_config` names one."""
  return pax_fiddle.Config(
      parameterized_experiment.ParameterizedExperiment, task=tiny.TinyLm().task()
  )


def edit(experiment: Any) -> None:
  """A fiddler."""
  experiment.SCHEDULE = fdl.Config(schedules.ZeroBubbleH1)


@pytest.mark.parametrize('style', ['legacy', 'new'])
def test_fiddle_flags_set_attributes(style: str, command_line):
  """Sizes, schedule and actors can be chosen on the command line, of any experiment class."""
  name, values = f'{tiny.__name__}.TinyLm', dict(NUM_LAYERS=4, SCHEDULE='"gpipe"', NUM_ACTORS=2)
  if style == 'legacy':
    command_line(f'--fdl_config={name}', *(f'--fdl.{k}={v}' for k, v in values.items()))
  else:
    command_line(f'--fdl=config:{name}', *(f'--fdl=set:{k}={v}' for k, v in values.items()))
  experiment = launch.experiment_of_flags()
  assert isinstance(experiment, mixin.MpmdPipelineMixin) and isinstance(experiment, tiny.TinyLm)
  stage = experiment.task().model.lm_tpl.stacked_transformer_tpl.pipeline_stage
  assert stage.num_layers == 1
  schedule = experiment.mpmd_backend().schedule
  assert type(schedule) is schedules.GPipe
  assert (schedule.num_stages, schedule.num_actors) == (4, 2)


def test_fiddle_configs_and_fiddlers(command_line):
  """An experiment that a Fiddle config describes gets its mesh from its task."""
  command_line(
      f'--fdl_config={__name__}.parameterized', f'--fiddler={__name__}.edit_task',
      '--fdl.task.train.num_train_steps=7', '--mpmd_schedule=gpipe',
  )
  experiment = launch.experiment_of_flags()
  assert experiment.task().train.num_train_steps == 7
  assert experiment.task().summary_verbosity == 1
  assert type(experiment.mpmd_backend().schedule) is schedules.GPipe
  launch.start_backend(experiment)
  assert experiment.mpmd_pipeline().num_devices == 4


def edit_task(config: Any) -> None:
  """A fiddler of a config."""
  config.task.summary_verbosity = 1


def test_fiddlers_of_classes(command_line):
  """A fiddler may set what a literal can't say: a Fiddle config of a schedule."""
  command_line(f'--fdl_config={tiny.__name__}.TinyLm', f'--fiddler={__name__}.edit')
  assert type(launch.experiment_of_flags().mpmd_backend().schedule) is schedules.ZeroBubbleH1


@pytest.mark.parametrize(
    'flags, words',
    [
        (['--exp=a.B', '--fdl_config=a.B'], r'--exp=a\.B and Fiddle flags'),
        (['--exp=a.B', '--fdl.NUM_LAYERS=4'], r'--exp=a\.B.*--fdl_config=a\.B in place'),
        (
            [f'--fdl_config={tiny.__name__}.TinyLm', '--fdl.NUM_LAYRS=4'],
            r"--fdl\.NUM_LAYRS=4.*TinyLm has no attribute 'NUM_LAYRS'.*NUM_LAYERS",
        ),
        ([f'--fdl_config={tiny.__name__}.batch(0)'], 'not an experiment'),
        (
            [f'--fdl_config={tiny.__name__}.TinyLm', '--mpmd_num_stages=2'],
            r'--mpmd_num_stages=2.*NUM_STAGES=4.*--fdl\.NUM_STAGES',
        ),
    ],
)
def test_fiddle_flags_that_are_refused(flags: list[str], words: str, command_line):
  """What Pax would ignore, and misspelt names, are refused."""
  command_line(*flags)
  with pytest.raises(errors.ConfigError, match=words):
    launch.experiment_of_flags()
