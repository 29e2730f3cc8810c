"""MPMD pipeline parallelism for Pax and for plain JAX."""

from pax_mpmd.compile.marks import accumulate_grads, pipeline_yield

__all__ = ['accumulate_grads', 'pipeline_yield']
