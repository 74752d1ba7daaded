"""Random local graphs with received tensors in them, and what can be said of one by looking at every node."""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import networkx
import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul._autograd.forward.functions import Recv, receive, recv_of
from backhaul._autograd.ids import ContextId, MessageId
from backhaul._autograd.torch_engine.run import LeafNode

CONTEXT = ContextId(1)


class Graph:
    """Values that were made of leaves and of received tensors; sources are some of them, alone or together."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.leaves = [torch.full((2,), float(n), requires_grad=True) for n in range(choose.randint(1, 4))]
        self.hooked = [leaf for leaf in self.leaves if choose.random() < 0.3]
        self.fired: collections.Counter[int] = collections.Counter()  # how often the hooks of each leaf were called
        for leaf in self.hooked:
            if choose.random() < 0.5:
                leaf.register_hook(functools.partial(self.fire, leaf))
            else:
                leaf.register_post_accumulate_grad_hook(self.fire)
        values: list[torch.Tensor] = list(self.leaves)
        self.recvs: dict[MessageId, Recv] = {}
        for number in range(choose.randint(0, 4)):
            recv = Recv(MessageId(100 + number), choose.randrange(3), (), context=CONTEXT)
            self.recvs[recv.message] = recv
            values.extend(receive(recv, [torch.ones(2) for _ in range(choose.randint(1, 3))]))
        for _ in range(choose.randint(0, 14)):
            one, other = choose.choice(values), choose.choice(values)
            values.append(
                choose.choice((torch.add, torch.mul, lambda a, _: a.sin(), lambda a, _: a[:1] * 2))(one, other)
            )
        sent = [choose.choice(values) for _ in range(choose.randint(1, 7))]
        self.tensors: dict[MessageId, list[torch.Tensor]] = {}
        for number, tensor in enumerate(sent):
            self.tensors.setdefault(MessageId(choose.choice((number + 1, max(number, 1)))), []).append(tensor)
        self.edges = {source: [get_gradient_edge(t) for t in tensors] for source, tensors in self.tensors.items()}
        self.nodes = {source: nodes_behind(edges) for source, edges in self.edges.items()}

    def fire(self, leaf: torch.Tensor, *_: torch.Tensor) -> None:
        self.fired[id(leaf)] += 1

    def leaves_of(self, sources: Iterable[MessageId]) -> set[int]:
        return {id(n.variable) for source in sources for n in self.nodes[source] if type(n) is LeafNode}

    def recvs_of(self, sources: Iterable[MessageId]) -> set[MessageId]:
        return {mark[0].message for source in sources for n in self.nodes[source] if (mark := recv_of(n)) is not None}

    def groups(self) -> set[frozenset[MessageId]]:
        """Sources that share a node (not a leaf, or one with hooks) or a message that was received."""
        joined = networkx.Graph()
        joined.add_nodes_from(self.edges)
        hooked = {id(leaf) for leaf in self.hooked}
        for one in self.edges:
            for other in self.edges:
                common = self.nodes[one] & self.nodes[other]
                message = self.recvs_of([one]) & self.recvs_of([other])
                if message or any(type(n) is not LeafNode or id(n.variable) in hooked for n in common):
                    joined.add_edge(one, other)
        return {frozenset(group) for group in networkx.connected_components(joined)}


def nodes_behind(edges: Sequence[GradientEdge]) -> frozenset[Any]:
    """Every node that the engine would come to, recv nodes being the end."""
    found: set[Any] = set()
    todo = [edge.node for edge in edges]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            if recv_of(node) is None:
                todo.extend(following for following, _ in node.next_functions)
    return frozenset(found)
