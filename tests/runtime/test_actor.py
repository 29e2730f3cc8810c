"""The actor behind both runtimes."""

from __future__ import annotations

from pax_mpmd.runtime import xla
from pax_mpmd.runtime.actor import Actor
from pax_mpmd.runtime.executables import ExecutableCache
from pax_mpmd.runtime.failure import Failure


def test_after_a_failure_every_answer_is_that_failure():
  """Messages under way when something fails don't add errors of their own that hide the cause."""
  device = xla.local_devices()[0]
  actor = Actor(0, device, ExecutableCache(device), transport=None)
  cause = actor.handle(0, (), 'fetch', ([(17, 0, 4)],))
  assert isinstance(cause, Failure) and 'KeyError: 17' in cause.message
  assert actor.handle(1, (), 'fetch', ([(18, 0, 4)],)) is cause
  assert actor.handle(2, (), 'put', ([],)) is cause
