"""Sources that the native core runs: exactly those that meet no other, with the gradients of one call of torch."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import GradientEdge

from backhaul._autograd.backward.simple_runs import Answers, run_simple
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Recv, SendRecord, receive, recv_of
from backhaul._autograd.ids import ContextId, MessageId
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.torch_engine import patches as torch_patches
from backhaul._autograd.torch_engine import run as torch_run
from backhaul._autograd.torch_engine.run import LeafNode, engine_runs
from backhaul._native import core
from tests.unit.autograd.graphs import CONTEXT, Graph

pytestmark = pytest.mark.skipif(core is None, reason="the native core is not compiled, or is switched off")
SEEDS = st.integers(0, 1 << 32)
SPEC = PassSpec(CONTEXT, 7, 1, retain=True)


@pytest.fixture
def patches() -> Iterator[None]:
    torch_patches.install()
    yield
    torch_patches.uninstall()


def never(*_: object) -> None:
    raise AssertionError("sent early")


def run(
    context: Context, sources: list[Any], counts: list[int], grads: list[torch.Tensor | None], spec: PassSpec = SPEC
) -> list[Answers] | None:
    sent: list[Answers] = []
    ran = run_simple(
        spec,
        context,
        sources,
        counts,
        grads,
        task_number=lambda: 1 << 62,
        send_early=never,
        send_all=sent.extend,
    )
    if ran is None:
        return None
    answers, produced = [*sent, *ran[0]], ran[1]
    assert produced == {message: to for to, _, messages, *_ in answers for message in messages}
    return answers


class Indexed:
    """A random graph, and the native index of its sources."""

    def __init__(self, seed: int) -> None:
        self.graph = Graph(seed)
        self.context = Context(CONTEXT)
        self.sources = {source: self.source_of(tensors) for source, tensors in self.graph.tensors.items()}

    def source_of(self, tensors: list[torch.Tensor]) -> Any:
        (places, source, on_host) = core.record_sent(self.context.index, tensors, frozenset())
        assert places == tuple(range(len(tensors)))
        assert on_host
        return source

    def runs(self, source: MessageId) -> bool:
        """Whether the core would run a source. Without gradients, nothing is done."""
        with engine_runs:
            ran = core.run_sources(
                self.context.index, {}, [self.sources[source]], [0], [], True, 64, never, False, engine_runs
            )
        return ran is not None

    def simple(self) -> set[MessageId]:
        """The sources that the core runs, found by looking at every node."""
        hooked = {id(leaf) for leaf in self.graph.hooked if len(self.sources) > 1}
        alone = {source for group in self.graph.groups() if len(group) == 1 for source in group}
        return {source for source in alone if not self.graph.leaves_of([source]) & hooked}

    def drop(self, source: MessageId) -> None:
        del self.sources[source]
        del self.graph.tensors[source]
        del self.graph.edges[source]
        del self.graph.nodes[source]


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_which_sources_run(seed: int) -> None:
    made, choose = Indexed(seed), random.Random(seed)
    while made.sources:
        assert {source for source in made.sources if made.runs(source)} == made.simple()
        made.drop(choose.choice(list(made.sources)))


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_one_run_for_all(seed: int) -> None:
    made, choose = Indexed(seed), random.Random(seed)
    sources = sorted(made.simple())
    if not sources:
        return
    noise = torch.Generator().manual_seed(seed)
    grads = {
        source: [
            None if choose.random() < 0.2 else torch.randn(tensor.shape, generator=noise)
            for tensor in made.graph.tensors[source]
        ]
        for source in sources
    }
    edges = [edge for source in sources for edge in made.graph.edges[source]]
    seeds = [grad for source in sources for grad in grads[source]]
    pairs = [(edge, grad) for edge, grad in zip(edges, seeds, strict=True) if grad is not None]
    nodes = {node for source in sources for node in made.graph.nodes[source]}
    recvs = {node: mark for node in nodes if (mark := recv_of(node)) is not None}
    leaves = {node.variable for node in nodes if type(node) is LeafNode}
    found = (
        torch.autograd.grad(
            [edge for edge, _ in pairs],
            [*(GradientEdge(node, 0) for node in recvs), *leaves],
            [grad for _, grad in pairs],
            retain_graph=True,
            allow_unused=True,
        )
        if pairs
        else [None] * (len(recvs) + len(leaves))
    )
    for source in sources:
        made.context.add_send(SendRecord(source, 1, (source,), made.sources[source]))
    answers = run(made.context, list(sources), [len(grads[source]) for source in sources], seeds)
    assert answers is not None
    sent = {}
    for to, messages, ids, counts, values, _ in answers:
        left = list(values)
        for recv, number, count in zip(messages, ids, counts, strict=True):
            assert (recv.message, recv.sender, recv.count) == (number, to, count)
            sent[recv] = [left.pop(0) for _ in range(count)]
        assert not left
    assert set(sent) == {recv for recv, _ in recvs.values()}
    for (recv, index), grad in zip(recvs.values(), found, strict=False):
        torch.testing.assert_close(sent[recv][index], grad)
    kept = made.context.gradients
    expected = {leaf: grad for leaf, grad in zip(leaves, found[len(recvs) :], strict=True) if grad is not None}
    assert set(kept) == set(expected)
    for leaf, grad in expected.items():
        torch.testing.assert_close(kept[leaf], grad)
        assert leaf.grad is None


def test_ends_are_those_of_python() -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    context, leaf = Context(CONTEXT), torch.ones(2, requires_grad=True)
    tensors = [torch.ones(2), leaf, leaf * 3, torch.stack([leaf, leaf]).unbind()[1], Custom.apply(leaf)]
    places, source, _ = core.record_sent(context.index, tensors, frozenset((2,)))
    assert places == (1, 3, 4)
    record = SendRecord(MessageId(1), 1, (1,), source)
    one, two, three = record.ends
    assert one is leaf
    assert (two.node, two.output_nr) == (tensors[3].grad_fn, 1)
    del tensors, source, record, two
    gc.collect()
    assert torch.autograd.grad(three, leaf, torch.ones(2))[0].tolist() == [2.0, 2.0]  # the edge keeps its node


def test_messages_of_other_contexts_are_left_to_python() -> None:
    context = Context(CONTEXT)
    (tensor,) = receive(Recv(MessageId(9), 1, (), context=ContextId(2)), [torch.ones(2)])
    _, source, _ = core.record_sent(context.index, [tensor * 2], frozenset())
    assert run(context, [source], [1], [torch.ones(2)]) is None


def test_the_index_keeps_no_graph() -> None:
    context, leaf = Context(CONTEXT), torch.ones(2, requires_grad=True)
    first, second = leaf * 2, leaf * 3
    _, one, _ = core.record_sent(context.index, [first], frozenset())
    _, two, _ = core.record_sent(context.index, [second], frozenset())
    assert run(context, [one, two], [1, 1], [torch.ones(2), torch.ones(2)]) == []
    mark = torch.nn.Module()  # anything that can be referred to weakly
    first.grad_fn.metadata["kept"] = mark  # type: ignore[union-attr]
    gone = weakref.ref(mark)
    del mark, first, one
    assert gone() is None
    assert run(context, [two], [1], [torch.ones(2)]) == []


def test_a_source_that_is_dropped_leaves_its_nodes_to_others() -> None:
    """The walk of the second source has stopped where the first had been."""
    context, leaf = Context(CONTEXT), torch.ones(2, requires_grad=True)
    shared = leaf * 2
    _, one, _ = core.record_sent(context.index, [shared * 3], frozenset())
    _, two, _ = core.record_sent(context.index, [shared * 5], frozenset())
    assert run(context, [one], [1], [torch.ones(2)]) is None
    assert run(context, [two], [1], [torch.ones(2)]) is None
    del one
    assert run(context, [two], [1], [torch.ones(2)]) == []
    assert context.gradients[leaf].tolist() == [10.0, 10.0]


def test_a_leaf_that_needs_no_gradient_any_more() -> None:
    """The nodes that lead to it run nevertheless, with their hooks."""
    context, leaf = Context(CONTEXT), torch.ones(2, requires_grad=True)
    inner, seen = leaf * 2, []
    inner.register_hook(seen.append)
    _, source, _ = core.record_sent(context.index, [inner * 3, leaf], frozenset())
    leaf.requires_grad_(False)
    assert run(context, [source], [2], [torch.ones(2), torch.ones(2)]) == []
    assert [grad.tolist() for grad in seen] == [[3.0, 3.0]]
    assert not context.gradients


Change = Callable[[torch.Tensor, Any, torch.Tensor, Callable[..., None]], object]
CHANGES: dict[str, Change] = {
    "hook": lambda leaf, node, received, see: leaf.register_hook(see),
    "post-hook": lambda leaf, node, received, see: leaf.register_post_accumulate_grad_hook(see),
    "node hook": lambda leaf, node, received, see: node.register_hook(see),
    "node prehook": lambda leaf, node, received, see: node.register_prehook(see),
    "hook of a recv node": lambda leaf, node, received, see: received.grad_fn.register_hook(see),
}


def hooked(change: str) -> tuple[Context, torch.Tensor, Any, list[Any]]:
    context, leaf, seen = Context(CONTEXT), torch.ones(2, requires_grad=True), []
    (received,) = receive(Recv(MessageId(9), 1, (), context=CONTEXT), [torch.ones(2)])
    sent = leaf * received
    _, source, _ = core.record_sent(context.index, [sent], frozenset())
    node: Any = sent.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert type(node) is LeafNode
    CHANGES[change](leaf, node, received, lambda *given: seen.append(given))
    return context, leaf, source, seen


@pytest.mark.parametrize("change", CHANGES)
def test_hooks_beside_other_sources_are_left_to_python(change: str) -> None:
    context, _, source, seen = hooked(change)
    _, other, _ = core.record_sent(context.index, [torch.ones(2, requires_grad=True) * 2], frozenset())
    assert run(context, [source], [1], [torch.ones(2)]) is None
    assert run(context, [other], [1], [torch.ones(2)]) == []
    assert not seen


@pytest.mark.usefixtures("patches")
@pytest.mark.parametrize("into_grad", [False, True])
@pytest.mark.parametrize("change", [change for change in CHANGES if change != "hook of a recv node"])
def test_hooks_of_the_only_source(change: str, into_grad: bool) -> None:
    context, leaf, source, seen = hooked(change)
    spec = PassSpec(CONTEXT, 7, 1, retain=True, into_grad=into_grad)
    for step in (1, 2):
        assert run(context, [source], [1], [torch.ones(2)], spec) is not None
        assert len(seen) == step
        found = leaf.grad if into_grad else context.gradients[leaf]
        assert found is not None
        assert found.tolist() == [float(step)] * 2


def test_gradients_in_grad_have_memory_of_their_own() -> None:
    """As accumulation nodes do: what arrived may belong to others, and what is there is added to in place."""
    spec = PassSpec(CONTEXT, 7, 1, into_grad=True, retain=True)
    context, leaf, other = Context(CONTEXT), torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    sources = [core.record_sent(context.index, [each], frozenset())[1] for each in (leaf, other, leaf + other)]
    seed = torch.ones(2)
    for step in (1.0, 2.0):
        before = leaf.grad
        assert run(context, sources, [1, 1, 1], [seed, seed, seed], spec) == []
        assert leaf.grad is not None
        assert other.grad is not None
        assert leaf.grad.tolist() == other.grad.tolist() == [2 * step, 2 * step]
        assert before is None or leaf.grad is before
        assert len({seed.data_ptr(), leaf.grad.data_ptr(), other.grad.data_ptr()}) == 3
    assert seed.tolist() == [1.0, 1.0]


def test_gradients_that_are_not_dense() -> None:
    context, table = Context(CONTEXT), torch.nn.Embedding(4, 2, sparse=True)
    spec = PassSpec(CONTEXT, 7, 1, into_grad=True, retain=True)
    _, source, _ = core.record_sent(context.index, [table(torch.tensor([1, 1, 3]))], frozenset())
    for expected in (1.0, 2.0):
        assert run(context, [source], [1], [torch.ones(3, 2)], spec) == []
        assert table.weight.grad is not None
        assert table.weight.grad.layout is torch.sparse_coo
        assert table.weight.grad.to_dense()[:, 0].tolist() == [0.0, 2 * expected, 0.0, expected]
    assert run(context, [source], [1], [torch.ones(3, 2)]) == []
    assert context.gradients[table.weight].to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]


def test_an_error_in_a_backward_function_is_raised() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise LookupError("on purpose")

    context, leaf = Context(CONTEXT), torch.ones(2, requires_grad=True)
    _, source, _ = core.record_sent(context.index, [Failing.apply(leaf)], frozenset())
    with pytest.raises(LookupError, match="on purpose"):
        run(context, [source], [1], [torch.ones(2)])
    assert not context.gradients


def test_gradients_leave_before_the_end_of_a_large_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message as soon as the gradients of all its tensors are there, after all hooks of the user's."""
    monkeypatch.setattr(torch_run, "SEND_EARLY_NODES", 1)
    context, order = Context(CONTEXT), []
    recvs = [Recv(MessageId(9), 1, (), context=CONTEXT), Recv(MessageId(10), 2, (), context=CONTEXT)]
    (first,) = receive(recvs[0], [torch.ones(2)])
    second, third = receive(recvs[1], [torch.ones(2), torch.ones(2)])
    inner = first * second
    inner.register_hook(lambda grad: order.append("inner"))
    last = inner * 3
    last.register_hook(lambda grad: order.append("last"))
    _, source, _ = core.record_sent(context.index, [last, third * 5], frozenset())

    def send(recv: Recv, grads: list[torch.Tensor | None]) -> None:
        order.append((recv.message, [None if grad is None else grad.tolist() for grad in grads]))

    for factor in (1.0, 7.0):  # the second hook is registered after the first run has begun to watch
        first.register_hook(lambda grad, factor=factor: grad * factor)
        expected = [7.0 * 3 if factor > 1 else 3.0] * 2
        order.clear()
        ran = run_simple(
            SPEC,
            context,
            [source],
            [2],
            [torch.ones(2), torch.ones(2)],
            task_number=lambda: 1 << 62,
            send_early=send,
            send_all=never,
        )
        assert ran == ([], {9: 1, 10: 2})
        assert order[:2] == ["last", "inner"]
        assert sorted(order[2:]) == [(9, [expected]), (10, [[3.0, 3.0], [5.0, 5.0]])]
    order.clear()
    ran = run_simple(
        SPEC, context, [source], [1], [torch.ones(2)], task_number=lambda: 1 << 62, send_early=send, send_all=never
    )
    assert ran is not None
    ((to, (recv,), *_, grads, _),) = ran[0]  # no gradient comes to one of its tensors, so it is sent in the end
    assert (to, recv, grads[1]) == (2, recvs[1], None)


def test_gradients_leave_before_hooks_of_leaves_run(patches: None) -> None:
    context, order = Context(CONTEXT), []
    weight = torch.ones(2, requires_grad=True)
    (received,) = receive(Recv(MessageId(9), 1, (), context=CONTEXT), [torch.ones(2)])
    _, source, _ = core.record_sent(context.index, [received * weight], frozenset())
    weight.register_post_accumulate_grad_hook(lambda leaf: order.append("hook"))

    def send_all(answers: list[Answers]) -> None:
        order.append([message for _, _, messages, *_ in answers for message in messages])

    ran = run_simple(
        PassSpec(CONTEXT, 7, 1, retain=True, into_grad=True),
        context,
        [source],
        [1],
        [torch.ones(2)],
        task_number=lambda: 1 << 62,
        send_early=never,
        send_all=send_all,
    )
    assert ran == ([], {9: 1})
    assert order == [[9], "hook"]


def test_an_error_while_gradients_leave_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_run, "SEND_EARLY_NODES", 0)
    context = Context(CONTEXT)
    (received,) = receive(Recv(MessageId(9), 1, (), context=CONTEXT), [torch.ones(2)])
    _, source, _ = core.record_sent(context.index, [received * 2], frozenset())
    with pytest.raises(AssertionError, match="sent early"):
        run(context, [source], [1], [torch.ones(2)])
