"""Threads of one worker use modules of other workers at the same time. What one thread asks of an owner may take long:
modules of this file wait when their parameters are listed.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import backhaul as bh
from backhaul.nn import RemoteModule

from .conftest import DEADLINE_SECONDS
from .modules import batch

holds: dict[str, Hold] = {}


class Hold:
    """Holds the next thread that lists the parameters of the module with its name."""

    def __init__(self, name: str) -> None:
        self.armed = threading.Semaphore(1)
        self.reached = threading.Event()
        self.released = threading.Event()
        holds[name] = self

    def pass_by(self) -> None:
        if self.armed.acquire(blocking=False):
            self.reached.set()
            self.released.wait(DEADLINE_SECONDS)


class Held(nn.Linear):
    def __init__(self, name: str) -> None:
        torch.manual_seed(len(name))
        super().__init__(4, 4, dtype=torch.float64)
        self.name = name

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        hold = holds.get(self.name)
        if hold is not None:
            hold.pass_by()
        return super().parameters(recurse)


@pytest.fixture(autouse=True)
def no_holds() -> Iterator[None]:
    yield
    for hold in holds.values():
        hold.released.set()
    holds.clear()


def start(worker: bh.Worker, function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a function on a thread of a worker."""
    results: list[Any] = []

    def run() -> None:
        with worker:
            results.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def clear(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.zero_()


def freeze(module: nn.Module) -> None:
    module.weight.requires_grad = False


def assign(module: nn.Module) -> None:
    module.weight.grad = torch.ones(4, 4, dtype=torch.float64)


@pytest.mark.parametrize("change", [clear, zero, freeze, assign])
def test_a_change_that_another_thread_sends_comes_first(
    workers: list[bh.Worker], change: Callable[[nn.Module], None]
) -> None:
    there, here = RemoteModule("worker1", Held, ("changed",)), Held("changed")
    other = RemoteModule("worker1", Held, ("other",))
    for module in (there, here):
        module(batch(1)).sum().backward()
        change(module)
    hold = Hold("changed")
    # The pass of another thread sends the change, and the owner takes its time.
    sender, _ = start(workers[0], lambda: other(batch()).sum().backward())
    assert hold.reached.wait(DEADLINE_SECONDS)

    def train(module: nn.Module) -> None:
        module(batch(2)).pow(2).sum().backward()

    thread, _ = start(workers[0], lambda: train(there))
    thread.join(0.5)  # longer than the training takes if it does not wait for the change
    hold.released.set()
    thread.join()
    sender.join()
    train(here)
    for found, wanted in zip(there.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(found.grad.to_here(), wanted.grad, rtol=0, atol=0)


def test_an_old_answer_does_not_undo_a_change(workers: list[bh.Worker]) -> None:
    first, held = [RemoteModule("worker1", Held, (name,)) for name in ("first", "held")]
    (first(batch()) + held(batch())).sum().backward()
    hold = Hold("held")
    # This thread asks for the gradients of both modules. The owner has listed those of the first when it is held.
    asker, answers = start(workers[0], lambda: held.weight.grad is not None)
    assert hold.reached.wait(DEADLINE_SECONDS)
    clear(first)
    with torch.no_grad():
        first(batch())
    hold.released.set()
    asker.join()
    assert answers == [True]
    assert first.weight.grad is None


def test_an_old_answer_does_not_replace_a_new_one(workers: list[bh.Worker]) -> None:
    first, held, far = [
        RemoteModule(owner, Held, (name,))
        for owner, name in (("worker1", "first"), ("worker1", "held"), ("worker2", "far"))
    ]
    assert far.weight.grad is None  # what is known of ``far`` counts until a pass ends
    loss = (first(batch()) + held(batch())).sum()
    hold, far_hold = Hold("held"), Hold("far")
    known_here = contextvars.copy_context()  # the thread knows what this one knows, and does not ask for ``far``
    early, _ = start(workers[0], lambda: known_here.run(lambda: held.weight.grad))
    assert hold.reached.wait(DEADLINE_SECONDS)  # the owner has found no gradient of ``first``
    assert not far_hold.reached.is_set()
    loss.backward()
    late, answers = start(workers[0], lambda: first.weight.grad is not None)
    assert far_hold.reached.wait(DEADLINE_SECONDS)  # this thread asks for the gradients of all modules
    deadline = time.monotonic() + DEADLINE_SECONDS
    while first._gradients._known is None:
        assert time.monotonic() < deadline
    hold.released.set()
    early.join()
    far_hold.released.set()
    late.join()
    assert answers == [True]


def test_a_forward_that_fails_loses_no_changes(workers: list[bh.Worker]) -> None:
    there, here = RemoteModule("worker1", Held, ("fails",)), Held("fails")
    for module in (there, here):
        module(batch(1)).sum().backward()
        clear(module)
    with pytest.raises(bh.errors.SerializationError):
        there(threading.Lock())
    for module in (there, here):
        module(batch(2)).sum().backward()
    for found, wanted in zip(there.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(found.grad.to_here(), wanted.grad, rtol=0, atol=0)


class CallsBack(nn.Linear):
    """Its forward lets the worker that called it run a pass."""

    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * bh.rpc_sync("worker0", run_pass)


def run_pass() -> float:
    layer = RemoteModule("worker2", Held, ("inner",))
    layer(batch()).sum().backward()
    return float(layer.bias.grad.sum())


def test_a_forward_that_lets_its_caller_run_a_pass(workers: list[bh.Worker]) -> None:
    there = RemoteModule("worker1", CallsBack)
    there(batch()).sum().backward()
    clear(there)
    there(batch()).sum().backward()  # the pass of the inner call does not wait for this forward
    assert there.bias.grad.to_here().tolist() == [100.0] * 4
