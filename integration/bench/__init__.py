"""Benchmarks: ratios of sides that take turns. `python -m integration.bench` runs all of them."""
