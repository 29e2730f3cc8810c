"""Pax experiments through MPMD: the only part of pax_mpmd that imports Pax."""

# ruff: noqa: E402

from pax_mpmd.pax import requirements

requirements.check()  # before Pax itself fails in its own words

from pax_mpmd.pax.executor import MpmdExecutor
from pax_mpmd.pax.layer import MpmdPipelinedTransformer
from pax_mpmd.pax.mixin import MpmdPipelineMixin
from pax_mpmd.pax.partitioner import MpmdPartitioner

__all__ = ['MpmdExecutor', 'MpmdPartitioner', 'MpmdPipelineMixin', 'MpmdPipelinedTransformer']
