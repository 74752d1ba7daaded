"""What happens before a node starts, or a function is scripted. Imports nothing, so that ``import backhaul`` can add to
it at no cost.
"""

from __future__ import annotations

from collections.abc import Callable

before_nodes: list[Callable[[], None]] = []
"""Functions to call before each node starts; calling them again does nothing. One of them imports the layers above RPC,
which add to ``interceptors.extensions`` when they are imported.
"""


def prepare() -> None:
    """Call them."""
    for each in before_nodes:
        each()
