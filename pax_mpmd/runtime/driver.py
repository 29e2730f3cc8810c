"""The driver's half that both runtimes share: messages, buffer ids, one error for all."""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable, Collection, Iterator, Sequence
import concurrent.futures
import functools
import itertools
import threading
from typing import Any
import weakref

import numpy as np

from pax_mpmd.compile.program import Aval
from pax_mpmd.errors import CheckpointError
from pax_mpmd.errors import ConfigError
from pax_mpmd.errors import MpmdError
from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.runtime import interpreter
from pax_mpmd.runtime import messages
from pax_mpmd.runtime.buffers import Buffer
from pax_mpmd.runtime.calls import Calls
from pax_mpmd.runtime.sources import Source
from pax_mpmd.runtime.writer import Sink
from pax_mpmd.timeline.record import ActorRecord

__all__ = ['Driver']

Future = concurrent.futures.Future

_PROGRESS_INTERVAL_S = 0.25


class _LoadedPlan:
  """What the driver remembers about a plan."""

  def __init__(self, plan: Plan):
    self.plan = plan
    self.num_steps_done = 0
    self.inline = [interpreter.inline_outputs(actor) for actor in plan.actors]
    self.donated = [
        interpreter.donated_inputs(actor, plan.executables) for actor in plan.actors
    ]


class Driver(abc.ABC):
  """Base of LocalRuntime and RayRuntime; see `base.Runtime` for the public methods."""

  def __init__(self, max_steps_in_flight: int):
    if max_steps_in_flight < 1:
      raise ConfigError(f'max_steps_in_flight must be at least 1, got {max_steps_in_flight}.')
    self._max_steps_in_flight = max_steps_in_flight
    self._num_actors = 0
    self._devices_per_actor = 0
    self._lock = threading.RLock()  # the order of messages
    # Without a cycle, so that a runtime ends when it is dropped, not when memory runs short.
    self._calls = Calls(_weakly(self._kill), _weakly(self._last_known))
    self._next_message: list[int] = []
    self._freed: list[collections.deque[int]] = []
    self._sent_executables: list[set[str]] = []
    self._plans: dict[int, _LoadedPlan] = {}
    self._handles = itertools.count()
    self._tickets = itertools.count()
    self._next_buffer = 0
    self._num_steps = 0
    self._in_flight: collections.deque[tuple[int, list[Future]]] = collections.deque()

  # What a runtime supplies.

  @abc.abstractmethod
  def _start(self, num_actors: int, devices_per_actor: int) -> None:
    """Starts the actors and returns when each takes messages."""

  @abc.abstractmethod
  def _send(self, actor: int, message: tuple, done: Callable[[Any], None]) -> None:
    """Hands `Actor.handle`'s arguments to an actor; `done` gets its result or a Failure."""

  @abc.abstractmethod
  def _send_written(self, actor: int, ticket: int, done: Callable[[Any], None]) -> None:
    """Asks an actor, beside its messages, for `Actor.written`; `done` as in `_send`."""

  @abc.abstractmethod
  def _compile_progress(self, actor: int) -> tuple[int, int]:
    """(programs compiled, programs to compile) of the plan being loaded."""

  @abc.abstractmethod
  def _kill(self) -> None:
    """Ends every actor at once; returns when they are gone."""

  def _last_known(self, actor: int) -> dict[str, Any]:
    """Failure fields that say where an actor was when last heard of."""
    return {}

  # The public methods.

  @property
  def num_actors(self) -> int:
    return self._num_actors

  def start(self, num_actors: int, devices_per_actor: int = 1) -> None:
    with self._lock:
      self._calls.check_usable()
      if (self._num_actors, self._devices_per_actor) == (num_actors, devices_per_actor):
        return
      if self._num_actors == num_actors:
        raise ConfigError(
            f'The actors of this runtime have {self._devices_per_actor} devices each, and a mesh of'
            f' {devices_per_actor} is asked for. Steps that share a runtime need meshes of the same'
            ' size; else give each its own runtime.'
        )
      if self._num_actors:
        raise ConfigError(
            f'This runtime already runs {self._num_actors} actors, and {num_actors} are asked '
            'for. Steps that share a runtime need schedules with the same num_actors; else give '
            'each its own runtime.'
        )
      if num_actors < 1:
        raise ConfigError(f'num_actors must be at least 1, got {num_actors}.')
      self._next_message = [0] * num_actors
      self._freed = [collections.deque() for _ in range(num_actors)]
      self._sent_executables = [set() for _ in range(num_actors)]
      self._start(num_actors, devices_per_actor)
      self._num_actors = num_actors
      self._devices_per_actor = devices_per_actor

  def load(self, plan: Plan, on_progress: Callable[[int, int], None] | None = None) -> int:
    assert len(plan.actors) == self._num_actors, (len(plan.actors), self._num_actors)
    with self._lock:
      self._calls.check_usable()
      handle = next(self._handles)
      self._plans[handle] = _LoadedPlan(plan)
      futures = []
      totals = []
      for actor, actor_plan in enumerate(plan.actors):
        executables = interpreter.actor_executables(plan, actor)
        totals.append(len(executables))
        args = (handle, actor_plan, self._unsent(actor, executables), tuple(executables))
        futures.append(self._call(actor, 'load', *args))
      told = None
      waiting = set(futures)
      while waiting:
        finished, waiting = concurrent.futures.wait(
            waiting, _PROGRESS_INTERVAL_S, concurrent.futures.FIRST_COMPLETED
        )
        for future in finished:
          future.result()
        done = sum(
            total if future.done() else min(total, self._compile_progress(actor)[0])
            for actor, (future, total) in enumerate(zip(futures, totals))
        )
        if on_progress is not None and told != done:
          on_progress(done, sum(totals))
          told = done
      return handle

  def run(
      self,
      handle: int,
      inputs: Sequence[Sequence[np.ndarray | Buffer]],
      given_up: Collection[Buffer] = (),
  ) -> list[list[Buffer]]:
    with self._lock:
      self._calls.check_usable()
      self._throttle()
      loaded = self._plans[handle]
      step = self._num_steps
      self._num_steps += 1
      inputs = [
          self._put_if_large(actor, loaded.plan.actors[actor], values)
          for actor, values in enumerate(inputs)
      ]
      # Checked and packed for all actors before the first message: half a step can't be undone.
      packed = [self._pack(a, loaded, values) for a, values in enumerate(inputs)]
      assert len(packed) == self._num_actors, (len(packed), self._num_actors)
      results, futures = [], []
      for actor, (actor_plan, values) in enumerate(zip(loaded.plan.actors, packed)):
        first = self._next_buffer
        self._next_buffer += len(actor_plan.outputs)
        last = [buffer.id for buffer in given_up if buffer.actor == actor]
        future = self._call(actor, 'step', handle, step, values, first, last)
        futures.append(future)
        results.append([
            self._buffer(actor, first + i, actor_plan.slots[slot], future, inline)
            for i, (slot, inline) in enumerate(zip(actor_plan.outputs, loaded.inline[actor]))
        ])
      for actor, values in enumerate(inputs):
        for position in loaded.donated[actor]:
          if isinstance(values[position], Buffer):
            values[position].consumed = True
      for buffer in given_up:
        buffer.consumed = True
      self._in_flight.append((handle, futures))
      return results

  def put(self, actor: int, arrays: Sequence[np.ndarray]) -> list[Buffer]:
    with self._lock:
      self._calls.check_usable()
      values = [np.asarray(array) for array in arrays]
      return self._put(actor, values, [Aval(v.shape, v.dtype.name) for v in values])

  def make(self, wanted: Sequence[Sequence[tuple[Aval, Source]]]) -> list[list[Buffer]]:
    with self._lock:
      self._calls.check_usable()
      made: list[list[Buffer]] = []
      for actor, parts in enumerate(wanted):
        executables = {s.executable.key: s.executable for _, s in parts if s.executable}
        if executables:
          new = self._unsent(actor, executables)
          self._call(actor, 'prepare', new, tuple(executables))
        made.append([])
        for aval, source in parts:
          buffer_id = self._next_buffer
          self._next_buffer += 1
          ready = self._call(actor, 'make', [(buffer_id, aval, source)])
          made[-1].append(self._buffer(actor, buffer_id, aval, ready))
      return made

  def write(self, wanted: Sequence[tuple[Buffer, Sink]]) -> list[Future]:
    with self._lock:
      self._calls.check_usable()
      self._check_readable([buffer for buffer, _ in wanted])
      ticket = next(self._tickets)
      futures = []
      for actor in sorted({buffer.actor for buffer, _ in wanted}):
        mine = [(buffer.id, sink) for buffer, sink in wanted if buffer.actor == actor]
        self._call(actor, 'write', ticket, mine)
        futures.append(self._call_written(actor, ticket))
      return futures

  def fetch(self, buffers: Sequence[Buffer]) -> list[np.ndarray]:
    self._calls.check_usable()
    self._check_readable(buffers)
    results = [np.empty(b.aval.shape, b.aval.numpy_dtype) for b in buffers]
    rounds: dict[int, Iterator] = {}
    large = [i for i, buffer in enumerate(buffers) if buffer.inline is None]
    for actor in sorted({buffers[i].actor for i in large}):
      mine = [i for i in large if buffers[i].actor == actor]
      groups = messages.groups([buffers[i].aval.nbytes for i in mine])
      rounds[actor] = iter([[(mine[k], a, b) for k, a, b in group] for group in groups])
    while rounds:
      waiting = []
      with self._lock:
        self._calls.check_usable()
        for actor, groups in list(rounds.items()):
          group = next(groups, None)
          if group is None:
            del rounds[actor]
            continue
          ids = [(buffers[i].id, start, stop) for i, start, stop in group]
          waiting.append((group, self._call(actor, 'fetch', ids)))
      for group, future in waiting:
        for (i, start, stop), data in zip(group, future.result()):
          messages.flat_bytes(results[i])[start:stop] = data
    for buffer, result in zip(buffers, results):
      if buffer.inline is not None:
        data = buffer.ready.result()[buffer.inline]
        messages.flat_bytes(result)[:] = np.frombuffer(data, np.uint8)
    return results

  def wait(self, buffers: Sequence[Buffer]) -> None:
    for future in dict.fromkeys(buffer.ready for buffer in buffers):
      future.result()

  def record(self, handle: int, count_bytes: bool = False) -> None:
    with self._lock:
      self._calls.check_usable()
      for actor in range(self._num_actors):
        self._call(actor, 'record', handle, count_bytes)

  def recorded(self) -> list[Future[list[ActorRecord]]]:
    with self._lock:
      self._calls.check_usable()
      return [self._call(actor, 'recorded') for actor in range(self._num_actors)]

  def close(self) -> None:
    if self._calls.close():
      self._kill()
      self._calls.fail(MpmdError('The runtime was closed while this was waiting for it.'))

  def __enter__(self):
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  # Messages.

  def _check_readable(self, buffers: Sequence[Buffer]) -> None:
    if any(buffer.consumed for buffer in buffers):
      raise MpmdError(
          'This array was donated to a step and its memory has been used for a result. Read it '
          'before the step, use the result instead, or leave it out of donate_argnums.'
      )

  def _buffer(
      self, actor: int, buffer_id: int, aval: Aval, ready: Future, inline: slice | None = None
  ) -> Buffer:
    return Buffer(actor, buffer_id, aval, ready, self._freed[actor], inline)

  def _pack(self, actor: int, loaded: _LoadedPlan, values: Sequence) -> list[int | np.ndarray]:
    plan = loaded.plan.actors[actor]
    assert len(values) == len(plan.inputs), (actor, len(values), len(plan.inputs))
    packed: list[int | np.ndarray] = []
    for value, slot in zip(values, plan.inputs):
      if isinstance(value, Buffer):
        assert value.actor == actor, (value, actor)
        self._check_readable([value])
        expected = plan.slots[slot]
        # Their shardings may differ: the actor then moves the array.
        found = value.aval.shape, value.aval.dtype
        assert found == (expected.shape, expected.dtype), (value, expected)
        packed.append(value.id)
      else:
        value = np.asarray(value)
        expected = plan.slots[slot]
        assert (value.shape, value.dtype.name) == (expected.shape, expected.dtype), (
            f'input for slot {slot} of actor {actor}: {value.dtype}{value.shape}, '
            f'expected {expected}'
        )
        packed.append(value)
    return packed

  def _put(
      self, actor: int, values: Sequence[np.ndarray], avals: Sequence[Aval]
  ) -> list[Buffer]:
    first = self._next_buffer
    self._next_buffer += len(values)
    ready: dict[int, Future] = {}
    previous: Future | None = None
    for group in messages.groups([aval.nbytes for aval in avals]):
      parts = [
          (first + i, avals[i], start, messages.flat_bytes(values[i])[start:stop])
          for i, start, stop in group
      ]
      if previous is not None:
        previous.result()  # else a large state would pile up on the way
      previous = self._call(actor, 'put', parts)
      ready.update({i: previous for i, _, _ in group})
    return [self._buffer(actor, first + i, aval, ready[i]) for i, aval in enumerate(avals)]

  def _put_if_large(
      self, actor: int, plan: ActorPlan, values: Sequence
  ) -> Sequence[np.ndarray | Buffer]:
    """Sends arrays ahead, in parts, where one message would be too large: a first state, say."""
    arrays = {i: np.asarray(v) for i, v in enumerate(values) if not isinstance(v, Buffer)}
    if sum(array.nbytes for array in arrays.values()) <= messages.MESSAGE_BYTES:
      return values
    avals = [plan.slots[plan.inputs[i]] for i in arrays]
    buffers = dict(zip(arrays, self._put(actor, list(arrays.values()), avals)))
    return [buffers.get(i, value) for i, value in enumerate(values)]

  def _call(self, actor: int, method: str, *args: Any) -> Future:
    """Sends one message. The future gives the result, or raises the run's one ActorError."""
    future = self._calls.begin(method)
    freed_ids = self._freed[actor]
    freed = [freed_ids.popleft() for _ in range(len(freed_ids))]
    number = self._next_message[actor]
    self._next_message[actor] += 1
    done = functools.partial(self._calls.end, future)
    self._send(actor, (number, freed, method, args), done)
    return future

  def _call_written(self, actor: int, ticket: int) -> Future:
    """The end of a `write` message: a future that raises what kept something from being written."""
    future = self._calls.begin('written')

    def done(result: Any) -> None:
      if isinstance(result, str):  # no failure of the actor: what couldn't be written, or ''
        result = CheckpointError(result) if result else None
      self._calls.end(future, result)

    self._send_written(actor, ticket, done)
    return future

  def _unsent(self, actor: int, executables: dict[str, Any]) -> dict[str, Any]:
    """Those programs that the actor doesn't know yet; they count as sent."""
    new = {k: e for k, e in executables.items() if k not in self._sent_executables[actor]}
    self._sent_executables[actor].update(new)
    return new

  def _throttle(self) -> None:
    """Forgets finished steps and waits while too many are under way."""
    while self._in_flight:
      handle, futures = self._in_flight[0]
      if len(self._in_flight) < self._max_steps_in_flight and not all(f.done() for f in futures):
        return
      for future in futures:
        future.result()
      self._plans[handle].num_steps_done += 1
      self._in_flight.popleft()

  def _is_first_step(self) -> bool:
    """Whether the oldest step under way is the first of its plan. Called from the monitor."""
    done = set()
    for handle, futures in self._in_flight.copy():
      if not all(future.done() for future in futures):
        return handle not in done and self._plans[handle].num_steps_done == 0
      done.add(handle)
    return False


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
  """`method`, which does nothing and returns None when its object is gone."""
  reference = weakref.WeakMethod(method)

  def call(*args: Any) -> Any:
    bound = reference()
    return None if bound is None else bound(*args)

  return call
