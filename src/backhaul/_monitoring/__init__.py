"""Sees a running cluster: what its workers are doing, in a table, in a browser, and as metrics."""
