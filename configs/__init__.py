"""Experiments to run and to copy from; run them from the repository's root."""
