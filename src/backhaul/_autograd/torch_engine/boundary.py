"""Boundary nodes: the nodes at which a worker's graph ends and another worker's begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backhaul._autograd.torch_engine.run import Node
from backhaul._native import core

BoundaryNodeClass: Any = torch._C._functions.Error  # type: ignore[attr-defined]
"""The class of boundary nodes. Torch uses it for nodes that always raise an error."""

MARK = "backhaul"
"""The key of a boundary node's mark in its ``metadata``."""


class BoundaryNode:
    """The end of a worker's graph: a node of torch that raises an error with ``message`` if it runs, and has a mark.

    A pass asks the engine for the gradient that arrives at the node, so the node never runs. A node in Python would
    have to run, and costs three times as much.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._put: Callable[[torch.Tensor], torch.Tensor] = torch._C._functions.DelayedError(message, 1)

    def put(self, tensor: torch.Tensor, mark: object) -> torch.Tensor:
        """``tensor``, a leaf that requires grad, as the output of a new boundary node."""
        output = self._put(tensor)
        node: Node = output.grad_fn
        node.metadata[MARK] = mark
        return output

    def put_all(
        self, tensors: list[torch.Tensor], positions: tuple[int, ...], owner: object
    ) -> list[torch.Tensor] | None:
        """``tensors``, with those at ``positions`` put as by ``put`` with the marks ``(owner, 0)``, ``(owner, 1)``, ...

        The native core does this. Returns None if there is none, if tensors are not ordinary, or if they share memory.
        """
        return None if core is None else core.record_received(tensors, positions, owner, MARK, self._message)

    @staticmethod
    def mark_of(node: Node) -> Any:
        """The mark of a node; None if it is no boundary node of ours."""
        return node.metadata.get(MARK) if type(node) is BoundaryNodeClass else None
