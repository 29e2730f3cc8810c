"""Trains a Pax experiment; with --mpmd its pipeline runs on long-lived actors.

  python -m pax_mpmd.main --exp=NAME --job_log_dir=DIR           exactly like paxml.main
  python -m pax_mpmd.main --exp=NAME --job_log_dir=DIR --mpmd    the same experiment through MPMD

With --mpmd:
  --mpmd_schedule=NAME    gpipe, 1f1b, eager_1f1b, interleaved_1f1b, bfs, zb_h1, zb_v, dualpipe_v,
                          or a table: path/to/schedule.csv. Default: the experiment's SCHEDULE,
                          else 1f1b (interleaved_1f1b where each actor owns several stages).
  --mpmd_num_actors=N     number of actors. Default: NUM_STAGES.
  --mpmd_runtime=ray      ray (a process for each actor) or local (threads of this process).
  --mpmd_dry_run          trace, plan and verify the train step, print it, and start nothing.
  --mpmd_max_restarts=N   start again, at most N times, when an actor dies, fails or gets stuck.
                          Default: 0, the run ends with the error.
  --mpmd_trace_steps=K    show K steps, from the third on, as a trace for ui.perfetto.dev, a picture
                          and a table, in DIR/mpmd_trace.
  --mpmd_num_stages=N, --mpmd_num_microbatches=N
                          for experiments that have no NUM_STAGES or NUM_MICROBATCHES: its layers
                          are cut into N stages.

A pipelined experiment (NUM_STAGES, NUM_MICROBATCHES or MICROBATCH_SIZE, ICI_MESH_SHAPE =
[NUM_STAGES, replica, data, mdl]) says how it is cut; any other over a stack of Transformer layers,
or a model with pipeline_yield calls of its own, needs the two flags and ICI_MESH_SHAPE = [replica,
data, mdl]. An actor has replica * data * mdl devices. --exp is
the full name of a registered class, such as configs.stdlib_lm.StdlibLm; its module is imported. In
its place Fiddle flags can build the experiment: --fdl_config=configs.stdlib_lm.StdlibLm
--fdl.NUM_LAYERS=4 --fdl.SCHEDULE='"gpipe"'. With --eval_on_test the test split is evaluated every
EVAL_INTERVAL_STEPS; --mode=eval evaluates checkpoints as they come; both as in paxml.main. To
decode, run --mode=decode_once without --mpmd, on the same checkpoints.

The same command again goes on from the last checkpoint; --mpmd_max_restarts does that by itself
after the failure of an actor, in training and with --mode=eval. Ctrl-C and SIGTERM end training
after the step in progress, with a checkpoint; before the first step is done, in an evaluation job,
or the second time, at once.

--helpfull shows Pax's flags too.
"""

from __future__ import annotations

from collections.abc import Sequence
import os
import sys
import time
import warnings

__all__ = ['run']

_MPMD_FLAGS = ('mpmd', 'mpmd_dry_run')


def run(argv: Sequence[str] | None = None) -> None:
  """The command line: `python -m pax_mpmd.main` and the console script `pax-mpmd`.

  Args:
    argv: the arguments with the program's name first; None means `sys.argv`.
  """
  started = time.monotonic()
  argv = list(sys.argv if argv is None else argv)
  if any(arg in ('--help', '-help', '-h', '--h') for arg in argv[1:]):
    print(__doc__.strip())
    return
  mpmd = any(arg.lstrip('-').split('=')[0] in _MPMD_FLAGS for arg in argv[1:])
  if mpmd:
    # Before anything slow: importing Pax takes a while. Nothing of this for stock Pax.
    from pax_mpmd import restarts
    from pax_mpmd import signals

    restarts.restarts.begin()
    started = restarts.restarts.started

    def say(text: str) -> None:
      print(f'[{time.monotonic() - started:4.0f}s] {text}', flush=True)

    signals.handlers.say = say
    signals.handlers.importing = True
    signals.handlers.install()
    say('importing Pax')
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    warnings.filterwarnings('ignore', message='pkg_resources is deprecated')
  from pax_mpmd.pax import launch  # imports Pax

  launch.run(argv, quiet=mpmd, started=started)


if __name__ == '__main__':
  run()
