"""Which send records of the plain graph share a part of this worker's graph.

A pass outside contexts must know whether a source is alone: whether no other source can reach the same nodes. It must
not walk all graphs that are alive to find out. So each record is walked once, by the first pass after it, as far as no
other record has been before. The result is kept until the record is dropped.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch

from backhaul._autograd.backward.groups import Group, RecvEnd, nodes_behind
from backhaul._autograd.forward.functions import End, Recv
from backhaul._autograd.ids import ROOTS, MessageId
from backhaul._autograd.plain_graph import PlainGraph
from backhaul._autograd.torch_engine.boundary import MARK, BoundaryNodeClass
from backhaul._autograd.torch_engine.freeing import DEEP_NODES, free_one_by_one
from backhaul._autograd.torch_engine.run import LeafNode, Node

Joins = Callable[[torch.Tensor], object]
"""Returns a key for a leaf. Sources that reach leaves with equal keys run together; None joins nothing."""

Ignored = Callable[[MessageId], bool]
"""Whether a source takes no part in a pass, because the pass itself has made it."""


class IndexedSource:
    """What a walk from one source has found.

    Attributes:
        group: What the source reaches, as far as no other source had reached it before. Its ``leaves`` include those
            that need no gradient.
        leaf_nodes: The accumulation nodes of the leaves, by id of the leaf.
        stops: The sources whose nodes or messages the walk has met, and where it stopped.
        stoppers: The sources whose walks have stopped at nodes or messages of this one.
        call: The outermost call that the message belongs to; 0 for the roots of a pass.
    """

    __slots__ = ("call", "group", "leaf_nodes", "stoppers", "stops")

    def __init__(self, source: MessageId, call: int = 0) -> None:
        self.group = Group(source)
        self.call = call
        self.leaf_nodes: dict[int, Node] = {}
        self.stops: dict[MessageId, list[Node | Recv]] = {}
        self.stoppers: set[MessageId] = set()


class SourceIndex:
    """Knows for each source which others it meets. Not thread-safe; knows no records, locks or passes.

    Every node that a source reaches is owned by exactly one source. A walk stops at nodes of other sources. If the
    owner is removed, the walks that stopped at its nodes go on from there.

    Args:
        mark: The mark of receiving ends of the same graph, see ``Context.mark``. Others are foreign.
    """

    def __init__(self, mark: int) -> None:
        self._mark = mark
        self._sources: dict[MessageId, IndexedSource] = {}
        self._owner: dict[Node | Recv, MessageId] = {}  # the source that has reached a node or a message first
        self._of_leaf: dict[int, set[MessageId]] = {}  # the sources that reach a leaf, by its id
        self._of_call: dict[int, set[MessageId]] = {}  # the sources that belong to a call

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, source: MessageId, ends: Sequence[End], call: int) -> None:
        """Walk from a new source. ``call``: the outermost call that the message belongs to."""
        made = self._sources[source] = IndexedSource(source, call)
        self._of_call.setdefault(call, set()).add(source)
        self._walk(made, self._enter(made, ends), self._owner)
        if len(made.group.nodes) > DEEP_NODES:
            free_one_by_one([n for n in nodes_behind(ends) if type(n) not in (LeafNode, BoundaryNodeClass)])

    def look(self, ends: Sequence[End]) -> IndexedSource:
        """Walk from the roots of a pass. The index keeps nothing of that."""
        made = IndexedSource(ROOTS)
        own: dict[Node | Recv, MessageId] = {}
        self._walk(made, self._enter(made, ends), own)
        return made

    def remove(self, source: MessageId) -> IndexedSource | None:
        """Forget a source. The caller frees what is returned."""
        gone = self._sources.pop(source, None)
        if gone is None:
            return None
        group, owner = gone.group, self._owner
        recvs = group.recvs.values()
        for kept in (group.nodes, group.foreign, *(end.nodes.values() for end in recvs), (end.recv for end in recvs)):
            for each in kept:
                if owner.get(each) == source:
                    del owner[each]
        for table, keys in ((self._of_leaf, group.leaves), (self._of_call, (gone.call,))):
            for key in keys:
                sharing = table[key]
                sharing.discard(source)
                if not sharing:
                    del table[key]
        for other in gone.stops:
            self._sources[other].stoppers.discard(source)
        for other in gone.stoppers:
            stopper = self._sources[other]
            self._walk(stopper, stopper.stops.pop(source), owner)
        return gone

    def _enter(self, found: IndexedSource, ends: Sequence[End]) -> list[Node | Recv]:
        nodes: list[Node | Recv] = []
        for end in ends:
            if isinstance(end, torch.Tensor):
                self._reach_leaf(found, end)
            else:
                nodes.append(end.node)
        return nodes

    def _walk(self, found: IndexedSource, stack: list[Node | Recv], own: dict[Node | Recv, MessageId]) -> None:
        """Visit what no source has visited. ``own``: takes what is visited; the index, if the source is to be kept."""
        owner, group = self._owner, found.group
        source = group.sources[0]
        node: Any
        while stack:
            node = stack.pop()
            first = owner.get(node)
            if first == source or (node in own and own is not owner):
                continue
            if first is not None:
                self._stop(found, first, node)
                continue
            kind = type(node)
            if kind is LeafNode:
                leaf = node.variable
                found.leaf_nodes[id(leaf)] = node
                self._reach_leaf(found, leaf)
                continue
            own[node] = source
            if isinstance(node, Recv):
                continue  # the source that owned the message is gone
            if kind is BoundaryNodeClass and (mark := node.metadata.get(MARK)) is not None:
                self._reach_recv(found, node, mark, own)
            else:
                group.nodes.append(node)
                stack += [following for following, _ in node.next_functions if following is not None]

    def _stop(self, found: IndexedSource, owner: MessageId, at: Node | Recv) -> None:
        found.stops.setdefault(owner, []).append(at)
        source = found.group.sources[0]
        if source in self._sources:
            self._sources[owner].stoppers.add(source)

    def _reach_leaf(self, found: IndexedSource, leaf: torch.Tensor) -> None:
        found.group.leaves[id(leaf)] = leaf
        source = found.group.sources[0]
        if source in self._sources:
            self._of_leaf.setdefault(id(leaf), set()).add(source)

    def _reach_recv(
        self, found: IndexedSource, node: Node, mark: tuple[Recv, int], own: dict[Node | Recv, MessageId]
    ) -> None:
        group, (recv, index) = found.group, mark
        if recv.context != self._mark:
            group.foreign[node] = recv
            return
        known = group.recvs.get(recv.message)
        if known is not None:
            known.nodes[index] = node
            return
        group.recvs[recv.message] = RecvEnd(recv, {index: node})
        first = self._owner.get(recv)
        if first is None:
            own[recv] = group.sources[0]
        elif first != group.sources[0]:
            self._stop(found, first, recv)  # one gradient message answers all tensors of a message

    def alone(self, source: MessageId, joins: Joins, ignored: Ignored) -> Group | None:
        """The group of a source that meets no other; None if another source may have to run with it."""
        found = self._sources.get(source)
        return None if found is None else self.group_of(found, joins, ignored)

    def group_of(self, found: IndexedSource, joins: Joins, ignored: Ignored) -> Group | None:
        """As ``alone``, for what a walk has found."""
        if found.stops or not all(map(ignored, found.stoppers)):
            return None
        group, source = found.group, found.group.sources[0]
        frozen = False
        for number, leaf in group.leaves.items():
            frozen = frozen or not leaf.requires_grad
            key = joins(leaf)
            if key is None:
                continue
            sharing: Iterable[MessageId] = self._of_leaf.get(number, ()) if key == number else self._sources
            if any(other != source and not ignored(other) for other in sharing):
                return None
        return _without_frozen(found) if frozen else group

    def related(
        self, sources: Iterable[MessageId], calls: Iterable[int], roots: IndexedSource | None
    ) -> set[MessageId]:
        """The sources that a pass most likely reaches if it reaches ``sources`` or ``calls``, or starts at ``roots``.

        A message that a source reaches belongs to a call. This worker may have sent other messages of that call, and
        most likely the pass reaches them too.
        """
        todo = {source: self._sources[source] for source in sources if source in self._sources}
        if roots is not None:
            todo[ROOTS] = roots
        found: set[MessageId] = set()
        seen = set(todo)
        ahead = set(calls)
        while todo or ahead:
            if todo:
                _, at = todo.popitem()
                ahead.update(end.recv.order[0] for end in at.group.recvs.values() if end.recv.order)
                reached: Set[MessageId] = at.stops.keys()
            else:
                reached = self._of_call.get(ahead.pop(), set())
                found |= reached
            todo |= {source: self._sources[source] for source in reached - seen}
            seen |= reached
        return found


def _without_frozen(found: IndexedSource) -> Group:
    """The group of a source, with leaves that need no gradient any more set apart."""
    whole, group = found.group, Group(found.group.sources[0])
    group.nodes, group.recvs, group.foreign = whole.nodes, whole.recvs, whole.foreign
    for number, leaf in whole.leaves.items():
        if leaf.requires_grad:
            group.leaves[number] = leaf
        elif number in found.leaf_nodes:
            group.frozen[found.leaf_nodes[number]] = None
    return group


class PlainSources:
    """The index of one worker's plain graph, kept up to date. Thread-safe.

    Args:
        graph: The plain graph.
    """

    def __init__(self, graph: PlainGraph) -> None:
        self._graph = graph
        self._index = SourceIndex(graph.mark)
        self._lock = threading.Lock()  # guards the index
        self._gone: collections.deque[MessageId] = collections.deque()
        graph.on_dropped = self._forget

    def __len__(self) -> int:
        """How many records have been walked and are not forgotten."""
        return len(self._index)

    def alone(self, source: MessageId, joins: Joins, ignored: Ignored) -> Group | None:
        """The group of a source that meets no other source; None if it may have to run with others."""
        with self._lock:
            self._update()
            group = self._index.alone(source, joins, ignored)
        self._tidy()
        return group

    def roots_alone(self, roots: Sequence[End], joins: Joins, ignored: Ignored) -> Group | None:
        """As ``alone``, for the roots of a pass."""
        with self._lock:
            self._update()
            group = self._index.group_of(self._index.look(roots), joins, ignored)
        self._tidy()
        return group

    def related(
        self, sources: Iterable[MessageId], calls: Iterable[int], roots: Sequence[End] | None
    ) -> set[MessageId]:
        """See ``SourceIndex.related``."""
        with self._lock:
            self._update()
            found = self._index.related(sources, calls, None if roots is None else self._index.look(roots))
        self._tidy()
        return found

    def _update(self) -> None:
        """Walk the records that are new."""
        pending, sends = self._graph.pending, self._graph.sends
        if not pending:
            return
        for message in list(pending):
            if pending.pop(message, None) is not None and (record := sends.get(message)) is not None:
                self._index.add(message, record.ends, record.order[0] if record.order else 0)

    def _forget(self, messages: Iterable[MessageId]) -> None:
        """Records were dropped. If another thread uses the index, that thread forgets them when it is done."""
        self._gone.extend(messages)
        self._tidy()

    def _tidy(self) -> None:
        while self._gone and self._lock.acquire(blocking=False):
            freed: list[IndexedSource | None] = []  # destroyed without the lock: destructors may run any code
            try:
                while self._gone:
                    freed.append(self._index.remove(self._gone.popleft()))
            finally:
                self._lock.release()
            del freed
