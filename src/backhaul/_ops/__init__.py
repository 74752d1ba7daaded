"""``remote_op``: calls that are operators of a graph, for ``torch.compile`` and ``torch.func``."""
