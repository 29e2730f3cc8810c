"""Unit tests; the folders mirror the packages they test."""
