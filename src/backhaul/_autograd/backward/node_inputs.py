"""The inputs of the nodes of a group while they arrive, for a group that runs node by node."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge

from backhaul._autograd.backward.groups import RecvMasks
from backhaul._autograd.forward.functions import Grads, add, recv_of
from backhaul._autograd.ids import MessageId
from backhaul._autograd.torch_engine.run import LeafNode, Node
from backhaul._devices import seam


class _Slot:
    """The input of one node."""

    __slots__ = ("inputs", "missing", "ran")

    def __init__(self) -> None:
        self.missing = 0  # contributions that have not arrived
        self.inputs: dict[int, list[tuple[int, torch.Tensor]]] = {}  # input -> (place of the edge, gradient)
        self.ran = False

    def sums(self) -> dict[int, torch.Tensor]:
        """The gradient of each input, summed in the order of edges, whatever the order of arrival."""
        found = {}
        seam.streams.adopt(self.inputs)  # another thread may have run the nodes that made them
        for number, contributions in self.inputs.items():
            total: torch.Tensor | None = None
            for _, grad in sorted(contributions, key=lambda item: item[0]):
                total = add(total, grad)
            if total is not None:
                found[number] = total
        return found


class NodeInputs:
    """Counts for every node the gradients that it still waits for, and sums those that have arrived.

    One thread at a time uses it: the one that runs the ``Stepper``.

    Args:
        sources: The edges of every source that takes part.
        foreign: Recv nodes of other contexts.
    """

    def __init__(self, sources: Mapping[MessageId, Sequence[GradientEdge]], foreign: Container[Node]) -> None:
        self._sources = sources
        self._slots: dict[Node, _Slot] = {}
        self._edge_places: dict[tuple[Node, int], int] = {}
        self._seed_places: dict[MessageId, int] = {}
        self._ready: list[Node] = []
        masks = RecvMasks(foreign)
        self._walk(masks)
        self._leads: Mapping[Node, int] = masks.masks  # not 0: a recv node lies behind

    def __contains__(self, node: Node) -> bool:
        return node in self._slots

    def _walk(self, masks: RecvMasks) -> None:
        """Count the contributions of every node, and find the nodes that lead to recv nodes."""
        place = itertools.count()
        seen: set[Node] = set()
        for source, edges in self._sources.items():
            masks.of(edges)
            places = [next(place) for _ in edges]
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
                                self._edge_places[node, number] = next(place)
                                stack.append(following)

    def _expect(self, node: Node) -> None:
        self._slots.setdefault(node, _Slot()).missing += 1

    def enter(self, source: MessageId, grads: Grads) -> None:
        """The gradients of a source have arrived."""
        edges, first = self._sources[source], self._seed_places[source]
        padded = [*grads, *[None] * (len(edges) - len(grads))]
        for place, (edge, grad) in enumerate(zip(edges, padded, strict=True), first):
            self._deliver(edge.node, edge.output_nr, grad, place)

    def pass_on(self, node: Node, outputs: Sequence[torch.Tensor | None]) -> None:
        """A node has run: give its outputs to the nodes behind it."""
        for number, (following, input_number) in enumerate(node.next_functions):
            if following is not None:
                grad = outputs[number] if number < len(outputs) else None
                self._deliver(following, input_number, grad, self._edge_places[node, number])

    def _deliver(self, node: Node, number: int, grad: torch.Tensor | None, place: int) -> None:
        slot = self._slots[node]
        slot.missing -= 1
        if grad is not None:
            slot.inputs.setdefault(number, []).append((place, grad))
        if slot.missing == 0 and self._leads[node]:
            self._ready.append(node)

    def ready(self) -> Iterator[tuple[Node, dict[int, torch.Tensor]]]:
        """Nodes that lead to recv nodes and have all their gradients, with the sums; each counts as run."""
        while self._ready:
            node = self._ready.pop()
            slot = self._slots[node]
            slot.ran = True
            sums = slot.sums()
            slot.inputs.clear()
            yield node, sums

    def ran(self, node: Node) -> bool:
        """Whether ``ready`` has given out a node."""
        return self._slots[node].ran

    def rest(self) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """What the nodes that have not run have received: their edges, and the sums."""
        edges: list[GradientEdge] = []
        seeds: list[torch.Tensor] = []
        for node, slot in self._slots.items():
            if not slot.ran:
                for number, total in slot.sums().items():
                    edges.append(GradientEdge(node, number))
                    seeds.append(total)
        return edges, seeds
