"""A call has no more time than what it is made for; over processes too."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._rpc.node import Node

from . import remote_functions as remote
from .remote_functions import PATIENCE, wait_at

LONG = 1000.0  # seconds that nothing takes


# What workers run.


def times_left(names: list[str]) -> list[float | None]:
    """What is left here, and on each worker further down; each calls the next with a timeout of its own."""
    left = bh.time_left()
    return [left, *(bh.rpc_sync(names[0], times_left, args=(names[1:],), timeout=LONG) if names else ())]


async def times_left_async(names: list[str]) -> list[float | None]:
    await asyncio.sleep(0)
    rest = await bh.rpc_async(names[0], times_left_async, args=(names[1:],), timeout=LONG) if names else ()
    return [bh.time_left(), *rest]


@bh.async_execution
def times_left_later(names: list[str]) -> bh.Future[list[float | None]]:
    first = bh.rpc_async(names[0], bh.time_left, timeout=LONG)
    return first.then(lambda done: [done.value(), bh.rpc_sync(names[1], bh.time_left, timeout=LONG), bh.time_left()])


def how_it_ends(kind: str, to: str) -> tuple[str, str | None]:
    """Wait for what does not come, in some way, as long as may be; the error that this ends with."""
    try:
        wait_for(kind, to)
    except TimeoutError as error:
        return type(error).__name__, getattr(error, "cut_by", None)
    return "none", None


def wait_for(kind: str, to: str) -> Any:
    if kind == "rpc_sync":
        return bh.rpc_sync(to, never, timeout=LONG)
    if kind == "rpc_async":
        return bh.rpc_async(to, never, timeout=0).wait()
    if kind == "remote":
        return bh.remote(to, never, timeout=LONG).to_here(timeout=LONG)
    if kind == "method":
        return bh.remote(to, Sleeper).rpc_sync(timeout=LONG).sleep()
    if kind == "future":
        return bh.Future().wait(timeout=LONG)
    if kind == "wait_all":
        return bh.wait_all([bh.Future()])
    if kind == "own value":
        return bh.remote(bh.get_worker_info(), never, timeout=LONG).to_here(timeout=LONG)
    return stuck_backward()


@bh.async_execution
def never() -> bh.Future[None]:
    return bh.Future()


class Sleeper:
    @bh.async_execution
    def sleep(self) -> bh.Future[None]:
        return bh.Future()


class Block(torch.autograd.Function):
    """Its backward does not end before the handler's time is over."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(1.5)
        return grad


def block(x: torch.Tensor) -> torch.Tensor:
    return Block.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def stuck_backward() -> None:
    with bh.context() as ctx:
        y = bh.rpc_sync("carol", block, args=(torch.ones(1, requires_grad=True),), timeout=LONG)
        bh.backward(ctx, [y.sum()], timeout=LONG)


WAYS = ["rpc_sync", "rpc_async", "remote", "method", "future", "wait_all", "own value", "backward"]


# The driver's part, over processes.


def drive() -> dict[str, Any]:
    if bh.get_worker_info().id != 0:
        return {}
    found: dict[str, Any] = {"unlimited": bh.rpc_sync("bob", times_left, args=([],), timeout=0)}
    found["sync"] = bh.rpc_sync("bob", times_left, args=(["carol", "alice"],), timeout=50)
    found["asyncio"] = bh.rpc_sync("bob", times_left_async, args=(["carol", "alice"],), timeout=50)
    found["callbacks"] = bh.rpc_sync("bob", times_left_later, args=(["carol", "alice"],), timeout=50)
    with bh.deadline(50):
        found["block"] = bh.rpc_sync("bob", times_left, args=(["carol"],), timeout=LONG)
        found["shorter"] = bh.rpc_sync("bob", times_left, args=(["carol"],), timeout=20)
    started = time.monotonic()
    try:
        bh.rpc_sync("bob", bh.rpc_sync, args=("carol", bh.rpc_sync), kwargs={"args": ("alice", never)}, timeout=0.5)
    except bh.CallTimeoutError as error:
        found["cut"] = error.cut_by, error.timeout
    found["took"] = time.monotonic() - started
    return found


def test_nested_calls_have_what_is_left_over_three_processes() -> None:
    names = ["alice", "bob", "carol"]
    found = bh.launch(drive, names, timeout=PATIENCE, start_method="forkserver")[0]
    assert found["unlimited"] == [None]
    for way, most in [("sync", 50), ("asyncio", 50), ("callbacks", 50), ("block", 50), ("shorter", 20)]:
        left = found[way]
        assert all(0 < each <= most for each in left), way
    assert found["sync"] == sorted(found["sync"], reverse=True)
    # The outermost call's own; or that of one inside, which had as long, and whose error was faster.
    assert found["cut"] == (None, 0.5) or found["cut"][0] == "rpc_sync"
    assert found["took"] < LONG / 10


# In one process: each way to wait.


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("kind", WAYS)
def test_every_wait_inside_of_a_handler_ends_with_its_callers_time(kind: str) -> None:
    name, cut_by = bh.rpc_sync("bob", inside_of_a_deadline, args=(kind, "carol"))
    assert name == ("BackwardTimeoutError" if kind == "backward" else "CallTimeoutError")
    assert cut_by == "bh.deadline"


def inside_of_a_deadline(kind: str, to: str) -> tuple[str, str | None]:
    with bh.deadline(0.2):
        return how_it_ends(kind, to)


@pytest.mark.usefixtures("workers")
def test_awaiting_ends_with_the_callers_time() -> None:
    assert bh.rpc_sync("bob", await_never, timeout=LONG) == "bh.deadline"


async def await_never() -> str | None:
    with bh.deadline(0.05):
        try:
            await bh.Future()
        except bh.CallTimeoutError as error:
            return error.cut_by
    return "it came"


@pytest.mark.usefixtures("workers")
def test_nothing_is_sent_when_the_time_is_over() -> None:
    with bh.deadline(0):
        with pytest.raises(bh.CallTimeoutError) as caught:
            bh.rpc_sync("bob", remote.identity, args=(1,))
        with pytest.raises(bh.CallTimeoutError):
            bh.rpc_async("bob", remote.identity, args=(1,)).wait()
        with bh.deadline(None):
            assert bh.rpc_sync("bob", remote.identity, args=(1,)) == 1
    assert (caught.value.cut_by, caught.value.worker) == ("bh.deadline", "bob")
    assert bh.rpc_sync("bob", remote.identity, args=(1,)) == 1


def test_a_request_whose_time_is_over_is_not_run(gate_name: str) -> None:
    with bh.cluster(["alice", "bob"], options=bh.Options(threads=1)) as (_, bob):
        ran: list[int] = []
        dispatcher = bob.part(Node).server
        late = bob.runtime.now() + LONG
        now = bob.runtime.now
        blocked = bh.rpc_async("bob", wait_at, args=(gate_name,))
        remote.gate(f"{gate_name} reached").wait(PATIENCE)
        begun = dispatcher.served
        try:
            # By the time that it comes to run, a lot of time has passed at its worker.
            times = iter([now()])
            bob.runtime.now = lambda: next(times, late)  # type: ignore[method-assign]
            future = bh.rpc_async("bob", ran.append, args=(1,), timeout=LONG / 2)
            with pytest.raises(bh.CallTimeoutError):
                future.wait(PATIENCE)
        finally:
            bob.runtime.now = now  # type: ignore[method-assign]
            remote.open_gate(gate_name)
        blocked.wait()
        assert dispatcher.dropped == 1
        assert dispatcher.served >= begun
        with bob:
            assert bh.get_debug_info()["num_calls_dropped"] == 1
