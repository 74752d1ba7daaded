"""Calls that are operations of a graph, for ``torch.compile`` and ``torch.func``."""
