"""Tensors that a program keeps while others take their place, and gradients from elsewhere, as in one process."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import clip_grad_norm_

import backhaul as bh
from backhaul.nn import RemoteModule

pytestmark = pytest.mark.usefixtures("workers")

Numbers = list[Any]


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def assert_same(train: Callable[[nn.Module], Numbers], tolerance: float = 0) -> None:
    """Train a model over three workers, and the same model in one process. ``tolerance``: for sums in another order."""
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    there = bh.nn.split(copy.deepcopy(here), {"0": "worker1", "2": "worker2"})
    torch.testing.assert_close(train(there), train(here), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(there.state_dict(), here.state_dict(), rtol=0, atol=0)


def plain(tensors: Any) -> Numbers:
    return [each if each is None else each.detach().tolist() for each in tensors]


def descend(model: nn.Module, seed: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(inputs(seed)).square().mean().backward()
    optimizer.step()


def test_an_average_takes_the_place_of_the_weights_for_a_while() -> None:
    def train(model: nn.Module) -> Numbers:
        average = {name: p.data.clone() for name, p in model.named_parameters()}
        kept = {}
        for seed in range(3):
            descend(model, seed)
            for name, p in model.named_parameters():
                average[name] = 0.1 * p.data + 0.9 * average[name]
        for name, p in model.named_parameters():
            kept[name] = p.data
            p.data = average[name]
        found = model(inputs()).sum().item()
        for name, p in model.named_parameters():
            p.data = kept[name]
        return [found, model(inputs()).sum().item()]

    assert_same(train)


def test_aliases_keep_the_old_memory() -> None:
    def train(model: nn.Module) -> Numbers:
        weight = model[0].weight
        aliases = [weight.data, weight.detach(), weight.data.view(-1)]
        weight.data = weight.data * 2
        later = weight.data
        with torch.no_grad():
            weight.add_(1)
        aliases[0].mul_(3)
        aliases[1].data = torch.zeros(2)  # changes this alias alone
        return plain([*aliases, later, weight])

    assert_same(train)


def test_data_of_another_shape_and_type() -> None:
    def train(model: nn.Module) -> Numbers:
        weight, bias = model[0].weight, model[0].bias
        weight.data = weight.data.double()[:3]
        bias.data = bias.data[:3].double()
        return [tuple(weight.shape), weight.dtype == torch.float64, model[0](inputs().double()).sum().item()]

    assert_same(train)


def test_data_of_a_buffer_and_of_a_gradient() -> None:
    def train(model: nn.Module) -> Numbers:
        model(inputs()).sum().backward()
        gradient = model[0].bias.grad
        alias = gradient.data
        gradient.data = gradient.data.clamp(-1, 1)
        return plain([alias, gradient, model[0].bias.grad])

    assert_same(train)
    there = RemoteModule("worker1", nn.BatchNorm1d, (3,))
    alias = there.running_mean.data
    there.running_mean.data = torch.ones(3)
    assert (alias.tolist(), there.running_mean.tolist()) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("clear", ["zero_grad", "none", "part", "assign"])
def test_gradients_stay_what_they_were(clear: str) -> None:
    def train(model: nn.Module) -> Numbers:
        model(inputs()).sum().backward()
        first = [p.grad for p in model.parameters()]
        if clear == "zero_grad":
            model.zero_grad()
        elif clear == "part":
            for part in model:
                part.zero_grad()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if clear == "assign" else None
        model(2 * inputs(1)).square().sum().backward()
        second = [p.grad for p in model.parameters()]
        model.zero_grad()
        for p, a, b in zip(model.parameters(), first, second, strict=True):
            p.grad = a - b
        found = plain(p.grad for p in model.parameters())
        for p, a in zip(model.parameters(), first, strict=True):
            p.grad = a  # puts it back: the same tensor
        model[2].weight.grad.mul_(2)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return [found, *plain(first), *plain(second)]

    assert_same(train)


def test_gradients_that_are_zeroed_in_place() -> None:
    def train(model: nn.Module) -> Numbers:
        model(inputs()).sum().backward()
        first = [p.grad for p in model.parameters()]
        torch.optim.SGD(model.parameters(), lr=1.0, foreach=True).zero_grad(set_to_none=False)
        model.zero_grad()
        return plain(first)

    assert_same(train)


class Trains(nn.Linear):
    def train_once(self) -> None:
        self(torch.ones(2, 4)).sum().mul(100).backward()


def train_there(module: RemoteModule) -> None:
    module(torch.ones(2, 4)).sum().mul(100).backward()


@pytest.mark.parametrize("trainer", ["worker2", "owner"])
def test_gradients_from_elsewhere(trainer: str) -> None:
    there = RemoteModule("worker1", Trains, (4, 4))
    here = Trains(4, 4)
    there.load_state_dict(here.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (there, here)]
    for model, optimizer in zip((there, here), optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        assert model.weight.grad is None
    if trainer == "owner":
        there.get_module_rref().rpc_sync().train_once()
    else:
        bh.rpc_sync("worker2", train_there, args=(there,))
    here.train_once()
    assert torch.equal(there.weight.grad.to_here(), here.weight.grad)
    norms = [clip_grad_norm_(model.parameters(), 1.0) for model in (there, here)]
    assert torch.equal(*norms)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(there.state_dict(), here.state_dict(), rtol=0, atol=0)


def test_pending_changes_are_made_before_a_call() -> None:
    there = RemoteModule("worker1", nn.Linear, (4, 4))
    optimizer = torch.optim.SGD(there.parameters(), lr=1.0)
    before = there.weight.to_here()
    optimizer.zero_grad()
    bh.rpc_sync("worker2", train_there, args=(there,))
    optimizer.step()
    assert torch.equal(there.weight.to_here(), before - 200)


def test_changes_are_kept_if_the_forward_is_not_sent() -> None:
    def train(model: nn.Module) -> Numbers:
        model(inputs()).sum().backward()
        model.zero_grad()
        model[0].bias.requires_grad = False
        with pytest.raises(Exception):  # noqa: B017 (here and there it is another error)
            model[0](lambda: None)
        model(inputs()).sum().backward()
        return plain(p.grad for p in model.parameters())

    assert_same(train)


def test_a_canceled_forward_leaves_its_changes() -> None:
    there = RemoteModule("worker1", nn.Linear, (4, 4))
    there(torch.ones(2, 4)).sum().backward()
    there.weight.grad = there.bias.grad = None
    there.forward_async(torch.ones(2, 4)).cancel()
    there(torch.ones(2, 4)).sum().backward()
    assert there.bias.grad.tolist() == [2.0] * 4


def test_single_elements() -> None:
    def train(model: nn.Module) -> Numbers:
        weight, bias = model[0].weight, model[0].bias
        model(inputs()).sum().backward()
        bias.grad[0] = 100.0
        weight.grad[2] = 0
        bias.grad[1].mul_(2)
        with torch.no_grad():
            bias[0] = 5.0
            weight[1, 2] = 7.0
            bias.data[1] = 6.0
            bias[2].fill_(3.0)
            bias.view(-1)[3].add_(1)
            for number, each in enumerate(model[2].bias):
                each.fill_(float(number))
            for row in model[2].weight:
                row.mul_(2)
            found = [float(bias[1]), bias[2].item(), bias.grad[0].item(), bias[3].dim()]
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return found

    assert_same(train)


def test_functional_call() -> None:
    def train(model: nn.Module) -> Numbers:
        ones = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
        found = torch.func.functional_call(model, ones, inputs()).sum().item()
        fast = {name: p - 0.1 * torch.ones_like(p) for name, p in model.named_parameters()}
        torch.func.functional_call(model, fast, inputs()).square().sum().backward()
        model(inputs()).sum().backward()  # with its own parameters again
        return [found, *plain(p.grad for p in model.parameters())]

    assert_same(train)


def test_functional_call_of_a_part_with_modules_inside() -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1))
    there = bh.nn.split(copy.deepcopy(here), {"0": "worker1"})
    state = {name: torch.ones_like(value) for name, value in here.state_dict().items()}
    with pytest.raises(RuntimeError, match="evaluation mode"):
        torch.func.functional_call(there, state, inputs())
    for model in (there, here):
        model.eval()
    found, wanted = [torch.func.functional_call(model, state, inputs()) for model in (there, here)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert torch.equal(there(inputs()), here(inputs()))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.T, x.T @ grads[0]


def use_function(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = Product.apply(torch.ones(2, 8, requires_grad=True), model[0].weight)
    return found.sum() + model(inputs()).sum()


def write_from_parameters(model: nn.Module) -> torch.Tensor:
    made = torch.ones(3, 8)
    made.add_(model[0].bias)
    made[0] = model[2].bias
    return made.square().sum() + torch.zeros(8).copy_(model[0].bias).sum()


def convert(model: nn.Module) -> torch.Tensor:
    return nn.functional.linear(inputs().double(), model[0].weight.to(torch.double)).sum()


def checkpoint(model: nn.Module) -> torch.Tensor:
    x = inputs().requires_grad_()
    found: torch.Tensor = torch.utils.checkpoint.checkpoint(
        lambda x, w: (x @ w.T).tanh().sum(), x, model[0].weight, use_reentrant=True
    )
    return found


@pytest.mark.parametrize("loss", [use_function, write_from_parameters, convert, checkpoint])
def test_gradients_that_arrive_here_reach_the_owner(loss: Callable[[nn.Module], torch.Tensor]) -> None:
    def train(model: nn.Module) -> Numbers:
        for _ in range(2):
            loss(model).backward()
        return plain(p.grad for p in model.parameters())

    assert_same(train, 1e-5)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_penalty_on_gradients() -> None:
    def train(model: nn.Module) -> Numbers:
        model(inputs()).square().mean().backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        model.zero_grad()
        penalty.backward()
        found = plain(p.grad for p in model.parameters())
        model.zero_grad()
        return found

    assert_same(train, 1e-5)


def test_a_model_is_copied_with_its_optimizer() -> None:
    def train(model: nn.Module) -> Numbers:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        twin, other = copy.deepcopy((model, optimizer))
        own = {id(p) for p in twin.parameters()}
        assert all(id(p) in own for group in other.param_groups for p in group["params"])
        for _ in range(2):
            other.zero_grad()
            twin(inputs()).square().mean().backward()
            other.step()
        return plain([*twin.parameters(), *model.parameters()])

    assert_same(train)
    there = RemoteModule("worker1", nn.Linear, (4, 4))
    optimizer = torch.optim.SGD(there.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="copy the module first"):
        copy.deepcopy((optimizer, there))


def test_assigned_gradients_are_copied_at_once() -> None:
    there = RemoteModule("worker1", nn.Linear, (4, 4))
    gradient = torch.ones(4)
    there.bias.grad = gradient
    gradient.mul_(5)
    assert there.bias.grad.tolist() == [1.0] * 4


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.norm(x) * self.count[0]


def test_buffers_can_be_set_and_parameters_not_deleted() -> None:
    here = nn.Sequential(Counts())
    there = bh.nn.split(copy.deepcopy(here), {"0": "worker1"})
    for model in (there, here):
        model[0].count = torch.full((2,), 7.0)
        model[0].norm.running_mean = torch.ones(4)
        model(inputs())
    torch.testing.assert_close(there.state_dict(), here.state_dict(), rtol=0, atol=0)
    assert torch.equal(there(inputs()), here(inputs()))
    del there[0].norm.bias
    with pytest.raises(RuntimeError, match=r"'norm.bias' was deleted here"):
        there(inputs())


class Waits(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.event = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.event.wait(30)
        return super().forward(x)


def let_go(module: bh.RRef[nn.Module]) -> None:
    module.local_value().event.set()


def test_a_call_does_not_wait_for_a_forward_that_carries_changes() -> None:
    there = RemoteModule("worker1", Waits)
    reference = there.get_module_rref()
    optimizer = torch.optim.SGD(there.parameters(), lr=1.0)
    optimizer.zero_grad()
    running = there.forward_async(torch.ones(1, 2))
    bh.rpc_sync("worker1", let_go, args=(reference,))
    running.wait().sum().backward()
    assert there.bias.grad.tolist() == [1.0, 1.0]


def test_modules_are_dropped_without_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        model = bh.nn.split(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), {"0": "worker1"})
        module = RemoteModule("worker1", nn.BatchNorm1d, (4,))
        list(module.named_modules())
        references = weakref.ref(model[0]), weakref.ref(module)
        del model, module
        assert [each() is None for each in references] == [True, True]
    finally:
        gc.enable()
