"""The groups of one worker in a pass, without workers: any order of arrival gives the result of one native call."""

from __future__ import annotations

import collections
import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import GradientEdge

from backhaul._autograd.backward.ready_groups import Outcome, ReadyGroups
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Grads, Recv, SendRecord, ends_of, recv_of
from backhaul._autograd.ids import ContextId, MessageId
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.plan.plan import Orders
from backhaul._devices import seam
from backhaul._devices.tensor_walk import tensors_in
from tests.unit.autograd.graphs import CONTEXT, Graph

SEEDS = st.integers(0, 1 << 32)


def noise(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


class Share:
    """A graph, the sources that take part with their gradients, and what one native call makes of them."""

    def __init__(self, seed: int, **options: Any) -> None:
        choose = random.Random(seed)
        self.graph = Graph(seed)
        self.context = Context(CONTEXT)
        for source, tensors in self.graph.tensors.items():
            self.context.add_send(SendRecord(source, choose.randrange(3), (source,), kept_ends=ends_of(tensors)))
        sources = list(self.graph.edges)
        self.active = choose.sample(sources, choose.randint(1, len(sources)))
        self.grads: dict[MessageId, list[torch.Tensor | None]] = {
            source: [None if choose.random() < 0.2 else noise(t, seed) for t in self.graph.tensors[source]]
            for source in self.active
        }
        self.expected_leaves, self.expected_recvs = self.natively()
        self.fired_natively, self.graph.fired = self.graph.fired, collections.Counter()
        self.sent: dict[MessageId, Grads] = {}
        self.outcomes: list[Outcome] = []
        self._lock = threading.Lock()  # guards sent and outcomes
        self.run = ReadyGroups(PassSpec(CONTEXT, 7, 1, **options), self.context)

    def natively(self) -> tuple[dict[torch.Tensor, torch.Tensor], dict[MessageId, list[torch.Tensor | None]]]:
        """All at once, as plain autograd does; what a leaf's hooks do besides is not seen by it."""
        pairs = [
            (edge, grad)
            for source in self.active
            for edge, grad in zip(self.graph.edges[source], self.grads[source], strict=True)
            if grad is not None
        ]
        fired: dict[MessageId, list[torch.Tensor | None]] = {}
        nodes = [
            (mark, node)
            for node in frozenset().union(*(self.graph.nodes[source] for source in self.active))
            if (mark := recv_of(node)) is not None
        ]
        if not pairs:
            return {}, {}
        found = torch.autograd.grad(
            [edge for edge, _ in pairs],
            [*self.graph.leaves, *(GradientEdge(node, 0) for _, node in nodes)],
            [grad for _, grad in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        for ((recv, index), _), grad in zip(nodes, found[len(self.graph.leaves) :], strict=True):
            fired.setdefault(recv.message, [None] * recv.count)[index] = grad
        made = dict(zip(self.graph.leaves, found, strict=False))
        for leaf, grad in made.items():
            if leaf._post_accumulate_grad_hooks and grad is not None:
                self.graph.fired[id(leaf)] += 1
        return {leaf: grad for leaf, grad in made.items() if grad is not None}, fired

    def send(self, recv: Recv, grads: Grads) -> None:
        with self._lock:
            assert recv.message not in self.sent, "a recv node answered twice"
            self.sent[recv.message] = grads

    def arrive(self, source: MessageId) -> None:
        made = self.run.arrive(source, self.grads[source])
        assert made is not None
        self.finish(made)

    def follow(self, circular: bool) -> None:
        active = frozenset(self.active)
        self.finish(self.run.follow(Orders(active, active if circular else frozenset())))

    def finish(self, made: list[Outcome]) -> None:
        for outcome in made:
            for recv, grads in outcome.fired:
                self.send(recv, grads)
        with self._lock:
            self.outcomes += made

    def check(self) -> None:
        """Everything has run, once, and gave what the native call gave."""
        tallies = [outcome.tally for outcome in self.outcomes if outcome.tally is not None]
        consumed = [source for tally in tallies for source in tally.consumed]
        assert sorted(consumed) == sorted(self.active)
        reached = self.graph.recvs_of(self.active)
        assert set(self.sent) == reached
        produced = {message: to for tally in tallies for message, to in tally.produced.items()}
        assert produced == {message: self.graph.recvs[message].sender for message in reached}
        assert self.run.waiting == []
        gradients = self.context.gradients
        assert set(gradients) == set(self.expected_leaves)
        for leaf, grad in self.expected_leaves.items():
            torch.testing.assert_close(gradients[leaf], grad)
        for message, grads in self.sent.items():
            wanted = [grad for grad in self.expected_recvs.get(message, ()) if grad is not None]
            torch.testing.assert_close([grad for grad in grads if grad is not None], wanted)
        assert self.graph.fired == self.fired_natively
        assert all(leaf.grad is None for leaf in self.graph.leaves)


@pytest.mark.parametrize("circular", [True, False])
@given(SEEDS)
@settings(max_examples=150)
def test_any_order_of_arrival(circular: bool, seed: int) -> None:
    """Orders come at any time too; with them groups wait for all their sources, or run node by node."""
    choose = random.Random(~seed)
    share = Share(seed)
    events: list[Any] = [*share.active, "orders"]
    choose.shuffle(events)
    for event in events:
        if event == "orders":
            share.follow(circular)
        else:
            share.arrive(event)
    share.check()


@given(SEEDS)
def test_fast_mode_takes_all_to_come(seed: int) -> None:
    share = Share(seed, fast=True)
    share.active = list(share.graph.edges)
    share.grads = {source: [noise(t, seed) for t in share.graph.tensors[source]] for source in share.active}
    share.graph.fired.clear()
    share.expected_leaves, share.expected_recvs = share.natively()
    share.fired_natively, share.graph.fired = share.graph.fired, collections.Counter()
    for source in random.Random(~seed).sample(share.active, len(share.active)):
        assert not share.run.must_ask(source)
        share.arrive(source)
    share.check()


@given(SEEDS)
@settings(max_examples=40)
def test_sources_from_many_threads(seed: int) -> None:
    share = Share(seed)
    start = threading.Barrier(len(share.active) + 1)

    def enter(event: Any) -> None:
        start.wait(30)
        if event == "orders":
            share.follow(circular=True)
        else:
            share.arrive(event)

    with ThreadPoolExecutor(len(share.active) + 1) as threads:
        list(threads.map(enter, [*share.active, "orders"]))
    share.check()


@given(SEEDS)
def test_orders_are_asked_for_once_and_only_by_groups_of_several(seed: int) -> None:
    share = Share(seed)
    alone = {source for group in share.graph.groups() if len(group) == 1 for source in group}
    asked = [source for source in share.active if share.run.must_ask(source)]
    needed = [source for source in share.active if source not in alone]
    assert asked == needed[:1]


@given(SEEDS)
def test_a_group_of_one_runs_at_once(seed: int) -> None:
    share = Share(seed)
    alone = {source for group in share.graph.groups() if len(group) == 1 for source in group}
    for source in share.active:
        before = len(share.outcomes)
        share.arrive(source)
        assert len(share.outcomes) - before == (source in alone)


@given(SEEDS, st.booleans())
def test_what_a_pass_used_is_spent(seed: int, retain: bool) -> None:
    share = Share(seed, retain=retain)
    share.follow(circular=False)
    for source in share.active:
        share.arrive(source)
    spent = set() if retain else set(share.active)
    assert share.context.spent == spent
    assert set(share.context.sends) == set(share.graph.edges) - spent


@given(SEEDS)
def test_the_summary_is_what_the_graph_says(seed: int) -> None:
    share = Share(seed)
    summary = share.run.graph.summary()
    assert {frozenset(group) for group in summary.groups} == share.graph.groups()
    for group in summary.groups:
        assert {source: set(reach) for source, reach in group.items()} == {
            source: share.graph.recvs_of([source]) for source in group
        }
    for message, sender in summary.senders.items():
        assert share.graph.recvs[message].sender == sender


@pytest.mark.parametrize("over", [True, False])
def test_a_group_in_a_circle_is_freed_without_the_garbage_collector(over: bool) -> None:
    """Up to torch 2.12, passes of other threads failed now and then when the collector freed such graphs."""
    leaf = torch.ones(2, requires_grad=True)
    shared = leaf * 2
    context = Context(ContextId(1))
    for number in (1, 2):
        context.add_send(SendRecord(MessageId(number), 0, (number,), kept_ends=ends_of([shared * number])))
    run = ReadyGroups(PassSpec(ContextId(1), 7, 1, retain=True), context)
    run.follow(Orders(frozenset({1, 2}), frozenset({1, 2})))
    gone = weakref.ref(leaf)
    gc.collect()
    gc.disable()
    try:
        for number in (1, 2) if over else (1,):
            run.arrive(MessageId(number), [torch.ones(2)])
        assert (leaf in context.gradients) is over
        del leaf, shared, context, run
        assert gone() is None
    finally:
        gc.enable()


class Streams:
    """In the place of a frontier: notes which tensors each thread says that it uses."""

    def __init__(self) -> None:
        self.used: dict[int, list[torch.Tensor]] = collections.defaultdict(list)

    def arrive(self) -> None: ...

    def depart(self) -> None: ...

    def mark(self, earlier: object = None) -> object:
        return earlier or self

    def join(self, mark: object, value: object = None) -> object:
        self.adopt(value)
        return value

    def adopt(self, value: object) -> None:
        self.used[threading.get_ident()] += tensors_in(value)


@pytest.mark.parametrize("circular", [True, False])
def test_memory_of_gradients_is_kept_for_the_thread_that_goes_on_with_them(
    circular: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams()
    monkeypatch.setattr(seam, "streams", streams)
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda grad: grad)  # so that both sources run together
    context = Context(CONTEXT)
    for number in (1, 2):
        context.add_send(SendRecord(MessageId(number), 0, (number,), kept_ends=ends_of([leaf * number])))
    run = ReadyGroups(PassSpec(CONTEXT, 7, 1), context)
    active = frozenset({1, 2})
    run.follow(Orders(active, active if circular else frozenset()))
    first, second = torch.ones(2), torch.ones(2)
    with ThreadPoolExecutor(1) as other:
        other.submit(run.arrive, MessageId(1), [first]).result()
    run.arrive(MessageId(2), [second])
    torch.testing.assert_close(context.gradients[leaf], torch.full((2,), 3.0))
    assert any(tensor is first for tensor in streams.used[threading.get_ident()])
