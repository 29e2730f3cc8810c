"""ZB-H1: 1F1B with the weight gradients moved into its bubble (Qi et al., arXiv 2401.10241)."""

from __future__ import annotations

import dataclasses

from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.row import Row
from pax_mpmd.schedules.task import Task

__all__ = ['ZeroBubbleH1']


@dataclasses.dataclass(frozen=True)
class ZeroBubbleH1(Schedule):
  """1F1B with split backwards: a third of its bubble at the same peak memory.

  "ZB-H1" of Qi et al., arXiv 2401.10241, section 2.1 (there B is what is I here). Forwards and
  input gradients alternate as in 1F1B. Only input gradients hold up other actors; a weight
  gradient can wait, and actor p of P lets the last p microbatches' wait at any time, so that they
  fill its bubble at the end of the step. Where an actor owns several (contiguous) stages they act
  as one larger stage. Any number of microbatches works.

  For M >= P the bubble takes (P-1) (F + I - W), as the paper has it, against (P-1) (F + I + W) in
  1F1B; this is for W <= min(F, I), in general (P-1) max(F, I, F + I - W). In unit time that is a
  fraction of (P-1) / (3M + P-1). With M < P microbatches a step takes P-M units more (v (P-M) with
  v stages on each actor). Peak of live activations on every actor: v min(M, P), that of the first
  actor in 1F1B.
  """

  def tasks(self, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """For each actor, its tasks in the order it runs them; see `Schedule.tasks`."""
    rows = []
    for actor in range(self.num_actors):
      row = Row([self.stages_of(actor)], num_microbatches)
      for _ in range(self.num_actors - 1 - actor):
        row.forward()
      for done in range(num_microbatches):
        row.forward()
        row.backward(split=True)
        if done >= actor:
          row.weights()
      row.all_weights()
      rows.append(row.tasks)
    return tuple(rows)
