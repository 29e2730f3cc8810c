"""DualPipeV: half of DualPipe's two-way pipeline, bent to a V (DeepSeek)."""

from __future__ import annotations

import dataclasses

from pax_mpmd.schedules.row import Row
from pax_mpmd.schedules.task import Task
from pax_mpmd.schedules.v_shape import VShaped

__all__ = ['DualPipeV']


@dataclasses.dataclass(frozen=True)
class DualPipeV(VShaped):
  """Pairs of a backward in one direction and a forward in the other, over a V of stages.

  DualPipe (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.2.1) feeds microbatches into
  both ends of a pipeline and pairs the forwards of one direction with the backwards of the other,
  so that the messages of each hide behind the other. DualPipeV (deepseek-ai/DualPipe; the "cut in
  half" is due to Sea AI Lab) keeps one half: actor p of P owns the stage p on the way down and
  the stage 2P-1-p on the way up. Its order on actor p:

    1. 2(P-1-p) forwards down;
    2. p+1 forwards down and up in turn;
    3. P-1-p times I, W and then F, all of the way up;
    4. pairs: B up with F down, then B down with F up, until no forwards down are left;
    5. P-1-p times B up, then the pair B down with F up;
    6. p+1 times a backward up and one down, whole ones at first, in the later half only I;
    7. P-1-p times one W and I down;
    8. the W that are left.

  Backwards are whole (B) where nothing waits for their input gradient sooner, and split where
  something does. In a pair, B comes first: it frees memory before F takes some. (Only the first
  pair of the last actor is the other way round, because what B needs comes later there.) This is
  told for M >= 2P; with fewer microbatches the tasks of the missing ones are left out, so that any
  number works. `num_stages` must be twice `num_actors`.

  For M >= 2P, in unit time (F = I = W, B = I + W), a step takes 6M + P-1: a bubble fraction of
  (P-1) / (6M + P-1). The repository states a bubble of (P-1) (F&B + B - 3W) for 2P stages, where
  F&B is the time of a pair, which there can't be taken apart: 2(P-1) if that takes F + B. Here
  each task of a pair starts as soon as it can, which saves the other half. Peak of live
  activations: 2P, on the last actor 2P+1, which is what the repository states for all of them.
  """

  def tasks(self, num_microbatches: int) -> tuple[tuple[Task, ...], ...]:
    """For each actor, its tasks in the order it runs them; see `Schedule.tasks`."""
    num_actors = self.num_actors
    told = max(num_microbatches, 2 * num_actors)
    down, up = 0, 1
    rows = []
    for actor in range(num_actors):
      after = num_actors - 1 - actor  # actors further down
      row = Row([(actor,), (self.num_stages - 1 - actor,)], num_microbatches)
      for _ in range(2 * after):
        row.forward(down)
      for _ in range(actor + 1):
        row.forward(down)
        row.forward(up)
      for _ in range(after):
        row.backward(up, split=True)
        row.weights()
        row.forward(up)
      for i in range(told - 2 * num_actors + actor + 1):
        if i == 0 and after == 0:
          row.forward(down)
          row.backward(up)
        else:
          row.backward(up)
          row.forward(down)
        row.backward(down)
        row.forward(up)
      for _ in range(after):
        row.backward(up)
        row.backward(down)
        row.forward(up)
      # Of these 2(p+1) backwards the last p+1 are split.
      for i in range(actor + 1):
        row.backward(up, split=2 * i >= actor + 1)
        row.backward(down, split=2 * i + 1 >= actor + 1)
      for _ in range(after):
        row.weights()
        row.backward(down, split=True)
      row.all_weights()
      rows.append(row.tasks)
    return tuple(rows)
