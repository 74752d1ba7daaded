"""Tensors <-> plain specs plus raw buffers."""
