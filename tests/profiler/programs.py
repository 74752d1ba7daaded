"""The functions that workers run in the tests of profiles."""

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


def local_step(calls: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """The same loss and gradient in one process, with local autograd."""
    x = torch.full((SIZE, SIZE), 0.5, requires_grad=True)
    results = [inner((x * n).mm(weight())) * 2 for n in range(1, calls + 1)]
    loss = sum((each.sum() for each in results), torch.zeros(())) + inner(x).sum()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


def profile_steps(calls: int, steps: int) -> tuple[Any, Any] | None:
    """Profile steps after the first one. Only worker 0 does this."""
    if bh.get_worker_info().id:
        return None
    step(calls)
    with bh.profile() as prof:
        results = [step(calls) for _ in range(steps)]
    return prof.timeline, results


@bh.async_execution
def return_future(x: torch.Tensor) -> bh.Future[torch.Tensor]:
    return bh.rpc_async("worker2", inner, args=(x,)).then(lambda done: done.value() + 1)


async def coroutine(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0.01)
    return x.mm(x)


def fail(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("raised by the test")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def profiles_open() -> int:
    return bh.get_debug_info()["num_profiles"]


def lose_a_worker(rank: int, folder: str) -> Any:
    """Worker 0 profiles. A worker that takes part is killed before the profile ends. Returns the timeline."""
    start_worker(rank, folder)
    if rank:
        released.wait(20)
    else:
        with bh.profile() as prof:
            step()
            with contextlib.suppress(bh.PeerLostError):
                bh.rpc_sync("worker2", die)
        with contextlib.suppress(bh.PeerLostError):  # the worker may end before it has sent its reply
            bh.rpc_sync("worker1", release)
    bh.shutdown(graceful=False)
    return None if rank else prof.timeline


def outlive_a_profile(rank: int, folder: str) -> int:
    """Worker 0 opens a profile and dies. Before, worker 1 joins by a call of worker 0, and worker 2 by one of worker 1.

    Workers 1 and 2 wait until they have no open profile, and return how many they have.
    """
    start_worker(rank, folder)
    if rank == 0:
        with bh.profile():
            bh.rpc_sync("worker1", outer, args=(torch.ones(SIZE, SIZE),))
            for number in (1, 2):
                with open(f"{folder}/open{number}", "w") as file:
                    file.write(str(bh.rpc_sync(number, profiles_open)))
            for number in (1, 2):
                bh.rpc_sync(number, release)
            die()
    released.wait(20)
    until = time.monotonic() + 20
    while time.monotonic() < until and profiles_open():
        time.sleep(0.01)
    found = profiles_open()
    bh.shutdown(graceful=False)
    return found


def start_worker(rank: int, folder: str) -> None:
    """Start one of three workers. If one of them dies, the others continue."""
    bh.init(f"worker{rank}", rank=rank, world_size=3, options=bh.Options(init_method=f"file://{folder}/store"))


released = threading.Event()
multiplied = threading.Event()


def release() -> None:
    released.set()


def wait_until_released() -> None:
    released.wait(20)


async def multiply_in_coroutine(x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        await asyncio.sleep(0.001)
        x = x.mm(x)
    return x


@bh.async_execution
def multiply_in_callback(x: torch.Tensor) -> bh.Future[torch.Tensor]:
    return bh.rpc_async("worker2", torch.neg, args=(x,)).then(lambda done: done.value().mm(x))


def multiply_and_wait(x: torch.Tensor) -> torch.Tensor:
    y = x.mm(x)
    multiplied.set()
    released.wait(20)
    return y


def train() -> None:
    """A complete training step with a call to worker 2."""
    x = torch.ones(SIZE, SIZE, requires_grad=True)
    with bh.context() as context:
        bh.backward(context, [bh.rpc_sync("worker2", inner, args=(x,)).mm(x).sum()])


def use_torch_profiler() -> list[str]:
    with torch.profiler.profile():
        torch.ones(2).sin()
    return []
