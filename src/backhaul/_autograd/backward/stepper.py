"""Runs a group that waits in a circle: some of its sources cannot come before recv nodes of the group have fired.

Nodes on the way to recv nodes are run one by one, each when all the gradients it is going to get are there. When
the last source has come nothing stands in the way any more, and one native call does the rest. Every node runs
once, with its complete input, so hooks and custom functions behave as in one process.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from backhaul._autograd.backward.groups import Fired, RecvEnd, RecvMasks
from backhaul._autograd.forward.functions import Grads, add, recv_of
from backhaul._autograd.ids import MessageId
from backhaul._autograd.torch_engine.anomaly import OFF, StopEngine, begin_stop, end_stop, watching
from backhaul._autograd.torch_engine.run import LeafNode, Node, Task, own_hook, run_engine
from backhaul._devices.cuda import process

Compute = Callable[[Sequence[GradientEdge], Sequence[torch.Tensor], Sequence[RecvEnd]], list[Fired]]
"""Runs the engine from edges with seeds to the group's leaves and to recv nodes, which answer."""


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
        if process.stream_order is not None:
            process.stream_order.adopt(self.inputs)  # another thread may have run what they come of
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
        ends: The messages that are to be answered.
        compute: See ``Compute``.
        task: For hooks that ask what runs.
        retain: Whether the graph is kept.
        create: Whether the pass records itself (``create_graph``).
        inner: Tensors inside the graph whose gradients are wanted, by their edges.
        capture: Takes such a gradient.
        foreign: Recv nodes of other contexts, which ``compute`` sees to.
        anomaly: The level of anomaly mode.
    """

    def __init__(
        self,
        sources: Mapping[MessageId, Sequence[GradientEdge]],
        ends: Iterable[RecvEnd],
        compute: Compute,
        task: Task,
        *,
        retain: bool,
        create: bool,
        inner: Mapping[tuple[Node, int], torch.Tensor],
        capture: Callable[[torch.Tensor, torch.Tensor], None],
        foreign: Container[Node] = (),
        anomaly: int = OFF,
    ) -> None:
        self._sources = sources
        self._compute = compute
        self._task = task
        self._retain = retain
        self._create = create
        self._inner = inner
        self._capture = capture
        self._anomaly = anomaly
        self._lock = threading.Lock()  # guards what follows but _slots' contents, which the running thread owns
        self._running = False
        self._fed: list[tuple[MessageId, Grads]] = []
        self._missing = set(sources)
        self.produced: dict[int, int] = {}  # all that has been answered, and whom
        self._places = itertools.count()
        self._slots: dict[Node, _Slot] = {}
        self._ends: dict[Node, tuple[RecvEnd, int]] = {}
        self._unanswered: dict[MessageId, RecvEnd] = {}
        self._arrived: dict[MessageId, dict[int, torch.Tensor | None]] = {}  # gradients at recv nodes
        self._edge_places: dict[tuple[Node, int], int] = {}
        self._seed_places: dict[MessageId, int] = {}
        self._leads: Mapping[Node, int] = {}  # not 0: a recv node lies behind
        self._ready: list[Node] = []
        self._walk(RecvMasks(foreign))
        for end in ends:
            reached = RecvEnd(end.recv, {index: node for index, node in end.nodes.items() if node in self._slots})
            self._unanswered[end.recv.message] = reached
            self._ends.update((node, (reached, index)) for index, node in reached.nodes.items())

    def feed(self, arrived: Mapping[MessageId, Grads]) -> tuple[list[Fired], bool]:
        """Take in sources and run what they make possible: what fired, and whether that finished the group."""
        with self._lock:
            self._fed.extend(arrived.items())
            if self._running:
                return [], False
            self._running = True
        fired: list[Fired] = []
        try:
            with torch.set_grad_enabled(self._create), self._task:
                over = self._run_on(fired)
        except BaseException:
            self._running = False
            raise
        return fired, over

    def _run_on(self, fired: list[Fired]) -> bool:
        while True:
            with self._lock:
                fed, self._fed = self._fed, []
                if not fed:
                    if process.stream_order is not None:
                        process.stream_order.depart()  # who feeds the next source goes on with what is there
                    self._running = False
                    return False
            if process.stream_order is not None:
                process.stream_order.arrive()  # other threads may have fed it
            for source, grads in fed:
                self._enter(source, grads)
            made = self._step()
            if over := not self._missing:
                made += self._finish()
            self.produced.update((recv.message, recv.sender) for recv, _ in made)
            fired += made
            if over:
                return True

    def _walk(self, masks: RecvMasks) -> None:
        """Count for every node the contributions it is going to get, and see which lead to recv nodes."""
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
                    if type(node) is not LeafNode and recv_of(node) is None:
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

    def _step(self) -> list[Fired]:
        fired: list[Fired] = []
        while self._ready:
            node = self._ready.pop()
            slot = self._slots[node]
            slot.ran = True
            sums = slot.sums()
            slot.inputs.clear()
            edges = [GradientEdge(node, number) for number in sums]
            if recv_of(node) is not None:
                fired += self._arrive(node, sums.get(0))
                continue
            outputs = self._run(node, edges, list(sums.values())) if sums else ()
            for number, (following, input_number) in enumerate(node.next_functions):
                if following is not None:
                    grad = outputs[number] if number < len(outputs) else None
                    self._deliver(following, input_number, grad, self._edge_places[node, number])
        return fired

    def _run(self, node: Node, edges: Sequence[GradientEdge], seeds: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Run one node, with all its hooks, and stop the engine behind it."""
        taken: list[tuple[Any, ...]] = []
        stream_order, mark, silenced = process.stream_order, None, False

        @own_hook
        def take(outputs: tuple[Any, ...], _: object) -> None:
            nonlocal mark, silenced
            taken.append(outputs)
            if stream_order is not None:
                mark = stream_order.mark()  # of the node's streams, which are current here
            silenced = begin_stop()
            raise StopEngine

        @own_hook
        def look(grads: tuple[Any, ...]) -> None:
            for number, grad in enumerate(grads):
                wanted = self._inner.get((node, number))
                if wanted is not None and grad is not None:
                    self._capture(wanted, grad)

        handles = []
        try:
            with watching([node], self._anomaly):
                handles.append(node.register_hook(take))  # the last: it lets no other run after it
                if self._inner:
                    handles.append(node.register_prehook(look))
                # What lies behind is asked for, so that the node computes all its outputs, but never reached.
                behind = [GradientEdge(next_, number) for next_, number in node.next_functions if next_ is not None]
                run_engine(edges, seeds, behind, retain=self._retain, create=self._create)
        except StopEngine:
            if stream_order is not None and mark is not None:
                stream_order.join(mark, taken[0])  # the engine would have, had it come to its end
            return taken[0]
        finally:
            if silenced:
                end_stop()
            for handle in handles:
                handle.remove()
        raise AssertionError("the engine did not run the node")

    def _arrive(self, node: Node, grad: torch.Tensor | None) -> list[Fired]:
        """A recv node has all it gets: its message is answered if the others have too."""
        if grad is not None:
            edge = GradientEdge(node, 0)
            (grad,) = run_engine([edge], [grad], [edge], retain=self._retain, create=self._create)  # for its hooks
            wanted = self._inner.get((node, 0))
            if wanted is not None and grad is not None:
                self._capture(wanted, grad)
        if node not in self._ends:
            return []
        end, index = self._ends[node]
        found = self._arrived.setdefault(end.recv.message, {})
        found[index] = grad
        if len(found) < len(end.nodes):
            return []
        del self._unanswered[end.recv.message]
        if process.stream_order is not None:
            process.stream_order.adopt(found)
        return [(end.recv, end.answer(found))]

    def _finish(self) -> list[Fired]:
        edges: list[GradientEdge] = []
        seeds: list[torch.Tensor] = []
        for node, slot in self._slots.items():
            if not slot.ran:
                for number, total in slot.sums().items():
                    edges.append(GradientEdge(node, number))
                    seeds.append(total)
        if process.stream_order is not None:
            process.stream_order.adopt([self._arrived.get(message) for message in self._unanswered])
        rest: list[RecvEnd] = []
        for end in self._unanswered.values():
            left = {index: node for index, node in end.nodes.items() if not self._slots[node].ran}
            rest.append(RecvEnd(end.recv, left))
        fired = self._compute(edges, seeds, rest)
        return [(recv, _merge(grads, self._arrived.get(recv.message, {}))) for recv, grads in fired]


def _merge(grads: Grads, earlier: Mapping[int, torch.Tensor | None]) -> Grads:
    return [earlier.get(index, grad) for index, grad in enumerate(grads)]
