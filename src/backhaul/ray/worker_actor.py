"""One worker, as a Ray actor. Ray makes it again with the same arguments when its process has died."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from backhaul._rpc.ending import shutdown
from backhaul.ray.directory import find_directory
from backhaul.ray.library import find_ray
from backhaul.ray.membership import join_members

log = logging.getLogger("backhaul")


class BackhaulWorker:
    """The actor. Its process serves calls of other workers on threads of its own, whatever the actor does."""

    def __init__(self, name: str, rank: int, cluster: str) -> None:
        # The directory by its name: Ray warns of actors that it may have to restart with the handle of another actor.
        self._name = name
        ray = find_ray()
        if join_members(ray, find_directory(ray, cluster, None), name, rank):
            log.warning("worker '%s' was restarted by Ray and has joined again, without what it held before", name)

    def __repr__(self) -> str:
        """Ray puts this before each line that the actor prints."""
        return self._name

    def ready(self) -> None:
        """The worker has joined."""

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function in this process."""
        result = function(*args, **kwargs)
        refuse_graphs(result, f"the result of worker '{self._name}'")
        return result

    def end(self, timeout: float) -> None:
        """Shut the worker down, together with all others."""
        shutdown(timeout=timeout)


def refuse_graphs(value: Any, what: str) -> None:
    """Raise ``ValueError`` if a tensor in ``value`` has a graph: Ray would drop the graph, and gradients with it."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            raise ValueError(
                f"{what} has a tensor that is part of an autograd graph, and Ray carries no gradients: detach() the "
                "tensor, or make the call with backhaul.rpc_sync, which carries them"
            )
