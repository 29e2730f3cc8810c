"""Traces a step and cuts it into programs; knows no schedule and no runtime."""
