"""Moves frames between workers; knows no message."""
