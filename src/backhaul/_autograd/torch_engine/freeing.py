"""Freeing of deep graphs without recursion."""

from __future__ import annotations

from collections.abc import Sequence

from backhaul._autograd.torch_engine.run import Node

DEEP_NODES = 10_000
"""A group with more nodes than this is freed one node at a time."""

_MAX_RECURSION_NODES = 2_000  # so many nodes torch may free by recursion
_BEHIND = "backhaul_behind"


def free_one_by_one(nodes: Sequence[Node]) -> None:
    """Make sure that a graph is freed node by node, whichever part of it a program keeps.

    Torch frees nodes that Python has seen by recursion. A long chain of them would need more stack than there is. So
    each node gets a list of nodes behind it in its ``metadata``, and a list is freed from its end. A node refers only
    to nodes that it leads to anyway: this makes no reference cycle, in whatever order passes visit the graph, and keeps
    nothing alive that the graph would not keep.

    Args:
        nodes: All nodes, each after those behind it.
    """
    for end in range(len(nodes), 1, -_MAX_RECURSION_NODES):
        row = nodes[max(end - _MAX_RECURSION_NODES, 0) : end]
        places = {node: place for place, node in enumerate(row)}
        left = set(row)
        for node in reversed(row):
            if node not in left:
                continue
            behind: list[Node] = []
            ahead = [node]
            while ahead:
                following = {n for n, _ in ahead.pop().next_functions} & left
                left -= following
                ahead += following
                behind += following
            if behind:
                node.metadata[_BEHIND] = sorted(behind, key=places.__getitem__)  # a list is freed from its end
