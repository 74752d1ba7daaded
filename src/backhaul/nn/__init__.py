"""Modules that live on other workers."""

from backhaul.nn.remote_module import RemoteModule
from backhaul.nn.splitting import gather, split

__all__ = ["RemoteModule", "gather", "split"]
