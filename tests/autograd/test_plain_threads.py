"""Passes outside contexts while other threads run passes, or collect garbage."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import backhaul as bh
from backhaul.testing.oracle import compare, run_locally, run_plain
from backhaul.testing.programs import make_program

from .worlds import DEADLINE_SECONDS

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


@pytest.fixture
def often() -> Iterator[None]:
    """Let threads run in turn as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_garbage_that_another_thread_collects(often: None) -> None:
    """A collection must not take a received message for gone while a pass uses it. It did so with recv nodes in Python:
    the collector counts references of torch that change while it runs, because threads of torch do not hold its lock.
    """
    over = threading.Event()

    def collect() -> None:
        while not over.is_set():
            gc.collect(1)

    thread = threading.Thread(target=collect)
    with bh.cluster(4):
        thread.start()
        try:
            for seed in range(2050, 2062):
                program = make_program(random.Random(seed).randrange, workers=4)
                assert compare(run_locally(program, order=2), run_plain(program, order=2)) == []
        finally:
            over.set()
            thread.join()


weight = torch.ones(2, requires_grad=True)
made: list[torch.Tensor] = []


def begin() -> None:
    weight.grad = None
    made[:] = [weight * 2]


def multiply(x: torch.Tensor) -> torch.Tensor:
    return made[0] * x


def add(x: torch.Tensor) -> torch.Tensor:
    return made[0] + x


def relay(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(1, add, args=(x * 1,)) * 1


@pytest.mark.parametrize("shared", [True, False])
def test_passes_at_the_same_time(often: None, shared: bool) -> None:
    """Each waits on worker 1 for gradients that come on two ways to one node. Each pass adds the same gradients."""
    threads, passes = 3, 15
    x = torch.ones(2, requires_grad=True)

    def forward() -> torch.Tensor:
        return (bh.rpc_sync(1, multiply, args=(x,)) * bh.rpc_sync(2, relay, args=(x,))).sum()

    def differentiate(worker: bh.Worker, loss: torch.Tensor, failed: Callable[[BaseException], None]) -> None:
        try:
            with worker:
                for _ in range(passes):
                    loss.backward(retain_graph=True)
        except BaseException as error:
            failed(error)

    with bh.cluster(3) as workers:
        bh.rpc_sync(1, begin)
        loss = forward()
        losses = [loss if shared else forward() for _ in range(threads)]
        errors: list[BaseException] = []
        running = [threading.Thread(target=differentiate, args=(workers[0], each, errors.append)) for each in losses]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(DEADLINE_SECONDS)
        assert errors == []
        assert x.grad is not None
        assert x.grad.tolist() == [8.0 * threads * passes] * 2
        assert weight.grad is not None
        assert weight.grad.tolist() == [10.0 * threads * passes] * 2
        made.clear()
        del losses, loss
