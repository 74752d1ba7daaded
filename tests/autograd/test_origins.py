"""Where the graph of a root comes from: a gradient that would have to go through another context, or through none, is
an error on whatever worker that is noticed, and everything else works as in one process.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import backhaul as bh

from .worlds import DEADLINE_SECONDS, expect_no_contexts, gradients_on, vector

WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "fast": {"mode": "fast"},
    "deterministic": {"deterministic": True},
    "grad": {"accumulate": "grad"},
    "create_graph": {"create_graph": True},
}


class Elsewhere:
    """A thread with its own context, which stays open while others are open."""

    def __init__(self) -> None:
        self._variables = contextvars.copy_context()
        self._manager = bh.context()
        self.context = self._variables.run(self._manager.__enter__)
        self.closed = False

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._variables.run(function, *args, **kwargs)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._variables.run(self._manager.__exit__, None, None, None)


@pytest.fixture
def workers() -> Iterator[list[bh.Worker]]:
    kept.clear()
    with bh.cluster(3) as made:
        yield made
        expect_no_contexts(made)
    kept.clear()


@pytest.fixture
def elsewhere(workers: list[bh.Worker]) -> Iterator[Elsewhere]:
    with contextlib.closing(Elsewhere()) as made:
        yield made


kept: dict[str, torch.Tensor] = {}  # kept by workers from one call to the next


def keep(name: str, x: torch.Tensor) -> None:
    kept[name] = x


def keep_result(name: str, to: int, x: torch.Tensor) -> None:
    kept[name] = double(to, x)


def with_kept(name: str, x: torch.Tensor) -> torch.Tensor:
    return x * kept[name]


def kept_and(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * kept[name], x * 3


def double(to: int, x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(to, torch.mul, args=(x, 2))


# Roots.


@pytest.mark.parametrize("way", WAYS)
def test_a_root_of_another_context(workers: list[bh.Worker], elsewhere: Elsewhere, way: str) -> None:
    a, b = vector(1.0), vector(2.0)
    foreign = elsewhere.run(double, 1, a)
    with bh.context() as ctx:
        own = double(2, b)
        with pytest.raises(bh.errors.ForeignGraphError) as caught:
            ctx.backward([own.sum(), (own * foreign).sum()], timeout=DEADLINE_SECONDS, **WAYS[way])
        error = caught.value
        assert (error.worker, error.context, error.origin) == ("worker0", ctx, elsewhere.context)
        (send,) = elsewhere.context.describe()["workers"]["worker1"]["sends"]
        assert (error.sender, error.root, error.message) == ("worker1", 1, send["message"])
        assert f"context {int(elsewhere.context)}" in str(error)
        assert "roots[1]" in str(error)
        assert a not in ctx.grads
        assert a.grad is None
    elsewhere.run(elsewhere.context.backward, foreign.sum())  # it works in its own context
    assert elsewhere.context.grads[a].tolist() == [2.0]


def test_a_root_of_a_context_that_was_released(workers: list[bh.Worker]) -> None:
    with bh.context() as before:
        foreign = double(1, vector(1.0))
    with bh.context() as ctx:
        with pytest.raises(bh.errors.ForeignGraphError, match="released") as caught:
            ctx.backward(foreign.sum(), timeout=DEADLINE_SECONDS)
        assert (caught.value.origin, caught.value.sender, caught.value.root) == (before, "worker1", 0)


def test_the_received_tensor_itself_as_root(workers: list[bh.Worker], elsewhere: Elsewhere) -> None:
    foreign = elsewhere.run(double, 1, vector(1.0))
    with bh.context() as ctx, pytest.raises(bh.errors.ForeignGraphError):
        ctx.backward(foreign, timeout=DEADLINE_SECONDS)


def test_detached_it_may_be_used(workers: list[bh.Worker], elsewhere: Elsewhere) -> None:
    b = vector(2.0)
    foreign = elsewhere.run(double, 1, vector(1.0)).detach()
    with bh.context() as ctx:
        ctx.backward((double(1, b) * foreign).sum())
        assert ctx.grads[b].tolist() == [4.0]


def test_a_gradient_recorded_in_another_context(workers: list[bh.Worker], elsewhere: Elsewhere) -> None:
    a = vector(3.0)
    elsewhere.run(elsewhere.context.backward, elsewhere.run(double, 1, a).pow(2).sum(), create_graph=True)
    grad = elsewhere.context.grads[a]
    with bh.context() as ctx:
        with pytest.raises(bh.errors.ForeignGraphError) as caught:
            ctx.backward(grad.sum(), timeout=DEADLINE_SECONDS)
        assert caught.value.origin == elsewhere.context


# Graphs of other workers.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("released", [False, True])
def test_a_graph_of_another_worker(workers: list[bh.Worker], elsewhere: Elsewhere, way: str, released: bool) -> None:
    """Worker 1 uses what it received in one context, from worker 2, in another."""
    elsewhere.run(bh.rpc_sync, 1, keep_result, args=("y", 2, vector(1.0)))
    if released:
        elsewhere.close()
        expect_no_contexts(workers)
    with bh.context() as ctx:
        y = double(2, bh.rpc_sync(1, with_kept, args=("y", vector(2.0))))
        with pytest.raises(bh.errors.ForeignGraphError) as caught:
            ctx.backward(y.sum(), timeout=DEADLINE_SECONDS, **WAYS[way])
        error = caught.value
        assert (error.worker, error.context, error.origin) == ("worker1", ctx, elsewhere.context)
        assert (error.sender, error.root) == ("worker2", None)
        assert ("released" in str(error)) == released


def test_a_request_of_another_context(workers: list[bh.Worker], elsewhere: Elsewhere) -> None:
    elsewhere.run(bh.rpc_sync, 1, keep, args=("x", vector(1.0)))
    with bh.context() as ctx:
        y = bh.rpc_sync(1, with_kept, args=("x", vector(2.0)))
        with pytest.raises(bh.errors.ForeignGraphError) as caught:
            ctx.backward(y.sum(), timeout=DEADLINE_SECONDS)
        assert (caught.value.worker, caught.value.sender) == ("worker1", "worker0")


@pytest.mark.parametrize("inputs", ["behind", "beside"])
def test_inputs(workers: list[bh.Worker], elsewhere: Elsewhere, inputs: str) -> None:
    """No worker can know whether the inputs lie behind another context."""
    a, b = vector(1.0), vector(2.0)
    elsewhere.run(bh.rpc_sync, 1, keep, args=("x", a))
    foreign = elsewhere.run(double, 1, a)
    with bh.context() as ctx:
        y = bh.rpc_sync(1, with_kept, args=("x", torch.ones(1, dtype=torch.float64)))
        for root in ((b * foreign).sum(), (b + y).sum()):
            with pytest.raises(bh.errors.ForeignGraphError):
                ctx.backward(root, inputs=[a if inputs == "behind" else b], timeout=DEADLINE_SECONDS)


def test_in_a_circle(workers: list[bh.Worker], elsewhere: Elsewhere) -> None:
    """The group that contains the foreign node runs node by node."""
    foreign = elsewhere.run(double, 1, vector(1.0))
    with bh.context() as ctx:
        x = vector(2.0) * foreign
        y = double(1, x) * x
        with pytest.raises(bh.errors.ForeignGraphError) as caught:
            ctx.backward((double(2, y) * y).sum(), timeout=DEADLINE_SECONDS)
        assert caught.value.origin == elsewhere.context


# What has nothing to do with it.


def test_a_graph_made_before_the_context(workers: list[bh.Worker]) -> None:
    """If no other worker takes part, it works as in one process."""
    a = vector(1.0, 2.0)
    before = torch.tanh(a * 3)
    with bh.context() as ctx:
        ctx.backward((double(1, before) * before).sum())
        (expected,) = torch.autograd.grad((torch.tanh(a * 3).pow(2) * 2).sum(), a)
        torch.testing.assert_close(ctx.grads[a], expected)


def test_where_no_gradient_comes(workers: list[bh.Worker], elsewhere: Elsewhere) -> None:
    """A message has one tensor of another context and one that is used; another message is not used at all."""
    b = vector(2.0)
    elsewhere.run(bh.rpc_sync, 1, keep, args=("x", vector(1.0)))
    with bh.context() as ctx:
        bh.rpc_sync(1, with_kept, args=("x", b))
        _, used = bh.rpc_sync(1, kept_and, args=("x", b))
        ctx.backward(used.sum(), timeout=DEADLINE_SECONDS)
        assert ctx.grads[b].tolist() == [3.0]


class Ignore(torch.autograd.Function):
    """The product of two, of which only the first gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


def test_where_a_function_gives_no_gradient(workers: list[bh.Worker], elsewhere: Elsewhere) -> None:
    b = vector(2.0)
    foreign = elsewhere.run(double, 1, vector(1.0))
    with bh.context() as ctx:
        ctx.backward(Ignore.apply(double(1, b), foreign).sum())
        assert ctx.grads[b].tolist() == [4.0]


def test_contexts_side_by_side(workers: list[bh.Worker], elsewhere: Elsewhere) -> None:
    """They share leaves and workers, and each has its own gradients."""
    a = vector(1.0)
    here = elsewhere.run(double, 1, a)
    with bh.context() as ctx:
        ctx.backward((double(1, a) * 3).sum())
        elsewhere.run(elsewhere.context.backward, here.sum())
        assert (ctx.grads[a].tolist(), elsewhere.context.grads[a].tolist()) == ([6.0], [2.0])
        assert not gradients_on(workers[1], ctx)
