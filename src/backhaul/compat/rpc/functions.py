"""Functions that answer later."""

from backhaul._rpc.calls.server import async_execution

__all__ = ["async_execution"]
