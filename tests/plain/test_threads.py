"""Backward passes from any thread of any worker, several at once, and inside each other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import backhaul as bh
from backhaul._autograd.torch_engine import run as torch_run
from tests.autograd.worlds import DEADLINE_SECONDS, World, check_outside, check_processes, vector

LEAVES = {
    "a": vector(0.3, -1.2, 2.0),  # a and b are used by the driver
    "b": vector(1.5, 0.4, -0.7),
    "c": vector(-0.2, 0.9, 1.1),  # c by worker 1
    "d": vector(0.8, -0.5, 0.6),  # d by worker 2
}


def by(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.tanh(x) * world.leaves[name]


def through_both(world: World, x: torch.Tensor) -> torch.Tensor:
    return world.call(2, by, by(world, x, "c"), "d") * x


# Passes that a handler, a hook or a recomputation runs.


def train_there(world: World, x: torch.Tensor) -> float:
    """A handler that runs a pass of its own, back through its argument to the caller."""
    loss = (world.call(2, by, by(world, x, "c"), "d") * x).sum()
    loss.backward()
    return loss.item()


def driven_by_a_handler(world: World) -> None:
    for _ in range(2):
        world.saw("loss", torch.tensor(world.call(1, train_there, world.a * world.b)))


async def train_in_a_coroutine(world: World, x: torch.Tensor) -> float:
    y = await bh.rpc_async(2, by, args=(world, by(world, x, "c"), "d"))
    loss = (y * x).sum()
    loss.backward()
    return loss.item()


def driven_by_a_coroutine(world: World) -> None:
    function = train_in_a_coroutine if world.remote else train_there
    for _ in range(2):
        world.saw("loss", torch.tensor(world.call(1, function, world.a * world.b)))


def gradient_there(world: World, x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = world.call(2, by, torch.sin(x), "d")
    return torch.autograd.grad(y, x, seed)[0]


class CalledBackward(torch.autograd.Function):
    """Its backward computes the gradient by a pass over other workers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.world = world
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.world.call(1, gradient_there, x, grad), None


def pass_in_a_backward_function(world: World) -> None:
    y: torch.Tensor = CalledBackward.apply(world.a * world.b, world)  # type: ignore[no-untyped-call]
    world.backward((world.call(1, through_both, y) * y).sum())


def pass_in_a_hook(world: World) -> None:
    """A hook runs a pass over workers inside a pass over workers."""
    y = world.call(1, through_both, world.a)

    def run_another(grad: torch.Tensor) -> torch.Tensor:
        world.saw("hook", grad)
        with torch.enable_grad():
            x = world.b.detach().requires_grad_()
            (found,) = torch.autograd.grad(world.call(2, by, x, "d").sum(), x)
        return grad * found

    y.register_hook(run_another)
    world.backward((y * world.b).sum())


def inside(world: World, x: torch.Tensor) -> torch.Tensor:
    return world.call(1, through_both, torch.sin(x)) * x


def without_calls(world: World, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x).exp()


def serve_checkpointed(world: World, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    found: torch.Tensor = checkpoint(serve_inside, world, x, use_reentrant=reentrant)
    return found * world.c


def serve_inside(world: World, x: torch.Tensor) -> torch.Tensor:
    return world.call(2, by, torch.sin(x), "d") * world.c


def checkpoints(world: World, reentrant: bool) -> None:
    """Of a call, of what comes behind and before calls, and on a worker."""
    y = checkpoint(inside, world, world.a * 2, use_reentrant=reentrant)
    world.backward((y * world.b).sum())
    z = checkpoint(without_calls, world, world.call(1, through_both, world.a), use_reentrant=reentrant)
    world.backward(z.sum())
    u = world.call(1, through_both, checkpoint(without_calls, world, world.a * 1, use_reentrant=reentrant))
    world.backward(u.sum())
    v = world.call(1, serve_checkpointed, world.a * 1, reentrant)
    world.backward((v * v).sum())


def checkpoint_reentrant(world: World) -> None:
    checkpoints(world, True)


def checkpoint_not_reentrant(world: World) -> None:
    checkpoints(world, False)


PROGRAMS = {
    program.__name__: program
    for program in (
        driven_by_a_handler,
        driven_by_a_coroutine,
        pass_in_a_backward_function,
        pass_in_a_hook,
        checkpoint_reentrant,
        checkpoint_not_reentrant,
    )
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_one_process(name: str) -> None:
    check_outside(PROGRAMS[name], LEAVES)


def test_over_processes() -> None:
    check_processes(PROGRAMS, LEAVES)


# Threads.


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run ``work`` in several threads at once, all with the current worker."""
    worker, start = bh.current_worker(), threading.Barrier(count)

    def run(number: int) -> None:
        with worker:
            start.wait(DEADLINE_SECONDS)
            work(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count), timeout=DEADLINE_SECONDS))


THREADS, STEPS = 4, 6


def separate(world: World) -> None:
    """Each thread has graphs of its own, which lead to the same leaves."""

    def work(number: int) -> None:
        for step in range(STEPS):
            x = world.a.detach() * (number + 1) + step
            x.requires_grad_()
            (world.call(1, through_both, x * world.b)).sum().backward()
            world.saw(f"x of {number} in {step}", x.grad)

    each_thread(world, work)


def shared(world: World) -> None:
    """All threads go back through one graph."""
    y = world.call(1, through_both, world.a * world.b)

    def work(number: int) -> None:
        for _ in range(STEPS):
            (y * number).sum().backward(retain_graph=True)
            world.saw(f"grad in {number}", torch.autograd.grad(y.prod(), world.a, retain_graph=True)[0])

    each_thread(world, work)


def forward_in_threads(world: World) -> None:
    """The parts of one graph come from several threads; one pass goes back through them."""
    made: dict[int, torch.Tensor] = {}
    each_thread(world, lambda number: made.update({number: world.call(1, through_both, world.a * number)}))
    world.backward(sum(made.values()).prod())


def each_thread(world: World, work: Callable[[int], object]) -> None:
    if world.remote:
        in_threads(THREADS, work)
    else:
        for number in range(THREADS):
            work(number)


@pytest.mark.parametrize("program", [separate, shared, forward_in_threads])
def test_threads(program: Any) -> None:
    check_outside(program, LEAVES)


def test_threads_that_send_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in large groups: hooks on received tensors send gradients, but not those of a pass of another thread."""
    monkeypatch.setattr(torch_run, "SEND_EARLY_NODES", -1)
    check_outside(shared, LEAVES)


ON_SHARED_NODES = """
import sys, threading, torch
import backhaul as bh
from backhaul._autograd.torch_engine import run

run.SEND_EARLY_NODES = -1
sys.setswitchinterval(1e-5)  # threads take turns often

def twice(x):
    return (x * 2).sin() * x

def go_back(worker, start, y, x, expected):
    with worker:
        start.wait(60)
        for _ in range(4):
            (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            torch.testing.assert_close(grad, expected)

with bh.cluster(2) as (driver, _):
    for _ in range(30):
        x = torch.randn(3, requires_grad=True)
        (expected,) = torch.autograd.grad(sum(twice(x * (i + 1)) for i in range(20)).sum(), x)
        y = sum(bh.rpc_sync("worker1", twice, args=(x * (i + 1),)) for i in range(20))
        start = threading.Barrier(4)
        threads = [threading.Thread(target=go_back, args=(driver, start, y, x, expected)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
print("done")
"""


@pytest.mark.parametrize("native", ["1", "0"])
def test_hooks_are_not_added_to_nodes_that_other_threads_run(native: str) -> None:
    """torch reads the hooks of a node without a lock. A process of its own, since a mistake ends the process."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", ON_SHARED_NODES],
        env=os.environ | {"BACKHAUL_NATIVE": native},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_threads_over_processes() -> None:
    check_processes({"separate": separate, "shared": shared, "forward_in_threads": forward_in_threads}, LEAVES)
