"""A process that is killed in the middle of a step, another that takes its place, and the step that goes on."""

from __future__ import annotations

import multiprocessing as mp
import os
import pathlib
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul.rpc.node import Node, describe, start_node
from backhaul.rpc.peers import WorkerRecord
from backhaul.testing.simulated import introduce
from backhaul.transport.sockets import SocketEndpoint

PATIENCE = 60.0
OPTIONS = bh.Options(timeout=PATIENCE)
SECRET = b"the tests' own"


def make_end(name: str, number: int) -> tuple[WorkerRecord, SocketEndpoint]:
    end = SocketEndpoint(secret=SECRET)
    return describe(name, number, end, OPTIONS, host="this one"), end


def be_a_worker(pipe: Connection, name: str, number: int) -> None:
    own, end = make_end(name, number)
    pipe.send(own)
    node = start_node(own, pipe.recv(), end, OPTIONS)
    while (record := pipe.recv()) is not None:
        introduce(node, record)
    node.shutdown(graceful=False, timeout=1.0)


class Group:
    """This process is worker 0; others are started, and started again when they die. Stands for membership."""

    def __init__(self, size: int) -> None:
        self._context = mp.get_context("forkserver")
        self._lock = threading.Lock()
        self._closing = False
        own, end = make_end("worker0", 0)
        self._records: dict[int, WorkerRecord] = {0: own}
        self._pipes: dict[int, Connection] = {}
        self._watchers: list[threading.Thread] = []
        processes = {number: self._begin(number) for number in range(1, size)}
        for pipe in self._pipes.values():
            pipe.send(list(self._records.values()))
        self.node: Node = start_node(own, list(self._records.values()), end, OPTIONS)
        for number, process in processes.items():
            self._watch(number, process)

    def _begin(self, number: int) -> Any:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=be_a_worker, args=(theirs, f"worker{number}", number))
        process.start()
        theirs.close()
        self._records[number] = ours.recv()
        self._pipes[number] = ours
        return process

    def _watch(self, number: int, process: Any) -> None:
        thread = threading.Thread(target=self._attend, args=(number, process))
        thread.start()
        self._watchers.append(thread)

    def _attend(self, number: int, process: Any) -> None:
        process.join()
        process.close()
        with self._lock:
            if self._closing:
                return
            self._pipes.pop(number).close()
            again = self._begin(number)
            self._pipes[number].send(list(self._records.values()))
            for other, pipe in self._pipes.items():
                if other != number:
                    pipe.send(self._records[number])
            introduce(self.node, self._records[number])
            self._watch(number, again)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            for pipe in self._pipes.values():
                pipe.send(None)
        self.node.shutdown(graceful=False, timeout=1.0)
        for thread in self._watchers:
            thread.join()
        for pipe in self._pipes.values():
            pipe.close()


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group(3)
    try:
        with made.node.worker:
            yield made
    finally:
        made.close()


weights: list[torch.Tensor] = []


def load() -> None:
    weights[:] = [torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)]


def die_once(marker: str) -> None:
    """Ends this process, the first time that anybody comes here."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def layer(x: torch.Tensor, stage: str, marker: str, onward: list[str]) -> torch.Tensor:
    if stage == "before":
        die_once(marker)
    y = torch.tanh(x * weights[0])
    if stage == "backward":
        y.register_hook(lambda _: die_once(marker))
    if onward:
        y = bh.rpc_sync(onward[0], layer, args=(y, "", marker, onward[1:])) * y
    if stage == "after":
        die_once(marker)
    return y


def own_gradient(ctx: int) -> torch.Tensor:
    return bh.get_gradients(ctx)[weights[0]]


def step(stage: str, marker: str) -> list[torch.Tensor]:
    for name in ("worker1", "worker2"):
        bh.rpc_sync(name, load)
    x = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)
    with bh.context(replay=bh.Replay(restore=load, timeout=PATIENCE)) as ctx:
        y = bh.rpc_sync("worker1", layer, args=(x, "", marker, ["worker2"]))
        y = bh.rpc_sync("worker2", layer, args=(y, stage, marker, ["worker1"]))
        y = bh.rpc_sync("worker1", layer, args=(y, "", marker, []))
        ctx.backward(y.sum(), deterministic=True, timeout=PATIENCE)
        with torch.no_grad():
            return [ctx.grads[x], *(bh.rpc_sync(name, own_gradient, args=(ctx.id,)) for name in ("worker1", "worker2"))]


@pytest.mark.parametrize("stage", ["before", "after", "backward"])
def test_a_process_that_is_killed(group: Group, tmp_path: pathlib.Path, stage: str) -> None:
    expected = step("", "")
    found = step(stage, str(tmp_path / "died"))
    assert (tmp_path / "died").exists()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(step("", "")) == 3
