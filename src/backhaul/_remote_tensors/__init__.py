"""Tensors that stay on the worker that owns them, and that other workers use as PyTorch tensors."""
