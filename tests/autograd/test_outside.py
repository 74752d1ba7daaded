"""Calls outside a context with ``Options(autograd="context")``. Their results have lost their history: they raise when
a gradient is asked for.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import backhaul as bh

from .worlds import DEADLINE_SECONDS, vector

REFUSAL = "outside any context"
OPTIONS = bh.Options(autograd="context")


@pytest.fixture
def workers() -> Iterator[list[bh.Worker]]:
    kept.clear()
    with bh.cluster(3, options=OPTIONS) as made:
        yield made
    kept.clear()


kept: list[torch.Tensor] = []  # kept by workers from one call to the next


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def keep(x: torch.Tensor) -> None:
    kept.append(x)


def with_kept(x: torch.Tensor) -> torch.Tensor:
    return x * kept[0]


class Layer(torch.nn.Module):
    """Has a parameter, and another tensor that requires grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 0.5))
        self.scale = torch.ones(2, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.scale


def remote_module(to: int, x: torch.Tensor) -> torch.Tensor:
    return bh.nn.RemoteModule(f"worker{to}", torch.nn.Identity)(x * 2)


def through_a_reference(to: int, x: torch.Tensor) -> torch.Tensor:
    return bh.remote(to, torch.clone, args=(x,)).rpc_sync().mul(2)


# A value made here is the value itself, with its graph: nothing was received.
CALLS: dict[str, Callable[[int, torch.Tensor], torch.Tensor]] = {
    "rpc_sync": lambda to, x: bh.rpc_sync(to, double, args=(x,)),
    "rpc_async": lambda to, x: bh.rpc_async(to, double, args=(x,)).wait(),
    "in a dict": lambda to, x: bh.rpc_sync(to, dict, kwargs={"y": x * 2})["y"],
    "remote": lambda to, x: bh.remote(to, double, args=(x,)).to_here(),
    "reference": through_a_reference,
    "module": remote_module,
}


# Replies.


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_result_refuses_its_gradient(workers: list[bh.Worker], call: str, to: int) -> None:
    a = vector(1.0, 2.0)
    y = CALLS[call](to, a)
    assert y.requires_grad
    assert y.tolist() == [2.0, 4.0]
    with pytest.raises(RuntimeError, match=REFUSAL):
        (y * 3).sum().backward()
    assert a.grad is None


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_root_made_before_the_context(workers: list[bh.Worker], call: str, to: int) -> None:
    a = vector(1.0, 2.0)
    loss = (CALLS[call](to, a) * 3).sum()
    with bh.context() as ctx:
        with pytest.raises(bh.errors.ForeignGraphError) as caught:
            bh.backward(ctx, [a.sum(), loss], timeout=DEADLINE_SECONDS)
        error = caught.value
        assert (error.worker, error.context, error.origin) == ("worker0", ctx, None)
        assert (error.sender, error.root, error.message) == (f"worker{to}", 1, None)
        assert REFUSAL in str(error)
        assert not ctx.grads


def test_between_processes() -> None:
    found = bh.launch(train_without_a_context, 2, options=OPTIONS, start_method="forkserver")
    assert found == [(True, 0), None]


def train_without_a_context() -> tuple[bool, int] | None:
    if bh.get_worker_info().id != 0:
        return None
    a = vector(1.0)
    loss = bh.rpc_sync(1, double, args=(a,)).sum()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return REFUSAL in str(caught.value), 0 if a.grad is None else 1


def test_a_thread_that_does_not_have_the_context(workers: list[bh.Worker]) -> None:
    a, found = vector(1.0), []

    def call() -> None:
        with workers[0]:
            found.append(bh.rpc_sync(1, double, args=(a,)))

    with bh.context() as ctx:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(DEADLINE_SECONDS)
        with pytest.raises(bh.errors.ForeignGraphError) as caught:
            ctx.backward(found[0].sum(), timeout=DEADLINE_SECONDS)
        assert caught.value.origin is None


def test_what_is_left_of_it(workers: list[bh.Worker]) -> None:
    """A detached tensor can be used freely, and local gradients that do not go through it are right."""
    w = vector(3.0)
    y = bh.rpc_sync(1, double, args=(vector(1.0),))
    (grad,) = torch.autograd.grad((y * w).sum(), w)
    assert grad.tolist() == [2.0]
    (grad,) = torch.autograd.grad((y * w).sum(), y)
    assert grad.tolist() == [3.0]
    leaf = y.detach().requires_grad_()
    (leaf * w).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0]
    y.mul_(2)
    assert y.tolist() == [4.0]


# Requests.


def differentiate(x: torch.Tensor) -> torch.Tensor:
    y = x.pow(2).sum()
    y.backward()
    return x.grad


def differentiate_leaf(x: torch.Tensor) -> torch.Tensor:
    return differentiate(x.detach().requires_grad_())


def gradient_of_argument(x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(x.pow(2).sum(), x)[0]


@pytest.mark.parametrize("to", [0, 1])
def test_an_argument_refuses_its_gradient(workers: list[bh.Worker], to: int) -> None:
    a = vector(3.0)
    with pytest.raises(RuntimeError, match=REFUSAL):
        bh.rpc_sync(to, differentiate, args=(a,))
    assert bh.rpc_sync(to, differentiate_leaf, args=(a,)).tolist() == [6.0]
    assert bh.rpc_sync(to, gradient_of_argument, args=(a,)).tolist() == [6.0]


@pytest.mark.parametrize("to", [0, 1])
def test_an_argument_that_is_used_in_a_context_later(workers: list[bh.Worker], to: int) -> None:
    bh.rpc_sync(to, keep, args=(vector(2.0),))
    with bh.context() as ctx:
        y = bh.rpc_sync(to, with_kept, args=(vector(3.0),))
        with pytest.raises(bh.errors.ForeignGraphError) as caught:
            ctx.backward(y.sum(), timeout=DEADLINE_SECONDS)
        assert (caught.value.worker, caught.value.origin, caught.value.sender) == (f"worker{to}", None, "worker0")


# Parameters are state: their copies are leaves.


def train(layer: torch.nn.Linear, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(x).sum().backward()
    optimizer.step()
    return layer.weight.grad, layer.weight


@pytest.mark.parametrize("to", [0, 1])
def test_a_module_sent_by_value_can_be_trained(workers: list[bh.Worker], to: int) -> None:
    layer = torch.nn.Linear(2, 1)
    grad, weight = bh.rpc_sync(to, train, args=(layer, torch.ones(3, 2)))
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.is_leaf
    assert weight.requires_grad
    torch.testing.assert_close(grad, torch.full((1, 2), 3.0))
    torch.testing.assert_close(weight.detach(), layer.weight.detach() - 3)
    assert layer.weight.grad is None


def give(layer: Layer) -> Layer:
    return layer


@pytest.mark.parametrize("to", [0, 1])
def test_what_a_module_has_besides_parameters(workers: list[bh.Worker], to: int) -> None:
    layer = bh.rpc_sync(to, give, args=(Layer(),))
    assert type(layer.weight) is torch.nn.Parameter
    with pytest.raises(RuntimeError, match=REFUSAL):
        layer(torch.ones(2)).sum().backward()
    layer.scale = layer.scale.detach()
    layer(torch.ones(2)).sum().backward()
    assert layer.weight.grad is not None


# Kinds of tensors.


def views(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return x[:2].requires_grad_(), x


def test_memory_that_is_shared_stays_shared(workers: list[bh.Worker]) -> None:
    part, whole = bh.rpc_sync(1, views, args=(torch.zeros(3),))
    assert part.requires_grad
    whole.add_(1)
    assert part.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2, dtype=torch.complex64),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.ones(2, 2).t()[:1],
        lambda: torch.empty(0),
    ],
)
def test_kinds_of_tensors(workers: list[bh.Worker], make: Callable[[], torch.Tensor]) -> None:
    sent = make().requires_grad_()
    found = bh.rpc_sync(1, torch.clone, args=(sent,))
    torch.testing.assert_close(found.detach(), sent.detach())
    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.autograd.backward(found, found.detach())


def test_values_that_need_no_gradient_stay_as_they_are(workers: list[bh.Worker], tmp_path: pathlib.Path) -> None:
    found = bh.rpc_sync(1, torch.mul, args=(torch.ones(2), 2))
    assert not found.requires_grad
    assert found.is_leaf
    torch.save(bh.rpc_sync(1, torch.mul, args=(vector(1.0), 2)), tmp_path / "saved")
    assert torch.load(tmp_path / "saved").requires_grad
