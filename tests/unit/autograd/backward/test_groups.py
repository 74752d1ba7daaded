"""Which sources run together: random graphs against a look at every pair of sources and every node."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import get_gradient_edge

from backhaul._autograd.backward.groups import Grouping, RecvMasks, reaches
from backhaul._autograd.forward.functions import Recv, receive, recv_of
from backhaul._autograd.ids import MessageId
from tests.unit.autograd.graphs import CONTEXT, Graph, nodes_behind

SEEDS = st.integers(0, 1 << 32)


@given(SEEDS)
@settings(max_examples=300)
def test_groups_are_those_that_share_a_node(seed: int) -> None:
    graph = Graph(seed)
    grouping = Grouping(graph.edges, context=CONTEXT)
    assert {frozenset(group.sources) for group in grouping.groups} == graph.groups()
    assert sorted(source for group in grouping.groups for source in group.sources) == sorted(graph.edges)
    for group in grouping.groups:
        assert all(grouping.of(source) is group for source in group.sources)


@given(SEEDS)
def test_a_group_knows_all_its_ends(seed: int) -> None:
    graph = Graph(seed)
    for group in Grouping(graph.edges, context=CONTEXT).groups:
        assert set(group.leaves) == graph.leaves_of(group.sources)
        assert all(id(leaf) == number for number, leaf in group.leaves.items())
        assert set(group.recvs) == graph.recvs_of(group.sources)
        assert all(graph.recvs[message] is end.recv for message, end in group.recvs.items())


@given(SEEDS)
def test_reach_is_of_each_source_alone(seed: int) -> None:
    graph = Graph(seed)
    reach = Grouping(graph.edges, context=CONTEXT).reach()
    assert {source: set(found) for source, found in reach.items()} == {
        source: graph.recvs_of([source]) for source in graph.edges
    }


@given(SEEDS, st.randoms(use_true_random=False))
def test_groups_do_not_depend_on_the_order_of_sources(seed: int, order: random.Random) -> None:
    graph = Graph(seed)
    shuffled = list(graph.edges.items())
    order.shuffle(shuffled)
    one, other = Grouping(graph.edges, context=CONTEXT), Grouping(dict(shuffled), context=CONTEXT)
    assert {frozenset(g.sources) for g in one.groups} == {frozenset(g.sources) for g in other.groups}
    assert one.reach() == other.reach()


@given(SEEDS)
def test_masks_say_what_lies_behind_every_node(seed: int) -> None:
    graph = Graph(seed)
    masks = RecvMasks()
    for edges in graph.edges.values():
        masks.of(edges)
    for node in frozenset().union(*graph.nodes.values()):
        behind = {node} if recv_of(node) is not None else nodes_behind([get_edge(node)])
        expected = {mark[0].message for other in behind if (mark := recv_of(other)) is not None}
        assert masks.names(masks.masks[node]) == expected


def get_edge(node: object) -> torch.autograd.graph.GradientEdge:
    return torch.autograd.graph.GradientEdge(node, 0)


@given(SEEDS)
def test_reaches(seed: int) -> None:
    graph = Graph(seed)
    everything = frozenset().union(*graph.nodes.values())
    for edges, behind in zip(graph.edges.values(), graph.nodes.values(), strict=True):
        assert not reaches(edges, set())
        for node in everything:
            assert reaches(edges, {node}) == (node in behind)


# By hand.


def source(*tensors: torch.Tensor) -> list[torch.autograd.graph.GradientEdge]:
    return [get_gradient_edge(tensor) for tensor in tensors]


def number(value: int) -> MessageId:
    return MessageId(value)


def test_a_shared_leaf_joins_only_with_hooks() -> None:
    leaf = torch.ones(1, requires_grad=True)
    edges = {number(1): source(leaf * 2), number(2): source(leaf * 3), number(3): source(leaf)}
    assert len(Grouping(edges).groups) == 3
    handle = leaf.register_hook(lambda grad: None)
    assert len(Grouping(edges).groups) == 1
    handle.remove()
    assert len(Grouping(edges).groups) == 3
    leaf.register_post_accumulate_grad_hook(lambda leaf: None)
    assert len(Grouping(edges).groups) == 1


def test_joins_that_the_caller_gives() -> None:
    """Leaves that give the same answer join the sources that reach them, whether these share anything or not."""
    one, two, three = (torch.ones(1, requires_grad=True) for _ in range(3))
    edges = {number(1): source(one * 2), number(2): source(two * 2), number(3): source(three * 2)}
    together = {id(one): "here", id(three): "here"}
    groups = Grouping(edges, lambda leaf: together.get(id(leaf))).groups
    assert [group.sources for group in groups] == [[1, 3], [2]]


def test_a_shared_recv_node_joins() -> None:
    recv = Recv(number(9), 1, ())
    first, second = receive(recv, [torch.ones(1), torch.ones(1)])
    (group,) = Grouping({number(1): source(first * 2), number(2): source(second * 2)}).groups
    assert group.sources == [1, 2]
    assert list(group.recvs) == [9]


def test_groups_come_in_the_order_of_their_sources() -> None:
    leaves = [torch.ones(1, requires_grad=True) for _ in range(4)]
    edges = {number(n): source(leaf * 2) for n, leaf in zip((7, 3, 9, 1), leaves, strict=True)}
    assert [group.sources for group in Grouping(edges).groups] == [[7], [3], [9], [1]]


def test_no_sources() -> None:
    grouping = Grouping({})
    assert grouping.groups == []
    assert grouping.reach() == {}


@pytest.mark.parametrize("what", ["groups", "masks", "reaches"])
def test_graphs_deeper_than_the_stack(what: str) -> None:
    recv = Recv(number(9), 1, ())
    (x,) = receive(recv, [torch.ones(1, requires_grad=True)])
    for _ in range(20_000):
        x = x + 1
    edges = source(x)
    if what == "groups":
        (group,) = Grouping({number(1): edges}).groups
        assert list(group.recvs) == [9]
    elif what == "masks":
        masks = RecvMasks()
        assert masks.names(masks.of(edges)) == {9}
    else:
        assert not reaches(edges, {get_gradient_edge(torch.ones(1, requires_grad=True)).node})


def test_wide_graphs_are_looked_at_once() -> None:
    """Every value is used twice: 2 to the 200 ways lead through, each node is still visited once."""
    x = torch.ones(1, requires_grad=True) * 1
    for _ in range(200):
        x = x + x
    (group,) = Grouping({number(1): source(x), number(2): source(x)}).groups
    assert group.sources == [1, 2]
    assert Grouping({number(1): source(x)}).reach() == {1: frozenset()}
    assert not reaches(source(x), {get_gradient_edge(torch.ones(1, requires_grad=True)).node})
