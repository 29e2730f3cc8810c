"""How a command line ends: by signals, and by starting again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from pax_mpmd.runtime.processes import Process

# Without Pax a start takes a moment only. `how` is the first argument.
_RESTARTING = """
import atexit, os, signal, subprocess, sys, threading
from pax_mpmd import restarts, signals
again, handlers, how = restarts.restarts, signals.handlers, sys.argv[1]
again.begin()
handlers.importing = True
handlers.install()
handlers.importing = False
print('start', os.getpid(), again.used, len(os.listdir('/proc/self/fd')), os.environ.get('OURS'))
assert restarts.VARIABLE not in os.environ
os.environ['OURS'] = '1'
os.set_inheritable(os.dup(1), True)
child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print('child', child.pid, flush=True)
atexit.register(print, 'cleaned up', flush=True)
handlers.begin_end()
def say(text):
  print(text, flush=True)
  if how == 'late' and 'restart' in text:
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
handlers.say = say
if how == 'early':
  atexit.register(os.kill, os.getpid(), signal.SIGTERM)
if again.at_exit(2, lambda: 'from step 7'):
  print('again', flush=True)
else:
  print('no more', flush=True)
  child.kill()
sys.exit(1)
"""


def _restart(how: str) -> tuple[int, str]:
  done = subprocess.run(
      [sys.executable, '-c', _RESTARTING, how], capture_output=True, text=True, timeout=60,
      check=False,
  )
  assert not done.stderr
  for pid in re.findall(r'child (\d+)', done.stdout):
    assert not Process.running(int(pid)).alive()
  return done.returncode, done.stdout


def test_starting_again():
  """The same command, in the same process, so many times: exit handlers run, nothing is handed on.

  Neither variables, open files nor children of the old program are there in the new one.
  """
  status, output = _restart('')
  starts = re.findall(r'start (\d+) (\d+) (\d+) (\w+)', output)
  assert [(used, ours) for _, used, _, ours in starts] == [(n, 'None') for n in '012']
  assert len({pid for pid, *_ in starts}) == len({files for *_, files, _ in starts}) == 1
  lines = [line for line in output.splitlines() if not re.match('start|child', line)]
  expected = []
  for number in (1, 2):
    expected += ['again', 'cleaned up', f'restart {number} of 2: from step 7']
  assert lines == [*expected, 'no more', 'cleaned up']
  assert status == 1


@pytest.mark.parametrize('how', ['early', 'late'])
def test_a_signal_between_two_starts(how: str):
  """SIGTERM on the way from one start to the next ends the command, whenever it comes."""
  status, output = _restart(how)
  assert status == 128 + signal.SIGTERM
  if how == 'early':
    assert output.endswith('SIGTERM: not started again\n')
    assert output.count('start ') == 1
  else:  # in the very last moment: the next program hears of it as soon as it has its handlers
    assert output.endswith('restart 1 of 2: from step 7\nSIGTERM: ended; nothing had begun\n')


_SIGNALLED = """
import ctypes, os, sys, time
from pax_mpmd import signals
handlers = signals.Signals(limit_s=0.5)
how = sys.argv[1]
handlers.importing = how == 'importing'
handlers.install()
if how == 'forking':
  child = os.fork()
  if not child:
    time.sleep(60)
  print(child, flush=True)
def wait():
  if how == 'outside':
    print('ready', flush=True)
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)  # the second never returns
  print('ready', flush=True)
  time.sleep(30)
try:
  if how == 'training':
    ends = []
    def finish(name):
      ends.append(name)
      print('asked', flush=True)
      return len(ends) == 1
    with handlers.training(finish):
      wait()
  else:
    wait()
finally:
  print('unwound', flush=True)
"""


def _start(how: str) -> subprocess.Popen:
  """A process that has said that it is ready; what it says before stands in `said`."""
  process = subprocess.Popen(
      [sys.executable, '-c', _SIGNALLED, how], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
      text=True,
  )
  process.said = ''
  while (line := process.stdout.readline()) != 'ready\n':
    process.said += line
    assert line, process.said
  return process


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    'how, said',
    [
        ('importing', '{}: ended; nothing had begun\n'),
        ('running', '{}: ending at once, nothing to save\nunwound\n'),
        ('outside', '{}: not ended after 0 s; ending all processes\n'),
    ],
)
def test_a_signal_ends(how: str, said: str, number: int):
  """One line, a shell's exit status, no traceback; also in code outside of Python."""
  process = _start(how)
  time.sleep(0.2)  # so that it is where it waits
  process.send_signal(number)
  output, _ = process.communicate(timeout=20)
  assert output == said.format(signal.Signals(number).name)
  assert process.returncode == 128 + number


def test_a_train_loop_is_asked_first():
  """The first signal leaves it to the loop, which may take its time; the second ends it at once."""
  process = _start('training')
  process.send_signal(signal.SIGTERM)
  assert process.stdout.readline() == 'asked\n'
  time.sleep(0.8)  # more than the limit
  assert process.poll() is None
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=20)
  assert output == 'asked\nSIGTERM: ending at once, without a checkpoint\nunwound\n'
  assert process.returncode == 128 + signal.SIGTERM


def test_a_forked_child_has_no_handlers():
  """SIGTERM to a child that an input pipeline has forked ends that child alone, without a word."""
  process = _start('forking')
  child = int(process.said)
  os.kill(child, signal.SIGTERM)
  time.sleep(0.8)
  assert process.poll() is None
  assert not Process.running(child).alive()
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=20)
  assert output == 'SIGTERM: ending at once, nothing to save\nunwound\n'
