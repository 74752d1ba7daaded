"""What workers run in the tests of profiles."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from typing import Any

import torch

import backhaul as bh

SIZE = 16


def weight() -> torch.Tensor:
    return torch.eye(SIZE, requires_grad=True)


def inner(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x.mm(weight()))


def outer(x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync("worker2", inner, args=(x.mm(weight()),)) * 2


def step(calls: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss over three workers and its gradient."""
    x = torch.full((SIZE, SIZE), 0.5, requires_grad=True)
    with bh.context() as context:
        futures = [bh.rpc_async("worker1", outer, args=(x * n,)) for n in range(1, calls + 1)]
        loss = sum((future.wait().sum() for future in futures), torch.zeros(()))
        loss = loss + bh.rpc_sync("worker2", inner, args=(x,)).sum()
        bh.backward(context, [loss])
        return loss.detach(), bh.get_gradients(context)[x]


def alone(calls: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in one process, with plain autograd."""
    x = torch.full((SIZE, SIZE), 0.5, requires_grad=True)
    made = [inner((x * n).mm(weight())) * 2 for n in range(1, calls + 1)]
    loss = sum((each.sum() for each in made), torch.zeros(())) + inner(x).sum()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


def profile_steps(calls: int, steps: int) -> tuple[Any, Any] | None:
    """On worker 0: profile some steps after the first."""
    if bh.get_worker_info().id:
        return None
    step(calls)
    with bh.profile() as prof:
        results = [step(calls) for _ in range(steps)]
    return prof.timeline, results


@bh.async_execution
def later(x: torch.Tensor) -> bh.Future[torch.Tensor]:
    return bh.rpc_async("worker2", inner, args=(x,)).then(lambda done: done.value() + 1)


async def slowly(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0.01)
    return x.mm(x)


def fail(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("as asked")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def profiles_open() -> int:
    return bh.get_debug_info()["num_profiles"]


def lose_a_worker(rank: int, folder: str) -> Any:
    """On worker 0: a worker that took part is killed before the profile ends. Returns the timeline."""
    begin(rank, folder)
    if rank:
        gate.wait(20)
    else:
        with bh.profile() as prof:
            step()
            with contextlib.suppress(bh.PeerLostError):
                bh.rpc_sync("worker2", die)
        with contextlib.suppress(bh.PeerLostError):  # it may be faster to end than to reply
            bh.rpc_sync("worker1", open_gate)
    bh.shutdown(graceful=False)
    return None if rank else prof.timeline


def outlive_a_profile(rank: int, folder: str) -> int:
    """Worker 0 opens a profile, lets two others join, one of them at second hand, and dies. Those return how many
    profiles are open once they have none any more.
    """
    begin(rank, folder)
    if rank == 0:
        with bh.profile():
            bh.rpc_sync("worker1", outer, args=(torch.ones(SIZE, SIZE),))
            for number in (1, 2):
                with open(f"{folder}/open{number}", "w") as file:
                    file.write(str(bh.rpc_sync(number, profiles_open)))
            for number in (1, 2):
                bh.rpc_sync(number, open_gate)
            die()
    gate.wait(20)
    until = time.monotonic() + 20
    while time.monotonic() < until and profiles_open():
        time.sleep(0.01)
    found = profiles_open()
    bh.shutdown(graceful=False)
    return found


def begin(rank: int, folder: str) -> None:
    """Become one of three workers, of which nobody ends the others if one dies."""
    bh.init(f"worker{rank}", rank=rank, world_size=3, options=bh.Options(init_method=f"file://{folder}/store"))


gate = threading.Event()
reached = threading.Event()


def open_gate() -> None:
    gate.set()


def wait_at_gate() -> None:
    gate.wait(20)


async def multiply_slowly(x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        await asyncio.sleep(0.001)
        x = x.mm(x)
    return x


@bh.async_execution
def multiply_later(x: torch.Tensor) -> bh.Future[torch.Tensor]:
    return bh.rpc_async("worker2", torch.neg, args=(x,)).then(lambda done: done.value().mm(x))


def multiply_at_gate(x: torch.Tensor) -> torch.Tensor:
    y = x.mm(x)
    reached.set()
    gate.wait(20)
    return y


def train_there() -> None:
    """A whole step on another worker."""
    x = torch.ones(SIZE, SIZE, requires_grad=True)
    with bh.context() as context:
        bh.backward(context, [bh.rpc_sync("worker2", inner, args=(x,)).mm(x).sum()])


def profile_here() -> list[str]:
    with torch.profiler.profile():
        torch.ones(2).sin()
    return []
