"""Pax's and JAX's own flags under MPMD: what can't be had is refused, nothing is ignored."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import pathlib
from typing import Any
from unittest import mock

from absl import flags
import jax

from pax_mpmd import errors

__all__ = ['check', 'is_eval_mode', 'job_log_dir', 'notes', 'one_process']

FLAGS = flags.FLAGS

_SAME_CHECKPOINTS = 'the checkpoints are the same'
# Flags of paxml.main, and what to do instead.
_REFUSED = {
    'decode_during_train': (
        'decoding is not pipelined. Leave the flag out, and decode the checkpoints with'
        f' --mode=decode or --mode=decode_once, without --mpmd: {_SAME_CHECKPOINTS}'
    ),
    'enable_auto_sharding': (
        "XLA's automatic sharding is for one SPMD program; here the schedule says what lies where."
        ' Leave the flag out'
    ),
    'maybe_use_persistence_checkpointing': (
        'Pax 1.4.0 has no persistence checkpointer, with or without --mpmd. Leave the flag out'
    ),
    'multiprocess_gpu': (
        'the driver is one process, and the actors take the place of the others. Leave the flag out'
    ),
    'study': (
        'hyperparameter tuning is not supported. Leave the flag out, or tune without --mpmd'
    ),
}
# Settings of JAX (a flag --jax_..., or an environment variable) that would not reach the actors,
# which run programs that the driver has traced.
_REFUSED_SETTINGS = {
    'jax_debug_nans': 'norms of gradients and is_valid_step are in the summaries',
    'jax_debug_infs': 'norms of gradients and is_valid_step are in the summaries',
    'jax_disable_jit': 'the plain experiment can be run with it, without --mpmd',
    'jax_enable_x64': 'Pax computes in float32 or bfloat16',
}
_MODES = ('train', 'eval')


def is_eval_mode() -> bool:
  """Whether this process is a `--mode=eval` job."""
  return bool(FLAGS.is_parsed() and 'mode' in FLAGS and FLAGS.mode == 'eval')


def job_log_dir() -> pathlib.Path:
  """Where this process writes: --job_log_dir, or here if no command line has been read."""
  if FLAGS.is_parsed() and 'job_log_dir' in FLAGS and FLAGS.job_log_dir is not None:
    return pathlib.Path(FLAGS.job_log_dir)
  return pathlib.Path()


def check() -> None:
  """Raises ConfigError if a flag of Pax or a setting of JAX can't be had with MPMD pipelining.

  Does nothing where no command line has been read.
  """
  if not FLAGS.is_parsed() or 'mode' not in FLAGS:
    return
  if FLAGS.mode not in _MODES:
    hint = ''
    if FLAGS.mode.startswith('decode'):
      hint = ' (a pipelined model can not decode in Pax; one that is not pipelined can)'
    raise errors.ConfigError(
        f'--mode={FLAGS.mode} is not supported with --mpmd; it is {" or ".join(_MODES)}. Run it'
        f' without --mpmd{hint}: {_SAME_CHECKPOINTS}.'
    )
  for name, why in _REFUSED.items():
    if FLAGS[name].value:
      raise errors.ConfigError(
          f'--{name}={FLAGS[name].value} is not supported with --mpmd: {why}.'
      )
  for name, hint in _REFUSED_SETTINGS.items():
    if getattr(jax.config, name):
      raise errors.ConfigError(
          f'{name}=True would act on the driver alone, not on the actors, which'
          f' run what it has traced. Set it to false; {hint}.'
      )


def notes() -> list[str]:
  """What to tell the user about flags that act on the driver alone."""
  found = []
  if FLAGS.jax_profiler_port is not None:
    found.append(
        f'--jax_profiler_port={FLAGS.jax_profiler_port} profiles the driver, not the actors'
    )
  return found


@contextlib.contextmanager
def one_process() -> Iterator[None]:
  """Lets `--jax_fully_async_checkpoint` do without `jax.distributed`.

  Pax starts it with that flag, since writing in the background from several processes needs it. The
  driver is one process and writes everything, and its JAX has started already.
  """

  def initialize(*args: Any, **kwargs: Any) -> None:
    del args, kwargs

  if not FLAGS.jax_fully_async_checkpoint:
    yield
    return
  with mock.patch.object(jax.distributed, 'initialize', initialize):
    yield
