"""Optimizers over parameters of several workers that fail, lose parameters, or are copied, and one process."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn, optim

import backhaul as bh
from backhaul.nn import RemoteModule
from backhaul.optim.owner_share import OwnerShare

from .modules import batch
from .test_remote_optimizers import assert_same, bag, pair

pytestmark = pytest.mark.usefixtures("workers")


def train(model: nn.Module, optimizer: optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        model(batch(seed)).pow(2).sum().backward()
        optimizer.step()


# Steps that fail.


class BagLast(nn.Module):
    """Its last parameter has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(4))
        self.bag = bag(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bag(x) * self.scale  # type: ignore[no-any-return]


def test_a_step_that_fails_on_the_owner_and_is_repeated() -> None:
    there, here = RemoteModule("worker1", BagLast), BagLast()
    for model in (there, here):
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        for seed in range(4):
            optimizer.zero_grad()
            model(torch.tensor([[seed, 2, 5]])).pow(2).sum().backward()
            with pytest.raises(RuntimeError, match="sparse"):
                optimizer.step()  # the first parameter has state by now
            for parameter in model.parameters():
                parameter.grad = torch.full(parameter.shape, seed + 1.0)
            optimizer.step()
            if seed == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(there.state_dict(), here.state_dict())


def test_a_step_inside_a_closure_that_fails() -> None:
    there, here = pair()
    for model in (there, here):
        optimizer, inner = optim.SGD(model.parameters(), lr=0.1), optim.SGD(model.parameters(), lr=0.2)

        def fail() -> float:
            raise KeyError("closure")

        def closure(model: nn.Module = model, optimizer: Any = optimizer, inner: Any = inner) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch()).pow(2).sum()
            loss.backward()
            with pytest.raises(KeyError):
                inner.step(fail)
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert_same(there.state_dict(), here.state_dict())


def test_a_closure_that_steps_the_same_optimizer() -> None:
    there, here = pair()
    for model in (there, here):
        optimizer = optim.Adam(model.parameters(), lr=0.1)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = model(batch()).pow(2).sum()
            train(model, optimizer, range(1))
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert_same(there.state_dict(), here.state_dict())


# Parameters that leave.


def test_parameters_that_leave_and_return() -> None:
    there, here = pair()
    for model in (there, here):
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        group = optimizer.param_groups[0]["params"]
        train(model, optimizer, range(2))
        left = list(group)
        group.clear()
        train(model, optimizer, range(2, 3))
        group.extend(left[4:])
        train(model, optimizer, range(3, 4))
        group.extend(left[:4])
        train(model, optimizer, range(4, 6))
    assert_same(there.state_dict(), here.state_dict())


_modules: list[weakref.ref[nn.Module]] = []


def note_module(module: bh.RRef[nn.Module]) -> None:
    _modules.append(weakref.ref(module.local_value()))


def test_an_optimizer_lets_parameters_go() -> None:
    model = RemoteModule("worker1", nn.Linear, (4, 4))
    bh.rpc_sync("worker1", note_module, args=(model.get_module_rref(),))
    found = _modules.pop()
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["params"].clear()
    optimizer.state.clear()
    optimizer.step()
    del model
    for _ in range(1000):
        gc.collect()
        bh.rpc_sync("worker1", int)
        if found() is None:
            break
    assert found() is None


# Copies.


def test_a_model_and_its_optimizer_are_copied_together() -> None:
    results = []
    for model in pair():
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        train(model, optimizer, range(2))
        model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
        train(model_copy, optimizer_copy, range(2, 4))
        train(model, optimizer, range(4, 5))
        results.append([model.state_dict(), model_copy.state_dict(), optimizer_copy.state_dict()["state"]])
    assert_same(*results)


def test_an_optimizer_that_is_copied_before_its_model() -> None:
    there, _ = pair()
    optimizer = optim.SGD(there.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="copy the module first"):
        copy.deepcopy((optimizer, there))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_an_optimizer_that_is_copied_alone(how: Any) -> None:
    results = []
    for model in pair():
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        train(model, optimizer, range(2))
        copied = how(optimizer)
        for parameter in copied.param_groups[0]["params"]:
            parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
        copied.step()
        train(model, optimizer, range(2, 3))
        values = [parameter.detach().clone().sum() for parameter in copied.param_groups[0]["params"]]
        results.append([model.state_dict(), values])
    assert_same(*results)


@pytest.mark.parametrize("kind", [optim.Adam, optim.SGD])
def test_a_step_whose_answer_is_lost(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner has stepped. It tells again what it told with the lost answer."""
    there, here = pair()
    for model in (there, here):
        optimizer = kind(model.parameters(), lr=0.1)
        with monkeypatch.context() as patched:
            if model is there:

                def lose(*_: Any) -> None:
                    raise bh.PeerLostError("the answer is lost", worker="worker1", reason="on purpose")

                patched.setattr(OwnerShare, "finish", lose)
                with pytest.raises(bh.PeerLostError):
                    train(model, optimizer, range(1))
            else:
                train(model, optimizer, range(1))
        optimizer.param_groups[0]["lr"] = 0.2
        train(model, optimizer, range(1, 3))
        assert all(parameter.grad is not None for parameter in model.parameters())
        for parameter in model.parameters():
            state = optimizer.state[parameter] if optimizer.state else {}
            assert bool(state) == (kind is optim.Adam)
    assert_same(there.state_dict(), here.state_dict())
