"""Runs one compiled step by several schedules."""

from __future__ import annotations

import dataclasses
from typing import Any

from pax_mpmd import plan as planning
from pax_mpmd.runtime import arguments
from pax_mpmd.runtime.step import MpmdFunction
from pax_mpmd.runtime.step import PlannedStep


def with_program(fn: MpmdFunction, planned: PlannedStep, args: tuple[Any, ...]) -> MpmdFunction:
  """`fn`, with `planned`'s compiled step in place of its own for arguments like `args`.

  What the compiler makes depends on a schedule's placement, and on which stages it splits the
  backward of, and on nothing else of it; those must be equal. Saves most of the time.
  """
  schedule = fn._schedule
  plan = planning.lower(planned.program, schedule)
  planning.verify(plan)
  planning.verify_values(plan, planned.program, schedule)
  assert tuple(planned.program.placement) == tuple(schedule.placement())

  _, in_tree, avals = arguments.flatten(args, {})
  fn._planned[arguments.key(in_tree, avals)] = dataclasses.replace(planned, plan=plan)
  return fn
