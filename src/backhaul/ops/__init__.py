"""Calls that are operations of a graph, for ``torch.compile`` and ``torch.func``."""

from backhaul.ops.remote_op import RemoteOp, remote_op

__all__ = ["RemoteOp", "remote_op"]
