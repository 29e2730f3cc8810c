"""The mixin that makes a Pax experiment run through MPMD."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from typing import Any
from unittest import mock

import jax
from paxml import base_experiment

from pax_mpmd.pax import backend as backend_lib
from pax_mpmd.pax import executor as executor_lib
from pax_mpmd.pax import partitioner as partitioner_lib
from pax_mpmd.pax import pax_flags
from pax_mpmd.pax import programs
from pax_mpmd.pax import status as status_lib
from pax_mpmd.pax import stored
from pax_mpmd.pax import transform

__all__ = ['MpmdPipelineMixin']


class MpmdPipelineMixin(base_experiment.BaseExperiment):
  """Put first among the bases of an experiment, it runs that on pipeline actors:

      @experiment_registry.register
      class MyMpmdLm(MpmdPipelineMixin, MyPipelinedLm):
        SCHEDULE = '1f1b'

  The experiment then trains under `python -m paxml.main` and `python -m pax_mpmd.main` alike. One
  that isn't pipelined says in NUM_STAGES into how many stages to cut its layers, and in
  NUM_MICROBATCHES or MICROBATCH_SIZE how to split a batch; pipelined ones have these anyway.

  Attributes:
    SCHEDULE: a short name (a key of `pax_mpmd.schedules.NAMES`), the path of a .csv table, a
      `pax_mpmd.schedules.Schedule` or a Fiddle config of one; `num_stages` and `num_actors` may be
      left out of it. None: 1F1B, interleaved where actors own several stages.
    NUM_ACTORS: number of actors; None: one for each pipeline rank (NUM_STAGES).
    RUNTIME: 'ray', 'local' (threads of the driver), a runtime or a Fiddle config of one. None: Ray.
    TRACE_STEPS: how many steps of each kind to show in traces, which are written into the folder
      mpmd_trace of the job_log_dir; from the third step on.
  """

  SCHEDULE: Any = None
  NUM_ACTORS: int | None = None
  RUNTIME: Any = None
  TRACE_STEPS: int = 0

  def task(self) -> Any:
    """The task's config with the MPMD layers in it.

    Raises:
      ConfigError: if the experiment can't run through MPMD; names the field.
    """
    transform.check_experiment(self)
    return self._mpmd_task(super().task())[0]

  def mpmd_pipeline(self) -> transform.PipelineConfig:
    """The numbers of the experiment's pipeline."""
    return self._mpmd_task(self.task())[1]

  def _mpmd_task(self, task: Any) -> tuple[Any, transform.PipelineConfig]:
    return transform.mpmd_task(task, **transform.stages_of(self))

  def mpmd_backend(self) -> backend_lib.Backend:
    """A backend with the experiment's schedule and runtime; starts nothing."""
    pipeline = self.mpmd_pipeline()
    schedule = backend_lib.make_schedule(self.SCHEDULE, pipeline, self.NUM_ACTORS)
    return backend_lib.Backend(
        schedule,
        self.RUNTIME,
        trace_steps=self.TRACE_STEPS,
        trace_dir=pax_flags.job_log_dir() / 'mpmd_trace',
    )

  def partitioner(self) -> partitioner_lib.MpmdPartitioner:
    """The partitioner that distributes the steps.

    Raises:
      ConfigError: if a flag of Pax can't be had with MPMD pipelining.
    """
    pax_flags.check()
    if pax_flags.is_eval_mode():
      stored.install().lazy = True  # all that this job restores is for the actors
    backend = self.mpmd_backend()
    pipeline = self.mpmd_pipeline()
    schedule = backend.schedule
    n = pipeline.devices_per_actor
    status_lib.status.say(
        f'{pipeline.num_stages} stages on {schedule.num_actors} actors'
        f'{f" of {n} devices" if n > 1 else ""},'
        f' schedule {type(schedule).__name__}; reading the data set'
    )
    return partitioner_lib.MpmdPartitioner(
        self.task(), pipeline, backend, init_is_eval=pax_flags.is_eval_mode()
    )

  def executor(self) -> executor_lib.MpmdExecutor:
    """Pax's train loop with progress, clean ends and checkpoints in pieces."""
    return executor_lib.MpmdExecutor()

  def eval_programs(self) -> list[programs.EvalWithProgress]:
    """Pax's eval programs (of a `--mode=eval` job, or of training) with progress."""
    return programs.with_progress(super().eval_programs(), waits=pax_flags.is_eval_mode())

  def datasets(self) -> Any:
    with self._devices_of_the_pipeline():
      return super().datasets()

  def train_datasets(self) -> Any:
    with self._devices_of_the_pipeline():
      return super().train_datasets()

  def eval_datasets(self) -> Any:
    with self._devices_of_the_pipeline():
      return super().eval_datasets()

  @contextlib.contextmanager
  def _devices_of_the_pipeline(self) -> Iterator[None]:
    """Lets the data sets see as many devices as the whole pipeline has.

    Experiments compute their batch from `jax.local_device_count()`. Under `pax_mpmd.main` the
    driver has that many virtual devices; under `paxml.main` JAX has started before the experiment
    was looked at, and has one.
    """
    needed = transform.num_devices(
        getattr(self, 'ICI_MESH_SHAPE', None), getattr(self, 'DCN_MESH_SHAPE', None)
    )
    if jax.local_device_count() >= needed:
      yield
      return
    with mock.patch.object(jax, 'local_device_count', lambda: needed), mock.patch.object(
        jax, 'device_count', lambda: needed
    ):
      yield
