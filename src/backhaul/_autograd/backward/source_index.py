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
from backhaul._autograd.torch_engine import sharded
from backhaul._autograd.torch_engine.boundary import MARK, BoundaryNodeClass
from backhaul._autograd.torch_engine.freeing import DEEP_NODES, free_one_by_one
from backhaul._autograd.torch_engine.run import LeafNode, Node

Joins = Callable[[torch.Tensor], object]
"""Returns a key for a leaf. Sources that reach leaves with equal keys run together; None joins nothing."""

Ignored = Callable[[MessageId], bool]
"""Whether a source takes no part in a pass, because the pass itself has made it."""


class IndexedSource(Group):
    """What a walk from one source has found: what the source reaches, as far as no other source had reached it before.

    Attributes:
        leaves: The leaves, also those that need no gradient any more.
        ends: Where gradients enter.
        order: The place of the message in program order.
        call: The outermost call that the message belongs to; 0 for the roots of a pass.
        stops: The sources whose nodes or messages the walk has met, and where it stopped.
        stoppers: The sources whose walks have stopped at nodes or messages of this one.
    """

    __slots__ = ("call", "ends", "order", "stoppers", "stops")

    def __init__(self, source: MessageId, ends: Sequence[End], order: tuple[int, ...] = ()) -> None:
        super().__init__(source)
        self.ends = ends
        self.order = order
        self.call = order[0] if order else 0
        # Most sources meet no other. Not to make these then saves garbage collections.
        self.stops: dict[MessageId, list[Node | Recv]] | None = None
        self.stoppers: set[MessageId] | None = None

    def take_stops(self, owner: MessageId) -> list[Node | Recv]:
        """Where the walk stopped at what ``owner`` owns; forgotten here."""
        assert self.stops is not None
        stops = self.stops.pop(owner)
        self.stops = self.stops or None
        return stops

    def drop_stopper(self, source: MessageId) -> None:
        """A source whose walk stopped here is gone."""
        assert self.stoppers is not None
        self.stoppers.discard(source)
        self.stoppers = self.stoppers or None


class SourceIndex:
    """Knows for each source which others it meets. Not thread-safe; knows no records, locks or passes.

    Every node that a source reaches is owned by exactly one source. A walk stops at nodes of other sources. If the
    owner is removed, the walks that stopped at its nodes go on from there.

    Args:
        mark: The mark of receiving ends of the same graph, see ``Context.mark``. Others are foreign.

    Attributes:
        find: Returns what the walk from a source has found; None if there is no such source.
    """

    find: Callable[[MessageId], IndexedSource | None]

    def __init__(self, mark: int) -> None:
        self._mark = mark
        self._sources: dict[MessageId, IndexedSource] = {}
        self._owner: dict[Node | Recv, MessageId] = {}  # the source that has reached a node or a message first
        self._of_leaf: dict[int, set[MessageId]] = {}  # the sources that reach a leaf, by its id
        self.find = self._sources.get

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, source: MessageId, ends: Sequence[End], order: tuple[int, ...]) -> None:
        """Walk from a new source."""
        made = self._sources[source] = IndexedSource(source, ends, order)
        self._walk(made, self._enter(made), self._owner)
        if len(made.nodes) > DEEP_NODES:
            free_one_by_one([n for n in nodes_behind(ends) if type(n) not in (LeafNode, BoundaryNodeClass)])

    def look(self, ends: Sequence[End]) -> IndexedSource:
        """Walk from the roots of a pass. The index keeps nothing of that."""
        made = IndexedSource(ROOTS, ends)
        self._walk(made, self._enter(made), {})
        return made

    def remove(self, source: MessageId) -> IndexedSource | None:
        """Forget a source. The caller frees what is returned."""
        gone = self._sources.pop(source, None)
        if gone is None:
            return None
        owner = self._owner
        for node in gone.nodes:
            del owner[node]
        for node in gone.foreign:
            del owner[node]
        for end in gone.recvs.values():
            for node in end.nodes.values():
                del owner[node]
            if owner.get(end.recv) == source:
                del owner[end.recv]
        for leaf in gone.leaves:
            sharing = self._of_leaf[leaf]
            sharing.discard(source)
            if not sharing:
                del self._of_leaf[leaf]
        for other in gone.stops or ():
            self._sources[other].drop_stopper(source)
        for other in gone.stoppers or ():
            stopper = self._sources[other]
            self._walk(stopper, stopper.take_stops(source), owner)
        return gone

    def take_all(self) -> list[IndexedSource]:
        """Forget all sources. The caller frees what is returned."""
        gone = list(self._sources.values())
        self._sources.clear()
        self._owner.clear()
        self._of_leaf.clear()
        return gone

    def _enter(self, found: IndexedSource) -> list[Node | Recv]:
        nodes: list[Node | Recv] = []
        for end in found.ends:
            if isinstance(end, torch.Tensor):
                self._reach_leaf(found, end)
            else:
                nodes.append(end.node)
        return nodes

    def _walk(self, found: IndexedSource, stack: list[Node | Recv], own: dict[Node | Recv, MessageId]) -> None:
        """Visit what no source has visited. ``own``: takes what is visited; the index, if the source is to be kept."""
        owner, source = self._owner, found.sources[0]
        node: Any
        while stack:
            node = stack.pop()
            kind = type(node)
            if kind is LeafNode:
                self._reach_leaf(found, node.variable)
                continue
            first = owner.get(node)
            if first is not None:
                if first != source:
                    self._stop(found, first, node)
                continue
            if own is not owner and node in own:
                continue
            own[node] = source
            if kind is BoundaryNodeClass and (mark := node.metadata.get(MARK)) is not None:
                self._reach_recv(found, node, mark, own)
            elif not isinstance(node, Recv):  # one: the source that owned the message is gone
                found.nodes.append(node)
                for following, _ in node.next_functions:
                    if following is not None:
                        stack.append(following)

    def _stop(self, found: IndexedSource, owner: MessageId, at: Node | Recv) -> None:
        if found.stops is None:
            found.stops = {}
        found.stops.setdefault(owner, []).append(at)
        source = found.sources[0]
        if source in self._sources:
            met = self._sources[owner]
            if met.stoppers is None:
                met.stoppers = set()
            met.stoppers.add(source)

    def _reach_leaf(self, found: IndexedSource, leaf: torch.Tensor) -> None:
        found.leaves[id(leaf)] = leaf
        source = found.sources[0]
        if source in self._sources:
            self._of_leaf.setdefault(id(leaf), set()).add(source)

    def _reach_recv(
        self, found: IndexedSource, node: Node, mark: tuple[Recv, int], own: dict[Node | Recv, MessageId]
    ) -> None:
        recv, index = mark
        if recv.context != self._mark:
            found.foreign[node] = recv
            return
        known = found.recvs.get(recv.message)
        if known is not None:
            known.nodes[index] = node
            return
        found.recvs[recv.message] = RecvEnd(recv, {index: node})
        source = found.sources[0]
        first = self._owner.get(recv)
        if first is None:
            own[recv] = source
        elif first != source:
            self._stop(found, first, recv)  # one gradient message answers all tensors of a message

    def group_of(self, found: IndexedSource, joins: Joins, ignored: Ignored) -> IndexedSource | None:
        """The group of a source that meets no other; None if another source may have to run with it."""
        if found.stops or (found.stoppers and not all(map(ignored, found.stoppers))):
            return None
        source, frozen = found.sources[0], False
        if sharded.among(found.nodes) and any(other != source and not ignored(other) for other in self._sources):
            return None
        for number, leaf in found.leaves.items():
            frozen = frozen or not leaf.requires_grad
            key = joins(leaf)
            if key is None:
                continue
            sharing: Iterable[MessageId] = self._of_leaf.get(number, ()) if key == number else self._sources
            if any(other != source and not ignored(other) for other in sharing):
                return None
        return _without_frozen(found) if frozen else found

    def has(self, test: Callable[[Iterable[int], Iterable[Node]], bool]) -> bool:
        """See ``PlainSources.has``."""
        return any(test(found.leaves, found.nodes) for found in self._sources.values())

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
        of_call: dict[int, set[MessageId]] = {}
        for source, each in self._sources.items():
            of_call.setdefault(each.call, set()).add(source)
        found: set[MessageId] = set()
        seen = set(todo)
        ahead = set(calls)
        while todo or ahead:
            if todo:
                _, at = todo.popitem()
                ahead.update(end.recv.order[0] for end in at.recvs.values() if end.recv.order)
                reached: Set[MessageId] = (at.stops or {}).keys()
            else:
                reached = of_call.get(ahead.pop(), set())
                found |= reached
            todo |= {source: self._sources[source] for source in reached - seen}
            seen |= reached
        return found


def _without_frozen(found: IndexedSource) -> IndexedSource:
    """The group of a source, with leaves that need no gradient any more set apart."""
    group = IndexedSource(found.sources[0], found.ends, found.order)
    group.nodes, group.recvs, group.foreign = found.nodes, found.recvs, found.foreign
    group.leaves = {number: leaf for number, leaf in found.leaves.items() if leaf.requires_grad}
    ahead: list[Node] = [end.node for end in found.ends if not isinstance(end, torch.Tensor)]
    ahead += [following for node in found.nodes for following, _ in node.next_functions]
    group.frozen = {node: None for node in ahead if type(node) is LeafNode and not node.variable.requires_grad}
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

    def __len__(self) -> int:
        """How many records have been walked and are not forgotten."""
        return len(self._index)

    def alone(
        self, source: MessageId, roots: Sequence[End] | None, joins: Joins, ignored: Ignored
    ) -> IndexedSource | None:
        """The group of a source that meets no other source; None if it may have to run with others, or if there is no
        such source. ``roots``: what ``ROOTS`` stands for.
        """
        with self._lock:
            if self._graph.pending:
                self._update()
            if source == ROOTS:
                found = None if roots is None else self._index.look(roots)
            else:
                found = self._index.find(source) if source in self._graph.sends else None
            if found is None or not (found.leaves or found.stops or found.stoppers or found.nodes):
                return found
            return self._index.group_of(found, joins, ignored)

    def related(
        self, sources: Iterable[MessageId], calls: Iterable[int], roots: Sequence[End] | None
    ) -> set[MessageId]:
        """See ``SourceIndex.related``."""
        with self._lock:
            self._update()
            return self._index.related(sources, calls, None if roots is None else self._index.look(roots))

    def has(self, test: Callable[[Iterable[int], Iterable[Node]], bool]) -> bool:
        """Whether ``test`` holds for what any source reaches: the ids of leaves, and nodes."""
        with self._lock:
            self._update()
            return self._index.has(test)

    def _update(self) -> None:
        """Walk the records that are new."""
        pending, sends = self._graph.pending, self._graph.sends
        for message in list(pending):
            if pending.pop(message, None) is not None and (record := sends.get(message)) is not None:
                self._index.add(message, record.ends, record.order)

    def forget(self, messages: Iterable[MessageId]) -> None:
        """Records were dropped. ``tidy`` must follow."""
        self._gone.extend(messages)

    def tidy(self) -> None:
        """Free what is kept of dropped records. If another thread tidies, that thread does it."""
        while self._gone and self._lock.acquire(blocking=False):
            freed: list[IndexedSource | None] = []  # destroyed without the lock: destructors may run any code
            try:
                if not (self._graph.sends or self._graph.pending):
                    self._gone.clear()
                    freed += self._index.take_all()
                while self._gone:
                    freed.append(self._index.remove(self._gone.popleft()))
            finally:
                self._lock.release()
            del freed
