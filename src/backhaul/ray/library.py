"""Imports Ray at the first use. Nothing else in the package imports Ray, so the package works where Ray is absent."""

from __future__ import annotations

import importlib.util
from typing import Any


def find_ray() -> Any:
    """The module ``ray``. Raises ``ImportError`` if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError("backhaul.ray needs Ray, which is not installed: pip install 'backhaul[ray]'", name="ray")
    import ray

    return ray


def connected_ray() -> Any:
    """The module ``ray``, connected to a Ray cluster; to the one that ``ray.init()`` finds or starts, if to none yet.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: This process is a client of a remote Ray cluster.
    """
    ray = find_ray()
    if ray.util.client.ray.is_connected():
        raise RuntimeError(
            "this process is a Ray Client (ray://...), which workers cannot call; run the program as a Ray job, or on "
            "a node of the Ray cluster"
        )
    if not ray.is_initialized():
        ray.init()
    return ray
