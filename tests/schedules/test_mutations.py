"""Schedules with one thing wrong: harmless, or refused with the place named.

Exhaustive for small schedules. What is valid is decided by a separate judge (`mutations.can_run`);
that harmless changes don't change results is seen by running their plans on whole numbers.
"""

from __future__ import annotations

import itertools
import re

import pytest

from pax_mpmd import errors
from pax_mpmd import schedules
from pax_mpmd.plan import lower
from pax_mpmd.plan import verify
from pax_mpmd.schedules import Phase
from pax_mpmd.schedules import validate
from tests.messages import assert_readable
from tests.plan.evaluate import evaluate_plan
from tests.plan.synthetic import evaluate_step
from tests.plan.synthetic import synthetic_step
from tests.schedules import mutations
from tests.schedules.random_schedules import random_schedule

S, M = 3, 3

GOOD = {
    'gpipe': schedules.GPipe(S),
    '1f1b': schedules.OneFOneB(S),
    '1f1b, two actors': schedules.OneFOneB(S, 2),
    'interleaved_1f1b': schedules.InterleavedOneFOneB(4, 2),
    'zb_h1': schedules.ZeroBubbleH1(S),
    'dualpipe_v': schedules.DualPipeV(4, 2),
    'random': random_schedule(3, S, S, M),
    'mixed stages': random_schedule(5, S, 2, M, 'mixed'),
    'mixed microbatches': random_schedule(1, S, S, M, 'each'),
}


@pytest.mark.parametrize('name', GOOD)
def test_every_single_mistake(name):
  """Any one task swapped, dropped, doubled, moved or renamed: as before, or refused by name."""
  good = GOOD[name]
  rows, num_stages = tuple(map(tuple, good.tasks(M))), good.num_stages
  split = {task.stage for row in rows for task in row if task.phase is Phase.W}
  phases = ['FIW' if stage in split else 'FB' for stage in range(num_stages)]
  synthetic = synthetic_step(good.placement(), M, phases)
  want = evaluate_step(synthetic)
  harmless, refused = set(), set()
  for changed, touched in itertools.chain(
      mutations.swaps(rows),
      mutations.drops(rows),
      mutations.doubles(rows),
      mutations.moves(rows),
      mutations.renames(rows, num_stages, M),
  ):
    if changed in harmless or changed in refused:
      continue
    mutant = mutations.Given(num_stages, good.num_actors, changed, tuple(good.placement()))
    if mutations.can_run(mutant, M):
      harmless.add(changed)
      validate(mutant, M)
      plan = lower(synthetic.step, mutant)
      verify(plan)
      assert evaluate_plan(plan, synthetic.functions, synthetic.inputs) == want
    else:
      refused.add(changed)
      with pytest.raises(errors.ScheduleError) as e:
        validate(mutant, M)
      text = str(e.value)
      assert any(re.search(rf'(?<![\w-]){task}(?!\w)', text) for task in touched), (touched, text)
      assert re.search(r'>-?\d+[FBIW]-?\d+<', text), text
      assert_readable(text)
  assert len(harmless) > 10 and len(refused) > 500
