"""Work grows with the number of messages and nodes, not with its square. Counted, not timed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from backhaul import _autograd
from backhaul._autograd.backward import groups
from backhaul._autograd.backward.ready_groups import ReadyGroups
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Recv, SendRecord, ends_of, receive
from backhaul._autograd.ids import ROOTS, ContextId, MessageId
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.plan.plan import Orders
from backhaul._autograd.torch_engine import freeing

HERE = str(Path(_autograd.__file__).parent)
SEED = [torch.ones(2)]


def count_opcodes(work: Callable[[], None]) -> int:
    """How many instructions of ours ``work`` runs."""
    found = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal found
        if event == "call":
            if not frame.f_code.co_filename.startswith(HERE):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 counts only if a frame asks before settrace
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return found


def received(number: int) -> torch.Tensor:
    (tensor,) = receive(Recv(MessageId(1 << 20 | number), 1, (number,), context=ContextId(1)), [torch.ones(2)])
    return tensor


def context_of(tensors: list[torch.Tensor]) -> Context:
    context = Context(ContextId(1))
    for number, tensor in enumerate(tensors, 1):
        context.add_send(SendRecord(MessageId(number), 1, (number,), kept_ends=ends_of([tensor])))
    return context


def apart(count: int) -> Callable[[], None]:
    """Sends that have nothing to do with each other but a leaf."""
    weight = torch.ones(2, requires_grad=True)
    context = context_of([received(number) * weight for number in range(count)])

    def work() -> None:
        run = ReadyGroups(PassSpec(ContextId(1), 7, 1), context)
        for number in range(1, count + 1):
            (outcome,) = run.arrive(MessageId(number), SEED) or ()
            assert len(outcome.fired) == 1
        run.graph.summary()

    return work


def together(count: int, **mode: Any) -> Callable[[], None]:
    """Sends of one value, which run together."""
    shared = received(0) * 2
    context = context_of([shared * number for number in range(count)])

    def work() -> None:
        run = ReadyGroups(PassSpec(ContextId(1), 7, 1, **mode), context)
        sources = range(1, count + 1)
        outcomes = run.follow(Orders(frozenset(sources), frozenset()))
        for number in sources:
            outcomes += run.arrive(MessageId(number), SEED) or ()
        assert [len(outcome.fired) for outcome in outcomes] == [1]
        run.graph.summary()

    return work


def in_a_circle(count: int) -> Callable[[], None]:
    shared = received(0) * 2
    context = context_of([shared * number + received(number) for number in range(1, count)])

    def work() -> None:
        run = ReadyGroups(PassSpec(ContextId(1), 7, 1, fast=True), context)
        fired = [out.fired for number in range(1, count) for out in run.arrive(MessageId(number), SEED) or ()]
        assert sum(map(len, fired)) == count

    return work


def deep(count: int) -> Callable[[], None]:
    """One send of a long computation."""
    value = received(0)
    for _ in range(count):
        value = value + 1
    context = context_of([value])

    def work() -> None:
        (outcome,) = (
            ReadyGroups(PassSpec(ContextId(1), 7, 1, deterministic=True), context).arrive(MessageId(1), SEED) or ()
        )
        assert len(outcome.fired) == 1

    return work


@pytest.mark.parametrize("kind", [apart, together, in_a_circle, deep])
def test_work_is_linear(kind: Callable[[int], Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "DEEP_NODES", 20)
    few, many = (count_opcodes(kind(count)) for count in (50, 200))
    assert few > 50 * 5
    assert many < 4.2 * few


def test_a_graph_of_many_nodes() -> None:
    deep(100_000)()


def test_part_of_a_graph_of_many_nodes_may_be_kept() -> None:
    """Freed later, it needs no more of the stack; and nothing of it stays."""
    value = received(0)
    kept = []
    for number in range(100_000):
        value = value + 1
        if not number % 30_000 or number > 99_990:
            kept.append(value)
    context = context_of(kept)
    sources = range(1, len(kept) + 1)
    run = ReadyGroups(PassSpec(ContextId(1), 7, 1), context)
    run.follow(Orders(frozenset(sources), frozenset()))
    for number in sources:
        run.arrive(MessageId(number), SEED)
    mark = torch.ones(0)
    node: Any = kept[1].grad_fn
    node.metadata["test"] = mark
    gone = weakref.ref(mark)
    del value, run, context, node, mark
    while kept:
        kept.pop()
    assert gone() is None


def two_branches(length: int) -> tuple[torch.Tensor, torch.Tensor, list[weakref.ref[torch.Tensor]]]:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
    ends = []
    for leaf in leaves:
        end = leaf
        for _ in range(length):
            end = end + 1
        ends.append(end)
    return ends[0], ends[1], [weakref.ref(leaf) for leaf in leaves]


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "DEEP_NODES", 20)
    monkeypatch.setattr(freeing, "_MAX_RECURSION_NODES", 7)


@pytest.mark.usefixtures("short_rows")
def test_passes_that_go_other_ways_leave_no_circle_in_a_graph_of_many_nodes() -> None:
    one, other, leaves = two_branches(23)
    for root in (one + other, other + one):
        groups.Grouping({ROOTS: [get_gradient_edge(root)]})
    del one, other, root
    assert [leaf() for leaf in leaves] == [None, None]


@pytest.mark.usefixtures("short_rows")
def test_who_keeps_a_branch_of_a_graph_of_many_nodes_keeps_no_other() -> None:
    one, other, leaves = two_branches(23)
    groups.Grouping({ROOTS: [get_gradient_edge(one + other)]})
    del one
    assert leaves[0]() is None
    del other
    assert leaves[1]() is None


def test_many_sends() -> None:
    apart(10_000)()
    together(10_000)()
