"""Modules that live on other workers."""

from backhaul.nn.remote_module import RemoteModule

__all__ = ["RemoteModule"]
