"""Graceful shutdown of a cluster."""
