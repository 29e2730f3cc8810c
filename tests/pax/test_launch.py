"""The command line's parts: finding an experiment, mixing MPMD in, schedules and runtimes."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
from paxml import experiment_registry
from praxis import pax_fiddle
import pytest

import pax_mpmd
from pax_mpmd import errors
from pax_mpmd import main
from pax_mpmd import schedules
from pax_mpmd.pax import backend
from pax_mpmd.pax import launch
from pax_mpmd.pax import microbatches
from pax_mpmd.pax import mixin
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
    launch.find_experiment('tests.pax.tiny.TinyCircula')
  with pytest.raises(errors.ConfigError, match='no registered experiment'):
    launch.find_experiment('no_such_module.Experiment')


def test_an_experiment_module_with_a_broken_import_shows_that(tmp_path, monkeypatch):
  """A module that exists but can't be imported isn't reported as an unknown experiment."""
  (tmp_path / 'broken_experiments.py').write_text('import module_that_is_not_there\n')
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ModuleNotFoundError, match='module_that_is_not_there'):
    launch.find_experiment('broken_experiments.Lm')


def test_mixing_in():
  """The class keeps its name and fields, gets the flags' values, and the mixin comes first."""
  mixed = launch.mpmd_experiment(tiny.TinyLm, schedule='gpipe', num_actors=4, runtime='local')
  assert (mixed.__name__, mixed.__module__) == ('TinyLm', tiny.TinyLm.__module__)
  assert mixed.__mro__[1] is mixin.MpmdPipelineMixin
  assert (mixed.SCHEDULE, mixed.NUM_ACTORS, mixed.RUNTIME) == ('gpipe', 4, 'local')
  again = launch.mpmd_experiment(mixed, schedule='1f1b')
  assert (again.SCHEDULE, again.RUNTIME) == ('1f1b', 'local')
  assert again.__mro__.count(mixin.MpmdPipelineMixin) == 1


def test_numbers_for_an_experiment_that_leaves_them_open():
  """--mpmd_num_stages and --mpmd_num_microbatches fill what is None and override nothing."""
  mixed = launch.mpmd_experiment(Unset, num_stages=4, num_microbatches=2)
  pipeline = mixed().mpmd_pipeline()
  assert (pipeline.num_ranks, pipeline.circular_repeat, pipeline.num_devices) == (4, 1, 4)
  assert pipeline.microbatching == microbatches.Microbatching(num_microbatches=2)
  with pytest.raises(errors.ConfigError, match=r'--mpmd_num_stages=2.*NUM_STAGES=4'):
    launch.mpmd_experiment(tiny.TinyLm, num_stages=2)


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
