"""ZB-V: no bubble but that of the start, in 1F1B's memory (Qi et al., arXiv 2401.10241)."""

from __future__ import annotations

import dataclasses

from pax_mpmd.schedules.row import Row
from pax_mpmd.schedules.task import Task
from pax_mpmd.schedules.v_shape import VShaped

__all__ = ['ZeroBubbleV']


@dataclasses.dataclass(frozen=True)
class ZeroBubbleV(VShaped):
  """Split backwards over a V of stages: once an actor has begun it never waits.

  "ZB-V" of Qi et al., arXiv 2401.10241; "V-ZB" in their arXiv 2405.15362. Actor p of P
  owns the stage p on the way down and the stage 2P-1-p on the way up (their "chunks"). A
  microbatch so comes back to the actor where it began, and backwards begin early everywhere:

    1. 2(P-p) - 1 forwards of the way down, then p pairs of a forward up and one down;
    2. P-p times F, I, W of the way up, and from then on F, I, W down and F, I, W up in turn;
    3. at the end, where no forwards are left, weight gradients fill the gaps: p pairs of I
       without W, P-p times I and one W, then the W that are left.

  This is told for M >= 2P-1; with fewer microbatches the tasks of the missing ones are left out.
  Any number of microbatches works; `num_stages` must be twice `num_actors`.

  In unit time (F = I = W), for M >= 2P-1, actor p begins after p units and then works for 6M units
  without a gap. That is the paper's zero bubble, which counts from an actor's first task and lets
  it take its optimizer step without waiting for the others. From the first task of all to the
  last a step takes 6M + P-1, the least there is: a bubble fraction of (P-1) / (6M + P-1). The
  step takes as long for 2M >= 3P-1 already, and 4M + 4P-2 with fewer microbatches. Peak of live
  activations on actor p: min(2M, M+p+1, 2P). These are of half the size of 1F1B's with one stage
  on each of P actors, so that 2P are what 1F1B's first actor holds. The order is made for times
  near F = I = W; the papers also search for one that suits measured times, which this doesn't.
  """

  def tasks(self, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """For each actor, its tasks in the order it runs them; see `Schedule.tasks`."""
    num_actors = self.num_actors
    told = max(num_microbatches, 2 * num_actors - 1)
    down, up = 0, 1
    rows = []
    for actor in range(num_actors):
      to_end = num_actors - actor
      row = Row([(actor,), (self.num_stages - 1 - actor,)], num_microbatches)
      for _ in range(2 * to_end - 1):
        row.forward(down)
      for _ in range(actor):
        row.forward(up)
        row.forward(down)
      for _ in range(to_end):
        _all_phases(row, up)
      # By now there were 2P-1-p forwards down and P up; those up go on until the last one.
      for done in range(num_actors, told):
        if done + to_end - 1 < told:
          row.forward(down)
        row.backward(down, split=True)
        row.weights()
        _all_phases(row, up)
      for _ in range(actor):
        row.backward(down, split=True)
        row.backward(up, split=True)
      for _ in range(to_end):
        row.backward(down, split=True)
        row.weights()
      row.all_weights()
      rows.append(row.tasks)
    return tuple(rows)


def _all_phases(row: Row, chunk: int) -> None:
  """F, I and W of a chunk."""
  row.forward(chunk)
  row.backward(chunk, split=True)
  row.weights()
