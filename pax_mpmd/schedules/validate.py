"""Checks a schedule: every task once, in its place, and in an order that can run.

A schedule is valid for M microbatches when
  * every stage lies on one of the actors and every actor owns a stage;
  * each stage has, for every microbatch, a forward and either one whole backward or one input
    gradient and one weight gradient (each microbatch makes its own choice);
  * each task stands exactly once, in the list of its stage's actor;
  * the lists can be played to the end, each actor running its list in order and each task waiting
    for what it needs. This is the same as: the graph of "comes before on the actor" and "needs"
    has no cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import numbers
from typing import NoReturn

from pax_mpmd import errors
from pax_mpmd.schedules.base import positive
from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.graph import dependencies
from pax_mpmd.schedules.graph import phases_of_stages
from pax_mpmd.schedules.graph import play
from pax_mpmd.schedules.layout import format_columns
from pax_mpmd.schedules.task import Phase
from pax_mpmd.schedules.task import Task

__all__ = ['checked_tasks', 'validate']

_MAX_ROWS = 7  # of the grid in a message
_MAX_ACTORS = 8
_MAX_NAMED = 6  # tasks named in a list

_Lists = tuple[tuple[Task, ...], ...]


def validate(schedule: Schedule, num_microbatches: int, *, need_backward: bool = True) -> None:
  """Checks that a schedule can run. Takes time linear in the number of tasks.

  Args:
    schedule: the schedule.
    num_microbatches: number of microbatches in a step.
    need_backward: whether backward tasks must be there; without them the schedule is good for
      evaluation only.

  Raises:
    ScheduleError: it can't; the message shows the grid with the place marked.
  """
  checked_tasks(schedule, num_microbatches, need_backward=need_backward)


def checked_tasks(
    schedule: Schedule, num_microbatches: int, *, need_backward: bool = True
) -> _Lists:
  """As `validate`; returns the tasks of each actor."""
  if not isinstance(schedule, Schedule):
    raise errors.ScheduleError(
        f'A schedule must be an instance of pax_mpmd.schedules.Schedule, but is '
        f'{errors.shown(schedule)}. '
        'Build one, for example OneFOneB(num_stages=4), or look one up by name with '
        "schedules.get('1f1b', num_stages=4)."
    )
  if not isinstance(schedule.num_stages, int) or not isinstance(schedule.num_actors, int):
    raise errors.ScheduleError(
        f'{_name(schedule)} has num_stages={errors.shown(schedule.num_stages)} and num_actors='
        f'{errors.shown(schedule.num_actors)}, which must both be whole numbers. A subclass with '
        'its own __post_init__ must call super().__post_init__().'
    )
  num_microbatches = positive(_name(schedule), 'num_microbatches', num_microbatches)
  placement = _placement(schedule)
  lists = _lists(schedule, num_microbatches)
  _check_places(schedule, lists, placement, num_microbatches)
  _check_complete(schedule, lists, placement, num_microbatches, need_backward)
  _check_order(schedule, lists)
  return lists


def _placement(schedule: Schedule) -> tuple[int, ...]:
  """The schedule's placement, checked."""
  placement = schedule.placement()
  where = f'{_name(schedule)}: placement()'
  if not isinstance(placement, (tuple, list)):
    raise errors.ScheduleError(
        f'{where} must return a tuple with the actor of each stage, but returned '
        f'{errors.shown(placement)}.'
    )
  if len(placement) != schedule.num_stages:
    raise errors.ScheduleError(
        f'{where} must name an actor for each of the {schedule.num_stages} stages, but returned '
        f'{len(placement)} of them: {errors.shown(placement)}.'
    )
  for stage, actor in enumerate(placement):
    if not isinstance(actor, numbers.Integral) or not 0 <= actor < schedule.num_actors:
      raise errors.ScheduleError(
          f'{where} puts stage {stage} on actor {errors.shown(actor)}, but actors are numbered 0 '
          f'to {schedule.num_actors - 1}. Change the placement or raise num_actors.'
      )
  idle = sorted(set(range(schedule.num_actors)) - set(placement))
  if idle:
    raise errors.ScheduleError(
        f'{where} gives no stage to actor {_some(idle)}. Every actor must own at least one stage; '
        f'lower num_actors ({schedule.num_actors}) or change the placement '
        f'{errors.shown(tuple(placement))}.'
    )
  return tuple(map(int, placement))


def _lists(schedule: Schedule, num_microbatches: int) -> _Lists:
  """What the schedule's `tasks` returns, with its types checked."""
  where = f'{_name(schedule)}: tasks({num_microbatches})'
  lists = schedule.tasks(num_microbatches)
  if isinstance(lists, str) or not isinstance(lists, Iterable):
    raise errors.ScheduleError(
        f'{where} must return one sequence of tasks per actor, but returned '
        f'{errors.shown(lists)}.'
    )
  lists = list(lists)
  if len(lists) != schedule.num_actors:
    raise errors.ScheduleError(
        f'{where} must return one sequence of tasks for each of the {schedule.num_actors} actors, '
        f'but returned {len(lists)} sequences.'
    )
  for actor, tasks in enumerate(lists):
    if isinstance(tasks, str) or not isinstance(tasks, Iterable):
      raise errors.ScheduleError(
          f'{where} must return a sequence of tasks for each actor, but for actor {actor} returned '
          f'{errors.shown(tasks)}.'
      )
    lists[actor] = tuple(tasks)
    for position, task in enumerate(lists[actor]):
      if not isinstance(task, Task) or not (
          isinstance(task.stage, numbers.Integral)
          and isinstance(task.phase, Phase)
          and isinstance(task.microbatch, numbers.Integral)
      ):
        raise errors.ScheduleError(
            f'{where} returned {errors.shown(task)} at position {position} of actor {actor}, which '
            "is not a Task. Make tasks with Task(2, Phase.F, 0) or Task.parse('2F0')."
        )
  return tuple(lists)


def _check_places(
    schedule: Schedule, lists: _Lists, placement: tuple[int, ...], num_microbatches: int
) -> None:
  """Every task is in range, on its stage's actor, and there once."""
  seen: dict[Task, tuple[int, int]] = {}
  for actor, tasks in enumerate(lists):
    for position, task in enumerate(tasks):
      place = (actor, position)
      if not 0 <= task.stage < schedule.num_stages:
        _fail(
            schedule, lists, [place],
            f'task {task} is of stage {task.stage}, but stages are numbered 0 to '
            f'{schedule.num_stages - 1}.',
        )
      if not 0 <= task.microbatch < num_microbatches:
        _fail(
            schedule, lists, [place],
            f'task {task} is of microbatch {task.microbatch}, but for num_microbatches='
            f'{num_microbatches} they are numbered 0 to {num_microbatches - 1}.',
        )
      if placement[task.stage] != actor:
        _fail(
            schedule, lists, [place],
            f'task {task} stands in the list of actor {actor}, but placement() puts stage '
            f'{task.stage} on actor {placement[task.stage]}. Move the task or the stage.',
        )
      if task in seen:
        _fail(
            schedule, lists, [seen[task], place],
            f'task {task} stands twice in the list of actor {actor}, at positions '
            f'{seen[task][1]} and {position}. Take one of them out.',
        )
      seen[task] = place


def _check_complete(
    schedule: Schedule,
    lists: _Lists,
    placement: tuple[int, ...],
    num_microbatches: int,
    need_backward: bool,
) -> None:
  """Every stage has the tasks of a whole forward and backward for every microbatch."""
  place = {task: (a, p) for a, tasks in enumerate(lists) for p, task in enumerate(tasks)}
  phases = phases_of_stages(lists, schedule.num_stages)
  forward_only = not need_backward and all(p <= {Phase.F} for p in phases)
  for stage, found in enumerate(phases):
    missing = []
    for m in range(num_microbatches):
      whole, split_input, split_weight = (
          Task(stage, phase, m) for phase in (Phase.B, Phase.I, Phase.W)
      )
      split = [task for task in (split_input, split_weight) if task in place]
      if whole in place and split:
        _fail(
            schedule, lists, [place[task] for task in (whole, *split)],
            f'stage {stage} has both a whole backward ({whole}) and a split one ({_some(split)}) '
            f'for microbatch {m}. For one microbatch a stage runs either B, or I and W; take one '
            'of them out.',
        )
      if len(split) == 1:
        (absent,) = {split_input, split_weight}.difference(split)
        _fail(
            schedule, lists, [place[split[0]]],
            f'actor {placement[stage]} never runs {absent}, though it runs {split[0]}. A split '
            f'backward is one I and, later, one W; add {absent}, or run {whole} in place of both.',
        )
      if Task(stage, Phase.F, m) not in place:
        missing.append(str(Task(stage, Phase.F, m)))
      if forward_only or whole in place or split:
        continue
      if Phase.I in found:
        missing.append(f'{split_input} and {split_weight} (or {whole})')
      else:
        missing.append(str(whole))
    if missing:
      actor = placement[stage]
      last = [p for p, task in enumerate(lists[actor]) if task.stage == stage][-1:]
      _fail(
          schedule, lists, [(actor, position) for position in last],
          f'actor {actor} never runs {_some(missing)}. Every stage needs F and B (or F, I and W) '
          f'for each of the {num_microbatches} microbatches; add what is missing to the list of '
          f'actor {actor}' + (f' (the last task of stage {stage} is marked).' if last else '.'),
      )


def _check_order(schedule: Schedule, lists: _Lists) -> None:
  """The lists can be played to the end."""
  positions = play(lists, lambda task: 1).positions
  stuck = [actor for actor, tasks in enumerate(lists) if positions[actor] < len(tasks)]
  if not stuck:
    return
  place = {task: (a, p) for a, tasks in enumerate(lists) for p, task in enumerate(tasks)}
  # Every stuck actor's next task waits for one that comes later in a stuck actor's list. Followed
  # from any of them, these waits must come round to an actor seen before.
  actor, chain = stuck[0], {}
  while actor not in chain:
    task = lists[actor][positions[actor]]
    needed = next(
        n for n in dependencies(task, place) if place[n][1] >= positions[place[n][0]]
    )
    chain[actor] = (task, needed)
    actor = place[needed][0]
  cycle = list(chain)[list(chain).index(actor):]
  waits = []
  for a in cycle:
    task, needed = chain[a]
    other, _ = place[needed]
    head = lists[other][positions[other]]
    wait = f'{task} (actor {a}) needs {needed}'
    if other == a:
      wait += ', which comes later on the same actor'
    elif head != needed:
      wait += f', which comes after {head} on actor {other}'
    waits.append(wait)
  shown = waits[:_MAX_NAMED] + ([f'{len(waits) - _MAX_NAMED} more'] * (len(waits) > _MAX_NAMED))
  _fail(
      schedule, lists, [(a, positions[a]) for a in cycle],
      'the order can never run; the marked tasks wait for each other: '
      + '; '.join(shown) + '. Move a task behind what it needs.',
  )


def _fail(
    schedule: Schedule, lists: _Lists, marks: Sequence[tuple[int, int]], what: str
) -> NoReturn:
  """Raises with the grid of the lists (row = position in the list) around the marks."""
  columns = [[str(task) for task in tasks] for tasks in lists]
  grid = format_columns(
      columns, marks, header='place', max_rows=_MAX_ROWS, max_actors=_MAX_ACTORS
  )
  raise errors.ScheduleError(f'{_name(schedule)}: {what}\n{grid}')


def _name(schedule: Schedule) -> str:
  return type(schedule).__name__


def _some(things: Sequence) -> str:
  """The things by name, the first few of them where they are many."""
  text = ', '.join(map(str, things[:_MAX_NAMED]))
  left_out = len(things) - _MAX_NAMED
  return text + (f' and {left_out} more' if left_out > 0 else '')
