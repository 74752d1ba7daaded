"""A worker in ``bh.serve`` waits for the end, and is a member like any other until then."""

from __future__ import annotations

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import torch

import backhaul as bh
from backhaul._rpc.cluster.peers import Peer
from backhaul._rpc.node import Node
from backhaul._transport.base import Channel
from backhaul._worker.worker import current_worker

from .hosts import wait_for
from .processes import run_processes

SECRET = "of the workers that serve"
SECONDS = 60.0

weight = torch.ones(2, requires_grad=True)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def options(**given: Any) -> bh.Options:
    return bh.Options(security=bh.Security(secret=SECRET), shutdown_timeout=SECONDS, **given)


def serves() -> bool:
    return current_worker().part(Node).peers.shutting_down


def weigh(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def records() -> int:
    count: int = bh.get_debug_info()["num_plain_records"]
    return count


def come_while_the_first_serves(rank: int, folder: pathlib.Path) -> Any:
    if rank == 2:
        bh.init("late", join=wait_for(folder / "address"), options=options())
        found = bh.rpc_sync("worker0", weigh, args=(torch.full((2,), 3.0),)).tolist()
        (folder / "called").touch()
        bh.shutdown()
        return found
    bh.init(rank=rank, world_size=2, options=options(init_method=f"file://{folder}/store"))
    if rank == 0:
        bh.serve()
        return None
    until(lambda: bh.rpc_sync("worker0", serves), "the first worker does not serve")
    (folder / "part").write_text(bh.get_address())
    (folder / "part").rename(folder / "address")
    wait_for(folder / "called")
    bh.serve()
    return None


def test_a_worker_joins_while_the_first_serves(tmp_path: pathlib.Path) -> None:
    assert run_processes(come_while_the_first_serves, 3, tmp_path) == [None, None, [3, 3]]


def has_lost(peer: Peer, channel: Channel) -> bool:
    return peer.channel is not channel


def lose_channels(rank: int, folder: pathlib.Path) -> Any:
    worker = bh.init(rank=rank, world_size=2, options=options(init_method=f"file://{folder}/store"))
    if rank == 1:
        bh.serve()
        return None
    until(lambda: bh.rpc_sync("worker1", serves), "the worker does not serve")
    for _ in range(10):
        y = bh.rpc_sync("worker1", weigh, args=(torch.ones(2, requires_grad=True),))
        peer = worker.part(Node).peers.find("worker1")
        channel = peer.channel
        assert channel is not None
        channel.abort("this test cuts it")
        del y  # what tells the worker to free its part of the graph goes nowhere
        until(functools.partial(has_lost, peer, channel), "the channel is not lost")
    until(lambda: bh.rpc_sync("worker1", records) == records() == 0, "graphs are kept for ever")
    bh.shutdown()
    return None


def test_a_worker_that_serves_frees_the_graphs_of_a_lost_channel(tmp_path: pathlib.Path) -> None:
    run_processes(lose_channels, 2, tmp_path)
