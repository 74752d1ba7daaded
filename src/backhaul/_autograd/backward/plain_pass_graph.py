"""One worker's graph as a pass outside contexts sees it: only as much of the plain graph as the pass uses.

The plain graph also holds the graphs of other losses. So a source that meets no other comes from the index, see
``source_index``. Other sources of the pass are grouped when they arrive, when the plan asks for them, and when orders
say which of them take part.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge

from backhaul._autograd.backward.groups import Group, Grouping
from backhaul._autograd.backward.pass_graph import PartTest, PassGraph, Ran
from backhaul._autograd.backward.source_index import IndexedSource, Joins
from backhaul._autograd.forward.functions import End
from backhaul._autograd.ids import ROOTS, MessageId
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.plain_graph import PlainGraph
from backhaul._autograd.plan.plan import Orders, Summary

_NO_GROUPS = Grouping({})
_NOTHING: Mapping[int, int] = {}


class PlainPassGraph(PassGraph):
    """Thread-safe. It holds parts of the graph only while sources that have arrived wait here. Otherwise a pass that
    never ends would keep graphs alive whose records are dropped.

    Args:
        spec: The pass.
        context: The plain graph.
        joins: See ``Grouping``.
        roots: Where the pass starts, on its driver.
        inputs: The tensors that the pass is restricted to, on its driver.
        ran: See ``PassGraph``.
    """

    def __init__(
        self,
        spec: PassSpec,
        context: PlainGraph,
        joins: Joins,
        roots: Sequence[GradientEdge] | None = None,
        inputs: Sequence[torch.Tensor | GradientEdge] | None = None,
        *,
        ran: Ran | None = None,
    ) -> None:
        self._start(inputs, ran)
        self._spec = spec
        self._context = context
        self._joins = joins
        self._roots = roots
        self._lock = threading.Lock()  # guards all below, ends, orders and grouping
        self._waiting: set[MessageId] = set()  # sources that have arrived and are not alone
        self._wanted: set[MessageId] = set()  # sources that take part, as far as this worker knows
        self._grouped: set[MessageId] = set()  # those of ``ends`` that are forgotten with the groups
        self.grouping = _NO_GROUPS

    def find(self, source: MessageId) -> Group | None:
        with self._lock:
            if not self._spec.restricted and (self.grouping is _NO_GROUPS or self.grouping.find(source) is None):
                found = self._context.sources.alone(source, self._roots, self._joins, self._ignored)
                if found is not None:
                    recvs = found.recvs
                    # From now on a summary lists it.
                    self._ran[source] = {m: recvs[m].recv.sender for m in recvs} if recvs else _NOTHING
                    self.ends[source], self.orders[source] = found.ends, found.order
                    return found
            self._regroup((source,))
            group = self.grouping.find(source)
            if group is not None:
                self._waiting.add(source)
            return group

    def settled(self, group: Group) -> bool:
        return type(group) is IndexedSource

    def follow(self, orders: Orders) -> None:
        with self._lock:
            self._wanted.clear()
            self._regroup(map(MessageId, orders.active))

    def leave(self, sources: Iterable[MessageId]) -> None:
        with self._lock:
            grouping = self.grouping
            for source in sources:
                if grouping is _NO_GROUPS or grouping.find(source) is None:
                    self.ends.pop(source, None)
                    self.orders.pop(source, None)
                else:
                    self._waiting.discard(source)
            if grouping is not _NO_GROUPS:
                self._forget_groups()

    def has(self, test: PartTest) -> bool:
        return self._context.sources.has(test)

    def release(self) -> None:
        with self._lock:
            self._waiting.clear()
            self._forget_groups()
            self._grouped.clear()
            self.ends.clear()
            self.orders.clear()

    def summary(self, sources: Collection[int] = (), calls: Collection[int] = ()) -> Summary:
        with self._lock:
            self._regroup(map(MessageId, sources), calls)
            made = super().summary()
            self._forget_groups()
            return made

    def _ends_of(self, source: MessageId) -> Sequence[End] | None:
        if source == ROOTS:
            return self._roots
        record = self._context.sends.get(source)
        return None if record is None else record.ends

    def _ignored(self, source: MessageId) -> bool:
        """Whether a source takes no part in the pass: it is gone, or the pass itself has made it."""
        record = self._context.sends.get(source)
        return record is None or record.born_in == (self._spec.driver, self._spec.number)

    def _regroup(self, sources: Iterable[MessageId], calls: Collection[int] = ()) -> None:
        """Make sure that ``sources`` are grouped, together with others that most likely take part in the pass."""
        self._wanted.update(sources)
        wanted = {source for source in self._wanted if source not in self._ran}
        if self.grouping.ends.keys() >= wanted and not calls:
            return
        roots = self._roots if ROOTS in wanted else None
        wanted |= self._context.sources.related(wanted, calls, roots)
        wanted = {source for source in wanted if source == ROOTS or not self._ignored(source)}
        wanted -= self._ran.keys()
        if self.grouping.ends.keys() >= wanted:
            return
        for source in sorted(wanted):
            ends = self._ends_of(source)
            if ends is not None and source not in self.ends:
                self.ends[source] = ends
                self._grouped.add(source)
                if (record := self._context.sends.get(source)) is not None:
                    self.orders[source] = record.order
        grouped = {source: ends for source, ends in self.ends.items() if source not in self._ran}
        self.grouping = Grouping(grouped, self._joins, self._context.mark)
        self._reach = None

    def _forget_groups(self) -> None:
        """Forget the groups if no source waits for them. They are found again if they are needed."""
        if not self._waiting and self.grouping is not _NO_GROUPS:
            self.grouping, self._reach = _NO_GROUPS, None
            # Also those that the native core has run since they were grouped, so the last grouping is without them.
            for source in self._grouped:
                self.ends.pop(source, None)
                self.orders.pop(source, None)
            self._grouped.clear()
