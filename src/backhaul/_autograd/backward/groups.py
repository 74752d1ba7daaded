"""Groups: the sources of a worker that must run together.

Two sources belong to one group if they share a node that is not a leaf, or a leaf with hooks. Gradients of both meet
there, and a node may run only when all its gradients have arrived. This module walks a worker's graph from its sources
and sorts them into groups. It knows no frame and no pass, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set

import torch

from backhaul._autograd.forward.functions import End, Grads, Recv, edge_of, recv_of
from backhaul._autograd.ids import NO_CONTEXT, MessageId
from backhaul._autograd.torch_engine import sharded
from backhaul._autograd.torch_engine.boundary import MARK, BoundaryNodeClass
from backhaul._autograd.torch_engine.freeing import DEEP_NODES, free_one_by_one
from backhaul._autograd.torch_engine.hooks import node_hooks, pass_hooks
from backhaul._autograd.torch_engine.run import LeafNode, Node


def hooked(leaf: torch.Tensor) -> object:
    """A key that joins the sources of a leaf with hooks: the hooks must see the sum of their gradients."""
    return id(leaf) if leaf._backward_hooks or leaf._post_accumulate_grad_hooks else None


class RecvEnd:
    """A message as far as a group reaches it: the nodes of its received tensors, by their place in the message."""

    __slots__ = ("nodes", "recv")

    def __init__(self, recv: Recv, nodes: dict[int, Node] | None = None) -> None:
        self.recv = recv
        self.nodes = {} if nodes is None else nodes

    def answer(self, found: Mapping[int, torch.Tensor | None]) -> Grads:
        """The gradients of all tensors of the message, from those that arrived at its nodes."""
        grads: list[torch.Tensor | None] = [None] * self.recv.count
        for index, grad in found.items():
            grads[index] = pass_hooks(self.nodes[index], grad) if node_hooks.possible else grad
        return grads


Fired = tuple[Recv, Grads]
"""A message, and the gradients that answer it."""


class Group:
    """Sources that run together, and the sinks they reach."""

    __slots__ = ("foreign", "frozen", "leaves", "nodes", "recvs", "sources")

    def __init__(self, source: MessageId) -> None:
        self.sources = [source]
        self.nodes: list[Node] = []  # without leaves and recv nodes
        self.leaves: dict[int, torch.Tensor] = {}  # by id
        self.frozen: dict[Node, None] = {}  # accumulation nodes of leaves that no longer need a gradient
        self.recvs: dict[MessageId, RecvEnd] = {}
        self.foreign: dict[Node, Recv] = {}  # recv nodes of other contexts, which take no gradient here

    def absorb(self, other: Group) -> None:
        """Take in another group."""
        self.sources += other.sources
        self.nodes += other.nodes
        self.leaves.update(other.leaves)
        self.frozen.update(other.frozen)
        self.foreign.update(other.foreign)
        for message, end in other.recvs.items():
            self.recvs.setdefault(message, end).nodes.update(end.nodes)

    def __repr__(self) -> str:
        return f"Group({self.sources} -> {len(self.leaves)} leaves, recvs {list(self.recvs)})"


class Grouping:
    """The groups of one worker, for given sources. Immutable.

    Args:
        sources: Where gradients may enter: the ends of each source.
        joins: Returns a key for a leaf. Sources that reach leaves with equal keys run together; None joins nothing.
        context: The context of the sources. Recv nodes of other contexts are foreign.

    Attributes:
        ends: The ends of each source.
        foreign: All foreign recv nodes.
        find: Returns the group of a source; None if there is no such source.
    """

    find: Callable[[MessageId], Group | None]

    def __init__(
        self,
        sources: Mapping[MessageId, Sequence[End]],
        joins: Callable[[torch.Tensor], object] = hooked,
        context: int = NO_CONTEXT,
    ) -> None:
        self.ends = sources
        self.foreign: set[Node] = set()
        self._context = context
        self._joins = joins
        self._owner: dict[Node, MessageId] = {}  # the source that reached a node first
        self._meeting: dict[object, MessageId] = {}  # likewise for keys that join sources
        self._parent: dict[MessageId, MessageId] = {}  # union-find; empty as long as nothing is joined
        self._group_of = {source: self._walk(source, ends) for source, ends in sources.items()}
        for source, group in self._group_of.items():
            if sharded.among(group.nodes):
                self._join(source, self._meeting.setdefault(sharded.SHARDED, source))
        self.find = self._group_of.get
        if self._parent:
            self._merge()
        if len(self._owner) > DEEP_NODES:
            for group in self.groups:
                if len(group.nodes) > DEEP_NODES:
                    ends = [end for source in group.sources for end in sources[source]]
                    free_one_by_one(
                        [node for node in nodes_behind(ends) if type(node) not in (LeafNode, BoundaryNodeClass)]
                    )
        del self._owner, self._meeting

    def of(self, source: MessageId) -> Group:
        """The group of a source."""
        return self._group_of[source]

    @property
    def groups(self) -> list[Group]:
        """All groups, in the order of their first sources."""
        return list({id(group): group for group in self._group_of.values()}.values())

    def _merge(self) -> None:
        merged: dict[MessageId, Group] = {}
        for source, group in self._group_of.items():
            first = merged.setdefault(self._first_of(source), group)
            if first is not group:
                first.absorb(group)
                self._group_of[source] = first

    def _first_of(self, source: MessageId) -> MessageId:
        parent = self._parent
        while (above := parent.get(source, source)) != source:
            parent[source] = source = parent.get(above, above)
        return source

    def _join(self, one: MessageId, other: MessageId) -> None:
        one, other = self._first_of(one), self._first_of(other)
        if one != other:
            self._parent[one] = other

    def _walk(self, source: MessageId, ends: Sequence[End]) -> Group:
        """Visit what no earlier source has visited, and join sources that meet."""
        group = Group(source)
        owner = self._owner
        stack: list[Node] = []
        for end in ends:
            if isinstance(end, torch.Tensor):
                self._reach_leaf(source, group, end)
            else:
                stack.append(end.node)
        while stack:
            node = stack.pop()
            first = owner.get(node)
            if first == source:
                continue
            kind = type(node)
            if kind is LeafNode:
                owner[node] = source
                if not self._reach_leaf(source, group, node.variable):
                    group.frozen[node] = None
            elif first is not None:
                self._join(source, first)
            else:
                owner[node] = source
                if kind is BoundaryNodeClass and (mark := node.metadata.get(MARK)) is not None:
                    self._reach_recv(source, group, node, mark)
                else:
                    group.nodes.append(node)
                    stack += [following for following, _ in node.next_functions if following is not None]
        return group

    def _reach_recv(self, source: MessageId, group: Group, node: Node, mark: tuple[Recv, int]) -> None:
        recv, index = mark
        if recv.context != self._context:
            group.foreign[node] = recv
            self.foreign.add(node)
            return
        known = group.recvs.get(recv.message)
        if known is not None:
            known.nodes[index] = node
            return
        group.recvs[recv.message] = RecvEnd(recv, {index: node})
        first = self._meeting.setdefault(recv, source)
        if first != source:
            self._join(source, first)  # one gradient message answers all tensors of a message

    def _reach_leaf(self, source: MessageId, group: Group, leaf: torch.Tensor) -> bool:
        if not leaf.requires_grad:
            return False  # frozen since the forward: its gradient is dropped, as in one process
        group.leaves[id(leaf)] = leaf
        key = self._joins(leaf)
        if key is not None:
            self._join(source, self._meeting.setdefault(key, source))
        return True

    def reach(self) -> dict[MessageId, frozenset[MessageId]]:
        """For each source, the recv nodes that the source itself reaches, not its whole group."""
        masks = RecvMasks(self.foreign)
        found = {source: masks.of(ends) for source, ends in self.ends.items()}
        return {source: masks.names(mask) for source, mask in found.items()}


class RecvMasks:
    """For each node, the messages whose recv nodes lie behind it, as the bits of an int.

    The work is linear in the size of the graph.

    Args:
        foreign: Recv nodes that do not count.
    """

    def __init__(self, foreign: Container[Node] = ()) -> None:
        self._foreign = foreign
        self._numbers: dict[MessageId, int] = {}
        self._messages: list[MessageId] = []  # by number
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
        found = []
        while mask:  # visit set bits only: most masks have few
            lowest = mask & -mask
            found.append(self._messages[lowest.bit_length() - 1])
            mask ^= lowest
        return frozenset(found)

    def _number(self, message: MessageId) -> int:
        number = self._numbers.setdefault(message, len(self._messages))
        if number == len(self._messages):
            self._messages.append(message)
        return number

    def _visit(self, start: Node) -> None:
        masks = self.masks
        stack = [start]  # no recursion: graphs are deeper than Python's stack
        while stack:
            node = stack[-1]
            if node in masks:
                stack.pop()
                continue
            kind = type(node)
            if kind is LeafNode:
                masks[node] = 0
            elif (mark := recv_of(node)) is not None:
                masks[node] = 0 if node in self._foreign else 1 << self._number(mark[0].message)
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
    """All nodes of this worker behind ``ends``, each after those behind it. The order depends only on the graph and on
    the order of ``ends``.
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
