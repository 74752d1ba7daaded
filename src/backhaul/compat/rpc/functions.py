"""Functions that answer later."""

from backhaul._rpc.calls.async_results import async_execution

__all__ = ["async_execution"]
