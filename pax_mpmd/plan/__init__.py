"""Joins schedules and compiled steps into plans, and checks them. No JAX here."""

from pax_mpmd.plan.instructions import ActorPlan
from pax_mpmd.plan.instructions import Free
from pax_mpmd.plan.instructions import Instruction
from pax_mpmd.plan.instructions import Plan
from pax_mpmd.plan.instructions import Recv
from pax_mpmd.plan.instructions import Run
from pax_mpmd.plan.instructions import Send
from pax_mpmd.plan.liveness import peak_bytes
from pax_mpmd.plan.lower import lower
from pax_mpmd.plan.text import format_instruction
from pax_mpmd.plan.text import format_plan
from pax_mpmd.plan.text import summary
from pax_mpmd.plan.values import verify_values
from pax_mpmd.plan.verify import verify

__all__ = [
    'ActorPlan',
    'Free',
    'Instruction',
    'Plan',
    'Recv',
    'Run',
    'Send',
    'format_instruction',
    'format_plan',
    'lower',
    'peak_bytes',
    'summary',
    'verify',
    'verify_values',
]
