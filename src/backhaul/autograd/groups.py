"""What must run together. Walks a worker's graph from its sources and sorts them into groups.

Two sources belong to one group when they share a node that is not a leaf, or a leaf that carries hooks: gradients
of both meet there, and no node may run before all it is going to get is there. Knows no message and no pass;
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch.autograd.graph import GradientEdge

from backhaul.autograd.functions import MessageId, Recv, RecvNode
from backhaul.autograd.native import LeafNode, Node


def hooked(leaf: torch.Tensor) -> object:
    """Joins the sources of a leaf that carries hooks, which must see their sum."""
    return id(leaf) if leaf._backward_hooks or leaf._post_accumulate_grad_hooks else None


class Group:
    """Sources that run together, and the sinks they reach."""

    __slots__ = ("leaves", "recvs", "sources")

    def __init__(self) -> None:
        self.sources: list[MessageId] = []
        self.leaves: dict[int, torch.Tensor] = {}  # by id
        self.recvs: dict[MessageId, Recv] = {}

    def __repr__(self) -> str:
        return f"Group({self.sources} -> {len(self.leaves)} leaves, recvs {list(self.recvs)})"


class Grouping:
    """The groups of one worker, for given sources. Immutable.

    Args:
        sources: Where gradients may enter: for each source its edges.
        joins: What joins the sources that reach a leaf: those whose leaves give equal answers run together, None joins
            nothing.
    """

    def __init__(
        self,
        sources: Mapping[MessageId, Sequence[GradientEdge]],
        joins: Callable[[torch.Tensor], object] = hooked,
    ) -> None:
        self.edges = sources
        self._parent: dict[MessageId, MessageId] = {}
        self._group_of: dict[MessageId, Group] = {}
        self._joins = joins
        walks = self._walk()
        for source in sources:
            group = self._group_of.setdefault(self._find(source), Group())
            group.sources.append(source)
            leaves, recvs = walks[source]
            group.leaves.update(leaves)
            group.recvs.update(recvs)
        for source in sources:
            self._group_of[source] = self._group_of[self._find(source)]

    def of(self, source: MessageId) -> Group:
        """The group that a source belongs to."""
        return self._group_of[source]

    @property
    def groups(self) -> list[Group]:
        """All groups, in the order of their first sources."""
        return list({id(group): group for group in self._group_of.values()}.values())

    def _find(self, source: MessageId) -> MessageId:
        parent = self._parent
        while (above := parent.setdefault(source, source)) != source:
            parent[source] = source = parent[above]
        return source

    def _join(self, one: MessageId, other: MessageId) -> None:
        self._parent[self._find(one)] = self._find(other)

    def _walk(self) -> dict[MessageId, tuple[dict[int, torch.Tensor], dict[MessageId, Recv]]]:
        """Visit every node once; note which source came first, and join those that meet."""
        owner: dict[Node, MessageId] = {}
        meeting: dict[object, MessageId] = {}
        found = {}
        for source, edges in self.edges.items():
            leaves: dict[int, torch.Tensor] = {}
            recvs: dict[MessageId, Recv] = {}
            found[source] = leaves, recvs
            stack: list[Node] = [edge.node for edge in edges]
            while stack:
                node = stack.pop()
                if node is None:
                    continue
                first = owner.get(node)
                if first == source:
                    continue
                if first is None:
                    owner[node] = source
                kind = type(node)
                if kind is LeafNode:
                    leaf = node.variable
                    if not leaf.requires_grad:
                        continue  # frozen since: its gradient is dropped, as in one process
                    leaves[id(leaf)] = leaf
                    if (place := self._joins(leaf)) is not None:
                        self._join(source, meeting.setdefault(place, source))
                elif first is not None:
                    self._join(source, first)
                elif kind is RecvNode:
                    recvs[node.recv.message] = node.recv
                else:
                    stack.extend(following for following, _ in node.next_functions)
        return found

    def reach(self) -> dict[MessageId, frozenset[MessageId]]:
        """For each source, the recv nodes that it reaches itself (not: that its group reaches)."""
        masks = RecvMasks()
        found = {source: masks.of(edges) for source, edges in self.edges.items()}
        return {source: masks.names(mask) for source, mask in found.items()}


class RecvMasks:
    """For each node, the set of recv nodes behind it, as the bits of an int. Linear in the size of the graph."""

    def __init__(self) -> None:
        self._numbers: dict[MessageId, int] = {}
        self.masks: dict[Node, int] = {}

    def of(self, edges: Sequence[GradientEdge]) -> int:
        """Which recv nodes lie behind any of ``edges``."""
        mask = 0
        for edge in edges:
            self._visit(edge.node)
            mask |= self.masks[edge.node]
        return mask

    def names(self, mask: int) -> frozenset[MessageId]:
        """The messages that a mask stands for."""
        return frozenset(message for message, bit in self._numbers.items() if mask >> bit & 1)

    def _visit(self, start: Node) -> None:
        masks = self.masks
        stack = [start]  # not recursive: graphs are deeper than Python's stack
        while stack:
            node = stack[-1]
            if node in masks:
                stack.pop()
                continue
            kind = type(node)
            if kind is RecvNode:
                masks[node] = 1 << self._numbers.setdefault(node.recv.message, len(self._numbers))
            elif kind is LeafNode:
                masks[node] = 0
            else:
                following = [n for n, _ in node.next_functions if n is not None]
                ahead = [n for n in following if n not in masks]
                if ahead:
                    stack.extend(ahead)
                    continue
                mask = 0
                for n in following:
                    mask |= masks[n]
                masks[node] = mask
            stack.pop()


def reaches(edges: Sequence[GradientEdge], goals: Set[Node]) -> bool:
    """Whether one of ``goals`` lies behind ``edges``."""
    seen: set[Node] = set()
    stack: list[Node] = [edge.node for edge in edges]
    while stack:
        node = stack.pop()
        if node in goals:
            return True
        if node is None or node in seen or type(node) is RecvNode:
            continue
        seen.add(node)
        stack.extend(following for following, _ in node.next_functions)
    return False
