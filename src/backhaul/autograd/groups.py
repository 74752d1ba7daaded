"""What must run together. Walks a worker's graph from its sources and sorts them into groups.

Two sources belong to one group when they share a node that is not a leaf, or a leaf that carries hooks: gradients
of both meet there, and no node may run before all it is going to get is there. Knows no message and no pass;
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch

from backhaul.autograd.functions import End, Grads, MessageId, Recv, edge_of, recv_of
from backhaul.autograd.native import LeafNode, Node, pass_hooks


def hooked(leaf: torch.Tensor) -> object:
    """Joins the sources of a leaf that carries hooks, which must see their sum."""
    return id(leaf) if leaf._backward_hooks or leaf._post_accumulate_grad_hooks else None


class RecvEnd:
    """A message as far as a group reaches it: the nodes of its received tensors, by their place in the message."""

    __slots__ = ("nodes", "recv")

    def __init__(self, recv: Recv, nodes: dict[int, Node] | None = None) -> None:
        self.recv = recv
        self.nodes = {} if nodes is None else nodes

    def answer(self, found: Mapping[int, torch.Tensor | None]) -> Grads:
        """The gradients of all tensors of the message, from those that came to its nodes."""
        grads: list[torch.Tensor | None] = [None] * self.recv.count
        for index, grad in found.items():
            grads[index] = pass_hooks(self.nodes[index], grad)
        return grads


Fired = tuple[Recv, Grads]
"""A message, and the gradients that answer it."""


class Group:
    """Sources that run together, and the sinks they reach."""

    __slots__ = ("frozen", "leaves", "recvs", "size", "sources")

    def __init__(self) -> None:
        self.sources: list[MessageId] = []
        self.size = 0  # nodes, but for leaves
        self.leaves: dict[int, torch.Tensor] = {}  # by id
        self.frozen: dict[Node, None] = {}  # accumulation nodes of leaves that need no gradient any more
        self.recvs: dict[MessageId, RecvEnd] = {}

    def __repr__(self) -> str:
        return f"Group({self.sources} -> {len(self.leaves)} leaves, recvs {list(self.recvs)})"


_Reached = tuple[dict[int, torch.Tensor], dict[MessageId, RecvEnd], list[Node], int]
"""Leaves, messages, accumulation nodes of frozen leaves, and how many other nodes."""


class Grouping:
    """The groups of one worker, for given sources. Immutable.

    Args:
        sources: Where gradients may enter: for each source its ends.
        joins: What joins the sources that reach a leaf: those whose leaves give equal answers run together, None joins
            nothing.
    """

    def __init__(
        self,
        sources: Mapping[MessageId, Sequence[End]],
        joins: Callable[[torch.Tensor], object] = hooked,
    ) -> None:
        self.ends = sources
        self._parent: dict[MessageId, MessageId] = {}
        self._group_of: dict[MessageId, Group] = {}
        self._joins = joins
        walks = self._walk()
        for source in sources:
            group = self._group_of.setdefault(self._find(source), Group())
            group.sources.append(source)
            leaves, recvs, frozen, size = walks[source]
            group.size += size
            group.leaves.update(leaves)
            group.frozen.update(dict.fromkeys(frozen))
            for message, end in recvs.items():
                known = group.recvs.setdefault(message, end)
                known.nodes.update(end.nodes)
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

    def _walk(self) -> dict[MessageId, _Reached]:
        """Visit every node once; note which source came first, and join those that meet."""
        owner: dict[Node, MessageId] = {}
        meeting: dict[object, MessageId] = {}
        return {source: self._walk_from(source, ends, owner, meeting) for source, ends in self.ends.items()}

    def _walk_from(
        self,
        source: MessageId,
        ends: Sequence[End],
        owner: dict[Node, MessageId],
        meeting: dict[object, MessageId],
    ) -> _Reached:
        leaves: dict[int, torch.Tensor] = {}
        recvs: dict[MessageId, RecvEnd] = {}
        frozen: list[Node] = []
        size = 0
        stack: list[Node] = []
        for end in ends:
            if isinstance(end, torch.Tensor):
                self._reach_leaf(source, end, leaves, meeting)
            else:
                stack.append(end.node)
        while stack:
            node = stack.pop()
            first = owner.get(node) if node is not None else source
            if first == source:
                continue
            if first is None:
                owner[node] = source
            if type(node) is LeafNode:
                if not self._reach_leaf(source, node.variable, leaves, meeting):
                    frozen.append(node)
            elif first is not None:
                self._join(source, first)
            elif (mark := recv_of(node)) is not None:
                recv, index = mark
                recvs.setdefault(recv.message, RecvEnd(recv)).nodes[index] = node
                self._join(source, meeting.setdefault(recv, source))  # a message gets its gradients at once
            else:
                size += 1
                stack.extend(following for following, _ in node.next_functions)
        return leaves, recvs, frozen, size

    def _reach_leaf(
        self, source: MessageId, leaf: torch.Tensor, leaves: dict[int, torch.Tensor], meeting: dict[object, MessageId]
    ) -> bool:
        if not leaf.requires_grad:
            return False  # frozen since: its gradient is dropped, as in one process
        leaves[id(leaf)] = leaf
        if (place := self._joins(leaf)) is not None:
            self._join(source, meeting.setdefault(place, source))
        return True

    def reach(self) -> dict[MessageId, frozenset[MessageId]]:
        """For each source, the recv nodes that it reaches itself (not: that its group reaches)."""
        masks = RecvMasks()
        found = {source: masks.of(ends) for source, ends in self.ends.items()}
        return {source: masks.names(mask) for source, mask in found.items()}


class RecvMasks:
    """For each node, the messages whose recv nodes lie behind it, as the bits of an int. Linear in the size of the
    graph.
    """

    def __init__(self) -> None:
        self._numbers: dict[MessageId, int] = {}
        self.masks: dict[Node, int] = {}

    def of(self, ends: Sequence[End]) -> int:
        """Which messages' recv nodes lie behind any of ``ends``."""
        mask = 0
        for end in ends:
            if not isinstance(end, torch.Tensor):
                self._visit(end.node)
                mask |= self.masks[end.node]
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
            if kind is LeafNode:
                masks[node] = 0
            elif (mark := recv_of(node)) is not None:
                masks[node] = 1 << self._numbers.setdefault(mark[0].message, len(self._numbers))
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


def nodes_behind(ends: Iterable[End]) -> dict[Node, None]:
    """All nodes of this worker behind ``ends``, each after those behind it, in an order that depends on the graph and
    the order of ``ends`` alone.
    """
    found: dict[Node, None] = {}
    entered: set[Node] = set()
    for end in ends:
        stack: list[Node] = [edge_of(end).node]
        while stack:
            node = stack[-1]
            if node in found:
                stack.pop()
            elif node in entered or recv_of(node) is not None:
                found[node] = None
                stack.pop()
            else:
                entered.add(node)
                stack.extend(n for n, _ in reversed(node.next_functions) if n is not None and n not in found)
    return found


def reaches(ends: Sequence[End], goals: Set[Node]) -> bool:
    """Whether one of ``goals`` lies behind ``ends``."""
    return not goals.isdisjoint(nodes_behind(ends))
