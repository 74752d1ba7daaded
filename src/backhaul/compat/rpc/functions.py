"""The decorator for functions that return a future of their result."""

from backhaul._rpc.calls.async_results import async_execution

__all__ = ["async_execution"]
