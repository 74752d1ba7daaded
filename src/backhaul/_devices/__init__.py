"""Tensors of CUDA devices: where they arrive, which stream waits for what, and how their memory is shared."""
