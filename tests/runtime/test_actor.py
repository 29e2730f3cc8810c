"""The actor behind both runtimes."""

from __future__ import annotations

from pax_mpmd.runtime import xla
from pax_mpmd.runtime.actor import Actor
from pax_mpmd.runtime.devices import ActorDevices
from pax_mpmd.runtime.executables import ExecutableCache
from pax_mpmd.runtime.failure import brief
from pax_mpmd.runtime.failure import Failure
from tests.messages import assert_readable


def test_after_a_failure_every_answer_is_that_failure():
  """Messages under way when something fails don't add errors of their own that hide the cause."""
  devices = ActorDevices(xla.local_devices()[:1])
  actor = Actor(0, devices, ExecutableCache(devices), transport=None)
  cause = actor.handle(0, (), 'fetch', ([(17, 0, 4)],))
  assert isinstance(cause, Failure) and 'KeyError: 17' in cause.message
  assert actor.handle(1, (), 'fetch', ([(18, 0, 4)],)) is cause
  assert actor.handle(2, (), 'put', ([],)) is cause


def test_a_long_exception_is_cut_in_the_message():
  """XLA's texts can be as long as the program; the traceback keeps all of it."""
  error = RuntimeError('out of memory\n\n' + 'allocation of %fusion.12 = f32[8,8]\n' * 500)
  assert brief(error).splitlines()[0] == 'RuntimeError: out of memory'
  assert brief(error).endswith(' ...') and len(brief(error).splitlines()) == 4
  assert len(brief(ValueError('x' * 10000))) < 700
  assert brief(ValueError('a\nb')) == 'ValueError: a\nb'
  failure = Failure(kind=0, actor=1, message=brief(error), instruction='run 2F0: %1 -> %2')
  assert_readable(str(failure.to_error()))
