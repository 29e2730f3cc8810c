"""Pipeline schedules: which actor runs which task when. Pure Python, no arrays."""

from pax_mpmd.schedules.base import Schedule
from pax_mpmd.schedules.bfs import LoopedBFS
from pax_mpmd.schedules.dualpipe_v import DualPipeV
from pax_mpmd.schedules.gpipe import GPipe
from pax_mpmd.schedules.grid import format_grid
from pax_mpmd.schedules.interleaved import InterleavedOneFOneB
from pax_mpmd.schedules.one_f_one_b import EagerOneFOneB
from pax_mpmd.schedules.one_f_one_b import OneFOneB
from pax_mpmd.schedules.registry import get
from pax_mpmd.schedules.registry import NAMES
from pax_mpmd.schedules.simulate import simulate
from pax_mpmd.schedules.simulate import Simulation
from pax_mpmd.schedules.table import FromTable
from pax_mpmd.schedules.table import to_csv
from pax_mpmd.schedules.task import Phase
from pax_mpmd.schedules.task import Task
from pax_mpmd.schedules.validate import validate
from pax_mpmd.schedules.zb_h1 import ZeroBubbleH1
from pax_mpmd.schedules.zb_v import ZeroBubbleV

__all__ = [
    'NAMES',
    'DualPipeV',
    'EagerOneFOneB',
    'FromTable',
    'GPipe',
    'InterleavedOneFOneB',
    'LoopedBFS',
    'OneFOneB',
    'Phase',
    'Schedule',
    'Simulation',
    'Task',
    'ZeroBubbleH1',
    'ZeroBubbleV',
    'format_grid',
    'get',
    'simulate',
    'to_csv',
    'validate',
]
