"""One worker's graph as a pass sees it: the sources, their groups, and what they reach."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul._autograd.backward.groups import Group, Grouping, RecvEnd, nodes_behind, reaches
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import End
from backhaul._autograd.ids import ROOTS, MessageId
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.plan.plan import Orders, Summary
from backhaul._autograd.torch_engine.run import LeafNode, Node

PartTest = Callable[[Iterable[int], Iterable[Node]], bool]
"""Takes the ids of leaves, and nodes."""


Ran = dict[MessageId, Mapping[int, int]]
"""Sources that have run alone, with the messages that they reached and the senders of these."""


class PassGraph:
    """Walks the graph when it is made, which takes as long as the graph is large. Immutable.

    Args:
        spec: The pass.
        context: Its context on this worker.
        joins: See ``Grouping``.
        roots: Where the pass starts, on its driver.
        inputs: The tensors that the pass is restricted to, on its driver.
        ran: Sources that have run already. Others may add to it.

    Attributes:
        grouping: The groups.
        ends: The ends of each source.
        orders: The place of each source in program order.
        uncertain: Sources of which this worker does not know whether gradients come: messages of earlier passes and of
            calls that failed.
    """

    def __init__(
        self,
        spec: PassSpec,
        context: Context,
        joins: Callable[[torch.Tensor], object],
        roots: Sequence[GradientEdge] | None = None,
        inputs: Sequence[torch.Tensor | GradientEdge] | None = None,
        *,
        ran: Ran | None = None,
    ) -> None:
        self._start(inputs, ran)
        if roots is not None:
            self.ends[ROOTS] = roots
        with context.lock:
            records = list(context.sends.values())
        for record in records:
            if record.born_in is not None:
                if record.born_in == (spec.driver, spec.number):
                    continue
                self.uncertain.add(record.message)
            elif record.failed:
                self.uncertain.add(record.message)
            self.ends[record.message] = record.ends
            self.orders[record.message] = record.order
        self.grouping = Grouping(self.ends, joins, context.mark)

    def _start(
        self,
        inputs: Sequence[torch.Tensor | GradientEdge] | None,
        ran: Ran | None,
    ) -> None:
        self._ran: Ran = {} if ran is None else ran
        self.ends: dict[MessageId, Sequence[End]] = {}
        self.orders: dict[MessageId, tuple[int, ...]] = {}
        self.uncertain: set[MessageId] = set()
        self._inputs = inputs
        self._reach: dict[MessageId, frozenset[MessageId]] | None = None

    def find(self, source: MessageId) -> Group | None:
        """The group of a source whose gradients have arrived; None if there is no such source."""
        return self.grouping.find(source)

    def settled(self, group: Group) -> bool:
        """Whether no source besides those of the group can have to run with it, and all of them take part."""
        return len(group.sources) == 1

    def follow(self, orders: Orders) -> None:
        """Orders have arrived: ``find`` must know the groups of all sources that take part."""

    def leave(self, sources: Iterable[MessageId]) -> None:
        """Sources have run."""

    def release(self) -> None:
        """The pass is over here: forget the graph."""

    def has(self, test: PartTest) -> bool:
        """Whether ``test`` holds for any part of this worker's graph."""
        return any(test(group.leaves, group.nodes) for group in self.grouping.groups)

    def in_order(self, sources: Iterable[MessageId]) -> list[MessageId]:
        """Sources in program order."""
        return sorted(sources, key=lambda source: self.orders.get(source, ()))

    @property
    def reach(self) -> Mapping[MessageId, frozenset[MessageId]]:
        """For each source the recv nodes that it reaches."""
        if self._reach is None:
            self._reach = self.grouping.reach()
        return self._reach

    def summary(self, sources: Collection[int] = (), calls: Collection[int] = ()) -> Summary:
        """What the driver needs to make a plan.

        Args:
            sources: The sources of this worker that take part, as far as the driver knows.
            calls: The calls that take part, as far as the driver knows; see ``Summary``.
        """
        ran = dict(self._ran)
        groups, reach = self.grouping.groups, self.reach
        senders: dict[int, int] = {m: end.recv.sender for group in groups for m, end in group.recvs.items()}
        for reached in ran.values():
            senders.update(reached)
        goals = {_edge(each).node for each in self._inputs or ()}
        shown: list[dict[int, frozenset[int]]] = [{source: frozenset(reached)} for source, reached in ran.items()]
        for group in groups:
            left: dict[int, frozenset[int]] = {s: frozenset(reach[s]) for s in group.sources if s not in ran}
            if left:
                shown.append(left)
        return Summary(
            tuple(shown),
            senders,
            frozenset(s for g in groups if g.foreign for s in g.sources if reaches(self.ends[s], g.foreign.keys())),
            frozenset(source for source in reach if goals and reaches(self.ends[source], goals)),
            frozenset(end.recv.order[0] for group in groups for end in group.recvs.values() if end.recv.order),
        )

    def inner_inputs(self) -> dict[tuple[Node, int], torch.Tensor | GradientEdge]:
        """The inputs that are not leaves, by their edges."""
        found = {}
        for each in self._inputs or ():
            edge = _edge(each)
            if type(edge.node) is not LeafNode:
                found[edge.node, edge.output_nr] = each
        return found

    def answering(self, group: Group, sources: Sequence[MessageId], orders: Orders | None) -> list[RecvEnd]:
        """The messages that a group answers if ``sources`` take part, perhaps only to say that there is no gradient."""
        ends = list(group.recvs.values())
        if len(sources) < len(group.sources):
            reached = frozenset().union(*(self.reach[source] for source in sources))
            ends = [end for end in ends if end.recv.message in reached]
        if orders is None or orders.useful is None:
            return ends
        return [end for end in ends if end.recv.message in orders.useful]


def _edge(given: torch.Tensor | GradientEdge) -> GradientEdge:
    return given if isinstance(given, GradientEdge) else get_gradient_edge(given)


def nodes_of(ends: Mapping[MessageId, Sequence[End]], sources: Iterable[MessageId]) -> dict[Node, None]:
    """All nodes of this worker behind some sources; see ``nodes_behind``."""
    return nodes_behind(end for source in sources for end in ends[source])
