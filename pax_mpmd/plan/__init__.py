"""Joins schedules and compiled steps into plans, and checks them. No JAX here."""

from pax_mpmd.plan.instructions import ActorPlan, Free, Instruction, Plan, Recv, Run, Send
from pax_mpmd.plan.liveness import peak_bytes
from pax_mpmd.plan.lower import lower
from pax_mpmd.plan.text import format_instruction, format_plan, summary
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
]
