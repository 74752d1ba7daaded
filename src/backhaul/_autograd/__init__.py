"""Gradients across workers: contexts, what is recorded, and the passes that go back through it."""
