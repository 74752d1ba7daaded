"""Runs a group that waits in a circle: some of its sources cannot come before recv nodes of the group have fired.

Nodes on the way to recv nodes are run one by one, each when all the gradients it is going to get are there. When
the last source has come nothing stands in the way any more, and one native call does the rest. Every node runs
once, with its complete input, so hooks and custom functions behave as in one process.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from backhaul.autograd.functions import Grads, MessageId, Recv, RecvNode, add
from backhaul.autograd.groups import RecvMasks
from backhaul.autograd.native import LeafNode, Node, run_engine

Compute = Callable[[Sequence[GradientEdge], Sequence[torch.Tensor], Sequence[Recv], bool], None]
"""Runs the engine from edges with seeds to recv nodes and, if asked, the group's leaves."""


class _Stop(Exception):
    """Stops the engine behind one node."""


class _Slot:
    """The input of one node as it fills."""

    __slots__ = ("inputs", "missing", "ran")

    def __init__(self) -> None:
        self.missing = 0  # contributions that have not come
        self.inputs: dict[int, list[tuple[int, torch.Tensor]]] = {}  # input -> (place of the edge, gradient)
        self.ran = False

    def sums(self) -> dict[int, torch.Tensor]:
        """The gradient of each input, summed in the order of edges whatever the order of arrival."""
        found = {}
        for number, contributions in self.inputs.items():
            total: torch.Tensor | None = None
            for _, grad in sorted(contributions, key=lambda item: item[0]):
                total = add(total, grad)
            if total is not None:
                found[number] = total
        return found


class Stepper:
    """Thread-safe: whoever feeds a source while another thread runs nodes leaves it to that thread.

    Args:
        sources: The edges of every source that takes part.
        compute: See ``Compute``.
        retain: Whether the graph is kept.
        create: Whether the pass records itself (``create_graph``).
        inner: Tensors inside the graph whose gradients are wanted, by their edges.
        capture: Takes such a gradient.
    """

    def __init__(
        self,
        sources: Mapping[MessageId, Sequence[GradientEdge]],
        compute: Compute,
        *,
        retain: bool,
        create: bool,
        inner: Mapping[tuple[Node, int], torch.Tensor],
        capture: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        self._sources = sources
        self._compute = compute
        self._retain = retain
        self._create = create
        self._inner = inner
        self._capture = capture
        self._lock = threading.Lock()  # guards what follows but _slots' contents, which the running thread owns
        self._running = False
        self._fed: list[tuple[MessageId, Grads]] = []
        self._missing = set(sources)
        self.done = False
        self._places = itertools.count()
        self._slots: dict[Node, _Slot] = {}
        self._recvs: dict[Node, Recv] = {}
        self._edge_places: dict[tuple[Node, int], int] = {}
        self._seed_places: dict[MessageId, int] = {}
        self._leads: Mapping[Node, int] = {}  # not 0: a recv node lies behind
        self._ready: list[Node] = []
        self._walk()

    def feed(self, arrived: Mapping[MessageId, Grads]) -> bool:
        """Take in sources and run what they make possible; True for the call that finishes the group."""
        with self._lock:
            self._fed.extend(arrived.items())
            if self._running:
                return False
            self._running = True
        try:
            with torch.set_grad_enabled(self._create):
                return self._run_on()
        except BaseException:
            self._running = False
            raise

    def _run_on(self) -> bool:
        while True:
            with self._lock:
                fed, self._fed = self._fed, []
                if not fed:
                    self._running = False
                    return False
            for source, grads in fed:
                self._enter(source, grads)
            self._step()
            if not self._missing:
                self._finish()
                self.done = True
                return True

    def _walk(self) -> None:
        """Count for every node the contributions it is going to get, and see which lead to recv nodes."""
        masks = RecvMasks()
        seen: set[Node] = set()
        for source, edges in self._sources.items():
            masks.of(edges)
            places = [next(self._places) for _ in edges]
            self._seed_places[source] = places[0] if places else 0
            for edge in edges:
                self._expect(edge.node)
                stack: list[Node] = [edge.node]
                while stack:
                    node = stack.pop()
                    if node in seen:
                        continue
                    seen.add(node)
                    if type(node) is RecvNode:
                        self._recvs[node] = node.recv
                    elif type(node) is not LeafNode:
                        for number, (following, _) in enumerate(node.next_functions):
                            if following is not None:
                                self._expect(following)
                                self._edge_places[node, number] = next(self._places)
                                stack.append(following)
        self._leads = masks.masks

    def _expect(self, node: Node) -> None:
        self._slots.setdefault(node, _Slot()).missing += 1

    def _enter(self, source: MessageId, grads: Grads) -> None:
        padded = [*grads, *[None] * (len(self._sources[source]) - len(grads))]
        for place, (edge, grad) in enumerate(zip(self._sources[source], padded, strict=True)):
            self._deliver(edge.node, edge.output_nr, grad, self._seed_places[source] + place)
        self._missing.discard(source)

    def _deliver(self, node: Node, number: int, grad: torch.Tensor | None, place: int) -> None:
        slot = self._slots[node]
        slot.missing -= 1
        if grad is not None:
            slot.inputs.setdefault(number, []).append((place, grad))
        if slot.missing == 0 and self._leads[node]:
            self._ready.append(node)

    def _step(self) -> None:
        while self._ready:
            node = self._ready.pop()
            slot = self._slots[node]
            slot.ran = True
            sums = slot.sums()
            slot.inputs.clear()
            edges = [GradientEdge(node, number) for number in sums]
            if node in self._recvs:
                self._compute(edges, list(sums.values()), [self._recvs[node]], False)
                continue
            outputs = self._run(node, edges, list(sums.values())) if sums else ()
            for number, (following, input_number) in enumerate(node.next_functions):
                if following is not None:
                    grad = outputs[number] if number < len(outputs) else None
                    self._deliver(following, input_number, grad, self._edge_places[node, number])

    def _run(self, node: Node, edges: Sequence[GradientEdge], seeds: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Run one node, with all its hooks, and stop the engine behind it."""
        taken: list[tuple[Any, ...]] = []

        def take(outputs: tuple[Any, ...], _: object) -> None:
            taken.append(outputs)
            raise _Stop

        def look(grads: tuple[Any, ...]) -> None:
            for number, grad in enumerate(grads):
                wanted = self._inner.get((node, number))
                if wanted is not None and grad is not None:
                    self._capture(wanted, grad)

        handles = [node.register_hook(take)]
        if self._inner:
            handles.append(node.register_prehook(look))
        try:
            # What lies behind is asked for, so that the node computes all its outputs, but never reached.
            behind = [
                GradientEdge(following, number) for following, number in node.next_functions if following is not None
            ]
            run_engine(edges, seeds, behind, retain=self._retain, create=self._create)
        except _Stop:
            return taken[0]
        finally:
            for handle in handles:
                handle.remove()
        raise AssertionError("the engine did not run the node")

    def _finish(self) -> None:
        edges: list[GradientEdge] = []
        seeds: list[torch.Tensor] = []
        for node, slot in self._slots.items():
            if not slot.ran:
                for number, total in slot.sums().items():
                    edges.append(GradientEdge(node, number))
                    seeds.append(total)
        rest = [recv for node, recv in self._recvs.items() if not self._slots[node].ran]
        self._compute(edges, seeds, rest, True)
