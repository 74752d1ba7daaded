"""Backward: one pass, at its driver and at every other worker that takes part."""
