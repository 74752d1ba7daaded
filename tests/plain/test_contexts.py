"""Contexts beside calls outside them: each has its own graph, and mixing them is an error that says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import backhaul as bh
from backhaul.errors import ForeignGraphError
from tests.autograd.worlds import DEADLINE_SECONDS, expect_no_contexts, expect_no_records, vector

OPTIONS = bh.Options(backward_timeout=DEADLINE_SECONDS)
BEHIND_A_CONTEXT = r"backhaul\.backward\(context, \[loss\]\)"


@pytest.fixture
def workers() -> Iterator[list[bh.Worker]]:
    with bh.cluster(3, options=OPTIONS) as made:
        yield made
        expect_no_records(made)
        expect_no_contexts(made)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


def test_side_by_side(workers: list[bh.Worker]) -> None:
    """One leaf, two graphs: the gradients of the context are apart from ``.grad``."""
    a = vector(1.0, 2.0)
    outside = bh.rpc_sync(1, double, args=(a,))
    with bh.context() as ctx:
        inside = bh.rpc_sync(1, multiply, args=(a, a))
        outside.sum().backward()
        assert ctx.grads == {}
        ctx.backward(inside.sum())
        assert ctx.grads[a].tolist() == [2.0, 4.0]
    assert a.grad is not None
    assert a.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_a_tensor_of_a_context_outside(workers: list[bh.Worker], way: str) -> None:
    """Beside one that was received outside contexts. The context may still exist, or not."""
    a = vector(1.0, 2.0)

    def differentiate(inside: torch.Tensor) -> None:
        loss = (inside * bh.rpc_sync(1, double, args=(a,))).sum()
        if way == "backward":
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            torch.autograd.grad(loss, a)

    with bh.context() as ctx:
        inside = bh.rpc_sync(1, double, args=(a,))
    for _ in range(2):
        with pytest.raises(ForeignGraphError) as caught:
            differentiate(inside)
        assert (caught.value.origin, caught.value.sender) == (ctx, "worker1")
    del caught
    assert a.grad is None


def test_backward_says_how_to_go_back_through_a_context(workers: list[bh.Worker]) -> None:
    with bh.context():
        loss = bh.rpc_sync(1, double, args=(vector(1.0),)).sum()
        with pytest.raises(RuntimeError, match=BEHIND_A_CONTEXT):
            loss.backward()


def test_a_tensor_of_a_plain_call_inside(workers: list[bh.Worker]) -> None:
    a = vector(1.0, 2.0)
    outside = bh.rpc_sync(1, double, args=(a,))
    with bh.context() as ctx:
        with pytest.raises(ForeignGraphError, match="outside any context") as caught:
            ctx.backward((outside * a).sum())
        error = caught.value
        assert (error.context, error.origin, error.sender, error.root) == (ctx, None, "worker1", 0)
        assert ctx.grads == {}
    outside.sum().backward()
    assert a.grad is not None
    assert a.grad.tolist() == [2.0, 2.0]


def test_a_tensor_of_a_plain_call_sent_in_a_context(workers: list[bh.Worker]) -> None:
    """The gradient would leave the context on this worker."""
    outside = bh.rpc_sync(1, double, args=(vector(1.0, 2.0),))
    with bh.context() as ctx:
        inside = bh.rpc_sync(2, double, args=(outside,))
        with pytest.raises(ForeignGraphError):
            ctx.backward(inside.sum())


def test_detached_they_mix(workers: list[bh.Worker]) -> None:
    a = vector(1.0, 2.0)
    outside = bh.rpc_sync(1, double, args=(a,))
    with bh.context() as ctx:
        inside = bh.rpc_sync(1, multiply, args=(a, outside.detach()))
        ctx.backward(inside.sum())
        assert ctx.grads[a].tolist() == [2.0, 4.0]
    (outside * inside.detach()).sum().backward()
    assert a.grad is not None
    assert a.grad.tolist() == [4.0, 16.0]


# Without calls that are recorded outside contexts.


def test_contexts_only() -> None:
    a = vector(1.0, 2.0)
    with bh.cluster(2, options=bh.Options(autograd="context")) as made:
        y = bh.rpc_sync(1, double, args=(a,))
        with pytest.raises(RuntimeError, match="outside any context"):
            y.sum().backward()
        with bh.context() as ctx:
            ctx.backward(bh.rpc_sync(1, double, args=(a,)).sum())
            assert ctx.grads[a].tolist() == [2.0, 2.0]
        expect_no_records(made)


def keeps_records() -> tuple[str, int] | None:
    """A worker that records calls outside contexts, and one that does not. The caller decides."""
    if bh.get_worker_info().id != 0:
        return None
    a = vector(1.0, 2.0)
    bh.rpc_sync(1, double, args=(a,)).sum().backward()
    assert a.grad is not None
    return str(a.grad.tolist()), 0


def test_over_processes() -> None:
    found = bh.launch(keeps_records, 2, options=OPTIONS, timeout=100, start_method="forkserver")
    assert found == [("[2.0, 2.0]", 0), None]
