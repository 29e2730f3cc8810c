"""When an actor counts as stuck, on a clock of the test's own."""

from __future__ import annotations

import time

import pytest

from pax_mpmd.runtime.failure import Failure
from pax_mpmd.runtime.failure import FailureKind
from pax_mpmd.runtime.failure import primary
from pax_mpmd.runtime.ray_monitor import Limits
from pax_mpmd.runtime.ray_monitor import Watch


@pytest.fixture
def clock(monkeypatch):
  """`clock[0]` is what time.monotonic gives."""
  now = [1000.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  return now


def _reply(
    index=3, waits_for='', age=1.0, longest=0.01, steps=5, running=True, writing=False, written=0
):
  return {
      'running': running,
      'step': 7,
      'index': index,
      'age': age,
      'waits_for': waits_for,
      'stage': 1,
      'instruction': f'run {index}',
      'longest': longest,
      'steps': steps,
      'compiled': (0, 0),
      'writing': writing,
      'written': written,
  }


def _watch_for(
    watch, clock, seconds, replies, loading=False, stepping=True, first_step=False, writing=False
):
  """Looks every half second; actors without a reply don't answer. (Failure, after how long)."""
  start = clock[0]
  while clock[0] - start < seconds:
    clock[0] += 0.5
    for actor, reply in enumerate(replies):
      watch.asks(actor)
      if reply is not None:
        watch.answered(actor, reply)
    failure = watch.look(loading, stepping, first_step, writing)
    if failure is not None:
      return failure, clock[0] - start
  return None, seconds


def test_no_answer(clock):
  """An actor that leaves a ping unanswered for six seconds is stuck, where it was last seen."""
  watch = Watch(2, Limits())
  _watch_for(watch, clock, 1, [_reply(1), _reply(2)])
  failure, after = _watch_for(watch, clock, 60, [_reply(1), None])
  assert (failure.actor, failure.kind, failure.instruction) == (1, FailureKind.STUCK, 'run 2')
  assert 6 <= after <= 7


def test_compiling_takes_its_time(clock):
  """While programs compile, an answer may take longer, and nothing has to move."""
  watch = Watch(2, Limits())
  assert _watch_for(watch, clock, 30, [_reply(), None], loading=True, stepping=False)[0] is None
  watch = Watch(1, Limits())
  assert _watch_for(watch, clock, 900, [_reply()], loading=True, stepping=False)[0] is None


def test_nothing_moves(clock):
  """Among actors that answer but don't move, the one that works is blamed, not who waits for it."""
  watch = Watch(3, Limits())
  replies = [_reply(1, waits_for='recv', age=90), _reply(2, age=8), _reply(3, waits_for='recv')]
  failure, after = _watch_for(watch, clock, 60, replies)
  assert (failure.actor, failure.stage, failure.instruction) == (1, 1, 'run 2')
  assert 8 <= after <= 9.5


@pytest.mark.parametrize(
    ('longest', 'first_step', 'allowed'), [(2.0, False, 40), (0.01, True, 300), (20.0, True, 400)]
)
def test_slow_steps_are_not_stuck(clock, longest, first_step, allowed):
  """Long instructions so far, and a first step, make the monitor patient, but not for ever."""
  watch = Watch(1, Limits())
  failure, after = _watch_for(
      watch, clock, 1000, [_reply(longest=longest)], first_step=first_step
  )
  assert failure is not None
  assert allowed < after <= allowed + 1.5


def test_progress_is_no_stall(clock):
  """One actor that gets on keeps the step alive."""
  watch = Watch(2, Limits())
  for index in range(100):
    failure, _ = _watch_for(watch, clock, 4, [_reply(0, waits_for='recv'), _reply(index)])
    assert failure is None


@pytest.mark.parametrize('stepping', [True, False])
def test_writing_takes_its_time(clock, stepping):
  """While a checkpoint is written nothing needs to move for minutes, but then it is stuck."""
  waits = 'a checkpoint to be written' if stepping else ''
  stuck = _reply(waits_for=waits, running=stepping, writing=True)
  watch = Watch(2, Limits())
  failure, after = _watch_for(
      watch, clock, 1000, [_reply(running=False), stuck], stepping=stepping, writing=True
  )
  assert (failure.actor, failure.kind) == (1, FailureKind.STUCK)
  assert 300 < after < 310
  assert 'checkpoint' in failure.message and 'write_timeout_s' in failure.message
  # As long as arrays get written, it is not.
  watch = Watch(1, Limits())
  for written in range(4):
    replies = [_reply(waits_for=waits, running=stepping, writing=True, written=written)]
    failure, _ = _watch_for(watch, clock, 200, replies, stepping=stepping, writing=True)
    assert failure is None


def test_driver_was_stopped(clock):
  """A pause of the driver itself is not held against the actors."""
  watch = Watch(1, Limits())
  _watch_for(watch, clock, 3, [None])
  clock[0] += 3600
  failure, after = _watch_for(watch, clock, 60, [None])
  assert failure is not None
  assert 2 <= after <= 7


def test_primary_cause():
  """A raised exception comes before a death, a death before a stall, and a lost peer last."""
  reports = [Failure(kind, actor, '') for actor, kind in enumerate(reversed(FailureKind))]
  assert [failure.kind for failure in sorted(reports, key=lambda f: f.kind)] == [
      FailureKind.UNREADABLE,
      FailureKind.EXCEPTION,
      FailureKind.DEATH,
      FailureKind.STUCK,
      FailureKind.LOST_PEER,
  ]
  assert primary(reports).kind is FailureKind.UNREADABLE
  assert primary(reports[:2]).kind is FailureKind.STUCK
