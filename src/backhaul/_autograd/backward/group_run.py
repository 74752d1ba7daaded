"""One call of PyTorch's engine for a whole group: from the gradients that arrived to leaves and to recv nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge

from backhaul._autograd.backward.groups import Fired, Group, RecvEnd, reaches
from backhaul._autograd.backward.leaves import Leaves
from backhaul._autograd.backward.pass_graph import nodes_of
from backhaul._autograd.forward.functions import End, Grads, MessageId, Recv
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.torch_engine.anomaly import watching
from backhaul._autograd.torch_engine.graph_task import GraphTask, new_task_number
from backhaul._autograd.torch_engine.hooks import NodeWatch, hooks_possible
from backhaul._autograd.torch_engine.run import Node, renumber

SEND_EARLY_NODES = 64
"""A group with more nodes than this sends the gradients of a message while the rest of the group still runs."""

SendEarly = Callable[[Recv, Grads], None]
"""Sends the gradients of a message before the group that they come from has run to its end."""


class ForeignGraph(Exception):
    """A gradient has arrived at a recv node of another context.

    Attributes:
        recv: The message behind that node.
        source: The source whose graph leads there.
        place: Which of its tensors leads there: of the roots, or of the message that was sent.
    """

    def __init__(self, recv: Recv, source: MessageId, place: int) -> None:
        super().__init__(recv, source, place)
        self.recv = recv
        self.source = source
        self.place = place


class _EarlySends:
    """Until ``__exit__``, sends the gradients of a message as soon as all of them have arrived."""

    def __init__(self, send: SendEarly, ends: Iterable[RecvEnd]) -> None:
        self._send = send
        self._ends = {node: (end, index) for end in ends for index, node in end.nodes.items()}
        self._found: dict[MessageId, dict[int, torch.Tensor | None]] = {}
        self._sent: set[MessageId] = set()
        self._watch = NodeWatch(self._ends, self._on_gradient)

    def _on_gradient(self, node: Node, grad: torch.Tensor | None) -> None:
        end, index = self._ends[node]
        found = self._found.setdefault(end.recv.message, {})
        found[index] = grad
        if len(found) == len(end.nodes):
            self._sent.add(end.recv.message)
            self._send(end.recv, end.answer(found))

    def left(self, fired: Iterable[Fired]) -> list[Fired]:
        """The answers that have not been sent."""
        return [(recv, grads) for recv, grads in fired if recv.message not in self._sent]

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None:
        self._watch.__exit__(*args)


class GroupRun:
    """Runs the engine for the groups of one pass on one worker. Thread-safe.

    It does not refer to the ``LocalPass`` or to its ``ReadyGroups``, which refer to it; see ``_make_stepper`` there.

    Args:
        spec: The pass.
        leaves: Where gradients of leaves go.
        ends: The ends of each source.
    """

    __slots__ = ("_ends", "_leaves", "_spec", "_task_number")

    def __init__(self, spec: PassSpec, leaves: Leaves, ends: Mapping[MessageId, Sequence[End]]) -> None:
        self._spec = spec
        self._leaves = leaves
        self._ends = ends
        self._task_number = new_task_number()

    def run(
        self,
        group: Group,
        sources: Sequence[MessageId],
        edges: Sequence[GradientEdge],
        seeds: Sequence[torch.Tensor],
        ends: Sequence[RecvEnd],
        *,
        order: tuple[int, ...],
        send_early: SendEarly | None,
    ) -> list[Fired]:
        """Run the group; return the answers that are left to send."""
        early = send_early is not None and len(group.nodes) > SEND_EARLY_NODES and bool(ends)
        if self._spec.deterministic:
            self.put_in_order(sources)
        elif not early and not hooks_possible():
            return self.compute(group, edges, seeds, ends, order)
        if not early:
            with self.task(sources):
                return self.compute(group, edges, seeds, ends, order)
        assert send_early is not None
        sending = _EarlySends(send_early, ends)
        with self.task(sources), sending:
            fired = self.compute(group, edges, seeds, ends, order)
        return sending.left(fired)

    def task(self, sources: Iterable[MessageId]) -> GraphTask:
        """What multi-grad hooks are told about a run from ``sources``."""
        ends = self._ends
        return GraphTask(self._task_number, lambda: nodes_of(ends, sources).keys())

    def put_in_order(self, sources: Sequence[MessageId]) -> None:
        """Make the engine sum gradients in an order that does not depend on the threads of the forward."""
        renumber(nodes_of(self._ends, sources))

    def compute(
        self,
        group: Group,
        edges: Sequence[GradientEdge],
        seeds: Sequence[torch.Tensor],
        ends: Sequence[RecvEnd],
        order: tuple[int, ...],
    ) -> list[Fired]:
        """Run the engine to the group's leaves and to ``ends``; return the answers of ``ends``."""
        if not edges:
            return [(end.recv, [None] * end.recv.count) for end in ends]
        wanted = []
        for end in ends:
            for node in end.nodes.values():
                wanted.append(GradientEdge(node, 0))
        if group.frozen and not self._spec.restricted:  # the nodes that lead to them run nevertheless
            wanted += [GradientEdge(node, 0) for node in group.frozen]
        check = None
        if group.foreign:  # asked for, to learn whether a gradient arrives there
            check = functools.partial(self._refuse_foreign, group, len(wanted))
            wanted += [GradientEdge(node, 0) for node in group.foreign]
        leaves = group.leaves.values()
        if self._spec.anomaly:
            with watching(group.nodes, self._spec.anomaly):
                found = self._leaves.compute(edges, seeds, leaves, wanted, order, check=check)
        else:
            found = self._leaves.compute(edges, seeds, leaves, wanted, order, check=check)
        fired: list[Fired] = []
        used = 0
        for end in ends:
            following = used + len(end.nodes)
            fired.append((end.recv, end.answer(dict(zip(end.nodes, found[used:following], strict=True)))))
            used = following
        return fired

    def _refuse_foreign(self, group: Group, first: int, found: Grads) -> None:
        """Raise if a gradient has arrived at a recv node of another context. ``first``: their place in ``found``."""
        for (node, recv), grad in zip(group.foreign.items(), found[first:], strict=True):
            if grad is not None:
                for source in sorted(group.sources):  # the roots first
                    for place, end in enumerate(self._ends[source]):
                        if reaches([end], {node}):
                            raise ForeignGraph(recv, source, place)
