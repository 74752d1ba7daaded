"""A process that a handler forks is no worker: it answers nobody, and ends where the handler does."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import backhaul as bh

from . import remote_functions as remote
from .processes import DIED, run_processes
from .remote_functions import PATIENCE, PlainError
from .routes import Box, run_in_coroutine, run_in_then, run_later

WAYS: dict[str, tuple[Callable[[], Any], int]] = {
    "returns": (lambda: "the child's", 0),
    "raises": (lambda: remote.raise_it(PlainError("the child's", 1)), 1),
    "exits": (lambda: sys.exit(3), 3),
    "exits with a text": (lambda: sys.exit("the child's"), 1),
    "exits with nothing": (sys.exit, 0),
    "calls": (lambda: bh.rpc_sync("worker0", remote.whoami), 1),
    "calls at the end": (lambda: os._exit(17 * isinstance(attempt(), bh.BackhaulError)), 17),
}
"""How the child goes on, and the status that it ends with."""

ROUTES: dict[str, Callable[..., Any]] = {
    "rpc_sync": lambda function, *args: bh.rpc_sync("worker1", function, args=args),
    "rpc_async": lambda function, *args: bh.rpc_async("worker1", function, args=args).wait(),
    "to_here": lambda function, *args: bh.remote("worker1", function, args=args).to_here(),
    "proxy": lambda *call: bh.remote("worker1", Box).rpc_sync().run(*call),
    "async def": lambda *call: bh.rpc_sync("worker1", run_in_coroutine, args=call),
    "async_execution": lambda *call: bh.rpc_sync("worker1", run_later, args=call),
    "then": lambda *call: bh.rpc_sync("worker1", run_in_then, args=call),
    "task": lambda *call: bh.rpc_sync("worker1", run_in_task, args=call),
}


async def run_in_task(function: Callable[..., Any], *args: Any) -> Any:
    """In a task of asyncio's beside the handler."""
    return await asyncio.get_running_loop().create_task(run_in_coroutine(function, *args))


def attempt() -> Any:
    try:
        return bh.rpc_sync("worker0", remote.whoami)
    except BaseException as error:
        return error


def fork() -> int:
    """As ``os.fork``; a child that is left over ends itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are other threads
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(PATIENCE / 2))
    return child


def fork_and(way: str) -> Any:
    """Fork; the parent waits for the end of the child, and returns its status."""
    child = fork()
    if not child:
        return WAYS[way][0]()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_with_multiprocessing() -> Any:
    child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child.start()
    child.join()
    return child.exitcode


def step() -> list[float]:
    """A step whose gradients come back over the channels that the children had, too."""
    x = torch.arange(3.0, requires_grad=True)
    with bh.context() as ctx:
        ctx.backward(bh.rpc_sync("worker1", torch.pow, args=(x, 3)).sum())
        return bh.get_gradients(ctx)[x].tolist()


def call_all() -> Any:
    found: dict[str, Any] = {}
    if bh.get_worker_info().name == "worker0":
        waiting = bh.rpc_async("worker1", remote.wait_at, args=("end of the forks", "undisturbed"))
        for name, route in ROUTES.items():
            found[name] = {way: route(fork_and, way) for way in WAYS}, step()
        found["multiprocessing"] = bh.rpc_sync("worker1", fork_with_multiprocessing)
        bh.rpc_sync("worker1", remote.open_gate, args=("end of the forks",))
        found["waiting"] = waiting.wait()
    return found


OPTIONS = {
    "unix": bh.Options(transport="unix"),
    "tcp": bh.Options(transport="tcp"),
    "tls": bh.Options(transport="tcp", security=bh.Security(tls="auto")),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_child_answers_nobody(options: bh.Options) -> None:
    found, _ = bh.launch(call_all, 2, options=options, timeout=PATIENCE, start_method="forkserver")
    assert found.pop("multiprocessing") == 5
    assert found.pop("waiting") == "undisturbed"
    statuses = {way: status for way, (_, status) in WAYS.items()}
    expected = {route: (dict(statuses), [0.0, 3.0, 12.0]) for route in ROUTES}
    # Where the code around keeps what was raised, the handler ends well.
    expected["task"][0].update(dict.fromkeys(("raises", "calls"), 0))
    expected["async_execution"][0].update(dict.fromkeys(statuses.keys() - {"calls at the end"}, 0))
    assert found == expected


def leave_a_child() -> int:
    """Fork; the child goes on for long."""
    child = fork()
    if not child:
        while True:
            signal.pause()
    return child


def outlive(rank: int, port: int) -> Any:
    """A worker dies, but not a child of its. Nothing but the end of its channels tells of that."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    bh.init(
        f"worker{rank}",
        rank=rank,
        world_size=2,
        store=store,
        options=bh.Options(liveness=bh.Liveness(heartbeat_interval=0)),
    )
    if rank:
        store.get("never")
    pid, child = bh.rpc_sync("worker1", os.getpid), bh.rpc_sync("worker1", leave_a_child)
    try:
        waiting = bh.rpc_async("worker1", time.sleep, args=(10 * PATIENCE,), timeout=0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(bh.PeerLostError):
            waiting.wait(PATIENCE / 2)
    finally:
        os.kill(child, signal.SIGKILL)
    bh.shutdown()
    return "noticed"


def test_a_child_does_not_keep_the_channels_of_its_parent_open() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_processes(outlive, 2, store.port) == ["noticed", DIED]
    del store
