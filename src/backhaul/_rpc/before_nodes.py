"""What happens before a node starts. Imports nothing, so that ``import backhaul`` can add to it at no cost."""

from __future__ import annotations

from collections.abc import Callable

before_nodes: list[Callable[[], None]] = []
"""Functions to call before each node starts. One of them imports the layers above RPC, which add to
``interceptors.extensions`` when they are imported.
"""
