"""Tensors <-> plain specs and raw buffers."""
