"""End-to-end tests: command lines, faults, resuming, benchmarks."""
