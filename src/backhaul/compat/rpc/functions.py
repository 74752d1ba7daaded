"""Functions that answer later."""

from backhaul.rpc.dispatch import async_execution

__all__ = ["async_execution"]
