"""Builds the documentation site from ``docs``, the docstrings and the kept results of benchmarks: ``make docs``."""
