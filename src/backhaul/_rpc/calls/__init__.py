"""Calls: making them, serving them, cancelling them and making them again."""
