"""Plans as text: the listing, one instruction, and the numbers of a plan."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.plan.instructions import Instruction
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.plan.instructions import Recv
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.plan.instructions import Slot
from pax_mpmd.plan.liveness import peak_bytes

__all__ = ['ActorSummary', 'PlanSummary', 'format_instruction', 'format_plan', 'summary']


def format_instruction(instruction: Instruction, max_slots: int | None = None) -> str:
  """An instruction on one line, e.g. 'send 2F0 to actor 3: %7'.

  Args:
    instruction: the instruction.
    max_slots: the most slots to name in each of its lists; None names all.

  Returns:
    The line.
  """

  def slots(numbers: Sequence[Slot]) -> str:
    shown = numbers if max_slots is None else numbers[:max_slots]
    more = f' and {len(numbers) - len(shown)} more' if len(shown) < len(numbers) else ''
    return ' '.join(map(_slot, shown)) + more

  if isinstance(instruction, Run):
    parts = [f'run {instruction.label}:', slots(instruction.inputs), '->']
    return ' '.join(filter(None, [*parts, slots(instruction.outputs)]))
  if isinstance(instruction, Send):
    return f'send {instruction.label} to actor {instruction.dst}: {slots(instruction.slots)}'
  if isinstance(instruction, Recv):
    return f'recv {instruction.label} from actor {instruction.src}: -> {slots(instruction.slots)}'
  return f'free {slots(instruction.slots)}'


def format_plan(plan: Plan) -> str:
  """The whole plan: for each actor its inputs, constants, numbered instructions and outputs.

  A slot's shape and dtype stand where it is filled.

  Args:
    plan: the plan; it need not be valid.

  Returns:
    The lines, without a newline at the end.
  """
  lines = []
  for actor_plan in plan.actors:
    lines.append(f'actor {actor_plan.actor}')
    for slot, (leaf, piece) in zip(actor_plan.inputs, actor_plan.input_values, strict=False):
      lines.append(f'  input {_typed(actor_plan, [slot])} = argument {leaf}, piece {piece}')
    for slot, value in actor_plan.constants:
      lines.append(f'  constant {_typed(actor_plan, [slot])} = {value}')
    for i, instruction in enumerate(actor_plan.instructions):
      line = f'  {i:4} {format_instruction(instruction)}'
      made = ()
      if isinstance(instruction, Run):
        made = instruction.outputs
      elif isinstance(instruction, Recv):
        made = instruction.slots
      if made:
        head = line[: line.rindex('-> ')]
        line = f'{head}-> {_typed(actor_plan, made)}'
      lines.append(line)
    for slot, (leaf, piece) in zip(actor_plan.outputs, actor_plan.output_values, strict=False):
      lines.append(f'  output %{slot} = result {leaf}, piece {piece}')
  return '\n'.join(lines)


@dataclasses.dataclass(frozen=True)
class ActorSummary:
  """The numbers of one actor's plan.

  Attributes:
    actor: the pipeline rank.
    programs: number of different programs it runs.
    runs: number of Run instructions.
    messages_sent: number of messages it sends in a step.
    bytes_sent: their size.
    messages_received: number of messages it receives in a step.
    bytes_received: their size.
    instructions: number of all instructions.
    input_bytes: size of the step inputs it holds.
    peak_bytes: see `liveness.peak_bytes`.
  """

  actor: int
  programs: int
  runs: int
  messages_sent: int
  bytes_sent: int
  messages_received: int
  bytes_received: int
  instructions: int
  input_bytes: int
  peak_bytes: int


@dataclasses.dataclass(frozen=True)
class PlanSummary:
  """The numbers of a plan; str() is a table with one line per actor."""

  programs: int  # different programs, over all actors
  actors: tuple[ActorSummary, ...]

  def __str__(self) -> str:
    table = [
        ('actor', 'programs', 'runs', 'instructions', 'sends', 'sent', 'recvs', 'received',
         'inputs', 'peak')
    ]
    for a in self.actors:
      table.append(
          (str(a.actor), str(a.programs), str(a.runs), str(a.instructions), str(a.messages_sent),
           _size(a.bytes_sent), str(a.messages_received), _size(a.bytes_received),
           _size(a.input_bytes), _size(a.peak_bytes))
      )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ['  '.join(map(str.rjust, row, widths)) for row in table]
    return '\n'.join([*lines, f'{self.programs} different programs'])


def summary(plan: Plan) -> PlanSummary:
  """Counts programs, messages, bytes and instructions.

  Args:
    plan: a valid plan.

  Returns:
    The numbers for each actor.
  """
  actors = []
  used: set[str] = set()
  for actor_plan, peak in zip(plan.actors, peak_bytes(plan), strict=True):
    runs = [i for i in actor_plan.instructions if isinstance(i, Run)]
    sends = [i for i in actor_plan.instructions if isinstance(i, Send)]
    recvs = [i for i in actor_plan.instructions if isinstance(i, Recv)]
    programs = {run.executable for run in runs}
    used |= programs
    actors.append(
        ActorSummary(
            actor=actor_plan.actor,
            programs=len(programs),
            runs=len(runs),
            messages_sent=len(sends),
            bytes_sent=sum(_nbytes(actor_plan, i.slots) for i in sends),
            messages_received=len(recvs),
            bytes_received=sum(_nbytes(actor_plan, i.slots) for i in recvs),
            instructions=len(actor_plan.instructions),
            input_bytes=_nbytes(actor_plan, actor_plan.inputs),
            peak_bytes=peak,
        )
    )
  return PlanSummary(len(used), tuple(actors))


def _nbytes(plan: ActorPlan, slots: Sequence[Slot]) -> int:
  return sum(plan.slots[slot].nbytes for slot in slots)


def _size(nbytes: int) -> str:
  """Bytes for people."""
  for unit in ('B', 'kB', 'MB'):
    if nbytes < 1000:
      return f'{nbytes:.3g} {unit}' if unit != 'B' else f'{nbytes} B'
    nbytes /= 1000
  return f'{nbytes:.3g} GB' if nbytes < 1000 else f'{nbytes:.0f} GB'


def _slot(slot: Slot) -> str:
  return f'%{slot}'


def _typed(plan: ActorPlan, slots: Sequence[Slot]) -> str:
  return ' '.join(
      f'%{slot}:{plan.slots[slot]}' if 0 <= slot < len(plan.slots) else f'%{slot}:?'
      for slot in slots
  )
