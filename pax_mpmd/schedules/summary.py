"""What each named schedule costs: its formulas, and their values for an example."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.graph import dependencies
from pax_mpmd.schedules.registry import NAMES
from pax_mpmd.schedules.simulate import simulate

__all__ = ['FACTS', 'Facts', 'evaluate', 'markdown_table', 'num_messages']


@dataclasses.dataclass(frozen=True)
class Facts:
  """What a schedule costs in unit time (F 1, B 2, I 1, W 1), as formulas.

  A formula is a Python expression over P actors, S stages, v = S / P stages on each actor (so S is
  a multiple of P), M microbatches and the number p of an actor.

  Attributes:
    bubble: the bubble fraction.
    peak_live: the peak of live activations on actor p, in activations of one stage.
    messages: activations and gradients sent between actors in a step, for a model that is a plain
      chain of stages, where P > 1.
    holds: the condition under which the three hold; '' means always.
    stages_per_actor: v in the example.
    needs: what num_stages and num_actors must fulfil, in words; '' means nothing.
  """

  bubble: str
  peak_live: str
  messages: str
  holds: str = ''
  stages_per_actor: int = 1
  needs: str = ''


_MULTIPLE = 'num_stages is a multiple of num_actors'
_TWICE = 'num_stages is 2 x num_actors'

FACTS: Mapping[str, Facts] = {
    'gpipe': Facts(
        bubble='(P - 1) / (M + P - 1)', peak_live='v * M', messages='2 * M * (P - 1)'
    ),
    '1f1b': Facts(
        bubble='(P - 1) / (M + P - 1)', peak_live='v * min(M, P - p)', messages='2 * M * (P - 1)'
    ),
    'eager_1f1b': Facts(
        bubble='(P - 1) / (M + P - 1)',
        peak_live='v * min(M, 2 * (P - p) - 1)',
        messages='2 * M * (P - 1)',
    ),
    'interleaved_1f1b': Facts(
        bubble='(P - 1) / (v * M + P - 1)',
        peak_live='min(v * M, 2 * (P - 1 - p) + (v - 1) * P + 1)',
        messages='2 * M * (S - 1)',
        holds='M % P == 0 and v > 1',
        stages_per_actor=2,
        needs=_MULTIPLE,
    ),
    'bfs': Facts(
        bubble='(P - 1) / (v * M + P - 1)',
        peak_live='v * M',
        messages='2 * M * (S - 1)',
        holds='M >= P',
        stages_per_actor=2,
        needs=_MULTIPLE,
    ),
    'zb_h1': Facts(
        bubble='(P - 1) / (3 * M + P - 1)',
        peak_live='v * min(M, P)',
        messages='2 * M * (P - 1)',
        holds='M >= P',
    ),
    'zb_v': Facts(
        bubble='(P - 1) / (6 * M + P - 1)',
        peak_live='min(2 * M, M + p + 1, 2 * P)',
        messages='4 * M * (P - 1)',
        holds='2 * M >= 3 * P - 1',
        stages_per_actor=2,
        needs=_TWICE,
    ),
    'dualpipe_v': Facts(
        bubble='(P - 1) / (6 * M + P - 1)',
        peak_live='2 * P + (p == P - 1)',
        messages='4 * M * (P - 1)',
        holds='M >= 2 * P',
        stages_per_actor=2,
        needs=_TWICE,
    ),
}


_INTRODUCTION = '''\
P = {} actors and M = {} microbatches; S stages, a multiple of P, v = S / P on each actor; p is the
number of an actor. Values are those of the simulator with F 1, B 2, I 1, W 1, for actors 0, 1, ...
in turn. A live activation is that of one stage: half as large where there are twice as many stages.
Messages are those of a plain chain of stages on more than one actor. Any number of microbatches
runs; where the formulas have a condition, they hold under it.

'''


def evaluate(formula: str, schedule: Schedule, num_microbatches: int, actor: int = 0):
  """The value of a formula of `Facts`.

  Args:
    formula: the expression.
    schedule: gives P, S and v.
    num_microbatches: M.
    actor: p.
  """
  names = {
      'P': schedule.num_actors,
      'S': schedule.num_stages,
      'v': schedule.num_stages // schedule.num_actors,
      'M': num_microbatches,
      'p': actor,
      'min': min,
  }
  return eval(formula, {'__builtins__': {}}, names)  # Only the texts above come here.


def num_messages(schedule: Schedule, num_microbatches: int) -> int:
  """Activations and gradients sent between actors in a step of a plain chain of stages.

  A chain is a model in which each stage uses what the stage before gives, and nothing else.
  """
  placement = schedule.placement()
  present = {task for tasks in schedule.tasks(num_microbatches) for task in tasks}
  return sum(
      placement[task.stage] != placement[needed.stage]
      for task in present
      for needed in dependencies(task, present)
  )


def markdown_table(num_actors: int = 4, num_microbatches: int = 8) -> str:
  """A table of the named schedules, with values for an example.

  Args:
    num_actors: P of the example.
    num_microbatches: M of the example.

  Returns:
    Markdown: a sentence on the numbers, and the table; ends with a line break.
  """
  head = ['schedule', 'stages', 'bubble', 'peak live activations', 'messages', 'conditions']
  rows = [head, ['---'] * len(head)]
  for name, facts in FACTS.items():
    schedule = NAMES[name](facts.stages_per_actor * num_actors, num_actors)
    result = simulate(schedule, num_microbatches)
    conditions = [facts.needs] * bool(facts.needs)
    if facts.holds:
      conditions.append(f'formulas: {_code(facts.holds)}')
    rows.append([
        f'`{name}`',
        str(schedule.num_stages),
        f'{_code(facts.bubble)} = {100 * result.bubble_fraction:.1f}%',
        f'{_code(facts.peak_live)} = {", ".join(map(str, result.peak_live))}',
        f'{_code(facts.messages)} = {num_messages(schedule, num_microbatches)}',
        '; '.join(conditions) or 'none',
    ])
  return _INTRODUCTION.format(num_actors, num_microbatches) + ''.join(
      f'| {" | ".join(row)} |\n' for row in rows
  )


def _code(formula: str) -> str:
  return f'`{formula}`'
