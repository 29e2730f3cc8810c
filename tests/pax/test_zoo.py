"""Every pipelined experiment that Pax ships, shrunk, against Pax itself."""

from __future__ import annotations

import pytest

from tests.pax import compare
from tests.pax import tiny
from tests.pax import zoo

GROUPS = zoo.groups()


@pytest.mark.parametrize('group', GROUPS, ids=lambda group: group[0].__name__)
def test_equal_to_pax(group):
  """Five steps give Pax's losses, scalars, outputs, summaries, variables and optimizer slots."""
  experiment = zoo.shrink(group[0])
  spmd = tiny.Run(experiment, mpmd=False)
  mpmd = tiny.Run(
      experiment, mpmd=True, schedule=zoo.SCHEDULES[group[0].__name__], initial=spmd.initial
  )
  try:
    compare.assert_equal_to_pax(spmd, mpmd, num_steps=5, moves_visibly=True)
  finally:
    mpmd.close()


def test_the_groups_have_every_experiment_once():
  """All that Pax ships is there; the members of a group shrink to the same settings and code."""
  members = [experiment for group in GROUPS for experiment in group]
  assert sorted(e.__name__ for e in members) == sorted(e.__name__ for e in zoo.SHIPPED)
  for group in GROUPS:
    assert all(zoo.essence(zoo.shrink(e)) == zoo.essence(zoo.shrink(group[0])) for e in group)
  assert set(zoo.SCHEDULES) == {group[0].__name__ for group in GROUPS}
