"""Groups of workers: which workers they have, and that what is done with all members gives what one process gives."""

from __future__ import annotations

import operator
import os
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._groups import group as group_module
from backhaul._groups.hosts import by_host, halves
from backhaul._rpc.node import Node, describe, shutdown_together, start_node
from backhaul._transport.sockets.endpoint import SocketEndpoint
from tools.fleet import Fleet

DEADLINE_SECONDS = 30.0


# Members.


def test_members_in_order() -> None:
    with bh.cluster(["a", "b10", "b2", "c"]):
        assert bh.group("b*").names == ["b10", "b2"]  # by id
        assert bh.group("c", 0, "b?", "c").names == ["c", "a", "b2"]
        assert bh.group(["c", bh.get_worker_info("a")], "b[0-9]*").names == ["c", "a", "b10", "b2"]
        everybody = bh.group("*")
        assert (len(everybody), everybody[1].name, everybody[2:].names) == (4, "b10", ["b2", "c"])
        assert everybody.others.names == ["b10", "b2", "c"]
        assert everybody == bh.group([0, 1, 2, 3])
        assert everybody != everybody[1:]
        assert bh.group().call(os.getpid) == []
        assert bh.rpc_sync("c", len, args=(everybody,)) == 4


def test_workers_that_there_are_not() -> None:
    with bh.cluster(["a", "b"]):
        with pytest.raises(bh.errors.UnknownWorkerError, match=r"no worker matches 'd\*'; there are: a, b"):
            bh.group("a", "d*")
        with pytest.raises(bh.errors.UnknownWorkerError, match="'d'"):
            bh.group("d")
        with pytest.raises(ValueError, match="no workers, and there are 2 values"):
            bh.group().map(abs, [1, 2])
        with pytest.raises(ValueError, match="a group of 2 workers needs as many values, not 3"):
            bh.group("*").scatter([1, 2, 3])


# Values and gradients. The numbers are small integers, so that no order of sums changes them.


class OneProcess:
    """What a group does, in one process."""

    def __init__(self, size: int) -> None:
        self.size = size

    def call(self, func: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        return [func(*args) for _ in range(self.size)]

    def map(self, func: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
        return [func(value) for value in values]

    def copies(self, value: Any) -> list[Any]:
        return [value] * self.size

    def parts(self, value: torch.Tensor) -> list[Any]:
        return list(torch.tensor_split(value, self.size))


class Members:
    """The same over workers."""

    def __init__(self, group: bh.WorkerGroup) -> None:
        self.group = group
        self.size = len(group)

    def call(self, func: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        return self.group.call(func, tuple(args))

    def map(self, func: Callable[..., Any], values: Sequence[Any]) -> list[Any]:
        return self.group.map(func, values)

    def copies(self, value: Any) -> list[Any]:
        return self.group.gather(self.group.broadcast(value))

    def parts(self, value: torch.Tensor) -> list[Any]:
        return self.group.gather(self.group.scatter(value))


def weigh(x: torch.Tensor, y: torch.Tensor, by: int) -> torch.Tensor:
    return x * y + by * x.sum()


def both(x: torch.Tensor) -> dict[str, Any]:
    return {"twice": [2 * x], "less": (x - 1, None)}


def shares(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """A sum in which each value counts differently."""
    return torch.stack([(number + 1) * value.sum() for number, value in enumerate(values)]).sum()


def program(seed: int, over: OneProcess | Members) -> list[Any]:
    """A random program. Returns its loss and the gradients of its leaves."""
    draw = random.Random(seed)
    x = torch.tensor([float(draw.randint(-3, 3)) for _ in range(5)], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([float(draw.randint(-3, 3)) for _ in range(5)], dtype=torch.float64, requires_grad=True)
    now = x
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(("call", "map", "nested", "copies", "parts"))
        if kind == "call":
            found = over.call(weigh, (now, y, draw.randint(1, 3)))
        elif kind == "map":
            found = over.map(torch.neg, [now + number for number in range(draw.randint(0, 2 * over.size))])
        elif kind == "nested":
            found = [each["twice"][0] + each["less"][0] for each in over.call(both, (now,))]
        elif kind == "copies":
            found = over.copies(now * y)
        else:
            found = over.parts(now)
        now = x + shares(found) if found else now + y
    loss = now.sum()
    loss.backward()
    return [loss.item(), x.grad, y.grad]


def expect_as_in_one_process(seeds: Sequence[int], group: bh.WorkerGroup) -> None:
    for seed in seeds:
        expected, found = program(seed, OneProcess(len(group))), program(seed, Members(group))
        assert repr(found) == repr(expected), f"seed {seed}"


def test_random_programs() -> None:
    with bh.cluster(4):
        expect_as_in_one_process(range(30), bh.group("worker[123]"))
        expect_as_in_one_process(range(30, 40), bh.group("*"))


def test_nothing_is_left() -> None:
    with bh.cluster(3) as workers:
        expect_as_in_one_process(range(5), bh.group("worker[12]"))
        for worker in workers:
            with worker:
                counters = bh.get_debug_info()
                assert counters["num_pending_calls"] == 0, counters


def test_a_value_that_is_gathered_twice() -> None:
    with bh.cluster(2):
        here, there = bh.RRef(1), bh.remote("worker1", abs, args=(-2,))
        assert bh.WorkerGroup.gather([here, there, here, there]) == [1, 2, 1, 2]


def test_results_as_they_come() -> None:
    gates = [threading.Event() for _ in range(3)]
    with bh.cluster(3):
        calls = bh.group("worker[12]").map_async(wait_for, [0, 1, 2])
        waits.update(enumerate(gates))
        found = list[tuple[int, int]]()
        for number in (2, 0, 1):
            gates[number].set()
            if not found:
                coming = calls.as_completed(DEADLINE_SECONDS)
            found.append(next(coming))
        assert found == [(2, -2), (0, 0), (1, -1)]
        assert next(coming, None) is None
        assert calls.wait() == [0, -1, -2]


waits: dict[int, threading.Event] = {}


def wait_for(number: int) -> int:
    while number not in waits:
        pass
    assert waits[number].wait(DEADLINE_SECONDS)
    return -number


def test_a_wait_that_is_too_long() -> None:
    waits[0] = threading.Event()
    with bh.cluster(2):
        calls = bh.group("*").map_async(wait_for, [0, 0])
        with pytest.raises(TimeoutError, match=r"2 futures were not done within 0\.05 s"):
            calls.wait(0.05)
        waits[0].set()
        assert calls.wait(DEADLINE_SECONDS) == [0, 0]


# Failures.


begun = threading.Barrier(3)
ended: queue.SimpleQueue[str] = queue.SimpleQueue()


def fail_on(name: str) -> None:
    here = bh.get_worker_info().name
    begun.wait(DEADLINE_SECONDS)
    if here == name:
        raise KeyError(name)
    while not bh.cancelled():
        pass
    ended.put(here)


def test_a_failed_call_cancels_the_others() -> None:
    with bh.cluster(4):
        with pytest.raises(KeyError) as caught:
            bh.group("worker[123]").call(fail_on, ("worker2",))
        (note,) = (note for note in caught.value.__notes__ if "together" in note)
        assert note == "in fail_on on 'worker2', called together with 2 others"
        assert sorted(ended.get(timeout=DEADLINE_SECONDS) for _ in range(2)) == ["worker1", "worker3"]


def test_an_argument_that_cannot_be_sent() -> None:
    with bh.cluster(3):
        with pytest.raises(bh.errors.SerializationError):
            bh.group("*").call(operator.is_, (threading.Lock(), 1))
        with pytest.raises(bh.errors.SerializationError):
            bh.group("*").map(id, [1, 2, threading.Lock()])
        assert bh.get_debug_info()["num_pending_calls"] == 0


def die_if(name: str) -> None:
    if bh.get_worker_info().name == name:
        os.kill(os.getpid(), signal.SIGKILL)
    while not bh.cancelled():
        pass


@pytest.mark.may_leak  # the fork server
def test_a_worker_that_is_killed() -> None:
    with Fleet(3) as fleet, fleet.worker:
        group = bh.group("worker*").others
        expect_as_in_one_process(range(3), group)
        with pytest.raises(bh.PeerLostError) as caught:
            group.call(die_if, ("worker2",))
        assert caught.value.worker == "worker2"
        assert "together with 2 others" in caught.value.__notes__[-1]
        with pytest.raises(bh.PeerLostError):
            group.broadcast(torch.ones(2))
        left = bh.group("worker*").others
        assert left.names == ["worker1", "worker3"]
        expect_as_in_one_process(range(3, 6), left)


# Several hosts.


def test_each_host_is_in_one_branch() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        hosts = [str(draw.randrange(6)) for _ in range(draw.randrange(12))]
        own, others = by_host(enumerate(hosts), "0")
        assert own == [number for number, host in enumerate(hosts) if host == "0"]
        assert sorted(sum(others, own)) == list(range(len(hosts)))
        assert all(len({hosts[number] for number in members}) == 1 for members in others)
        parts = halves(others)
        assert [host for part in parts for host in part] == others
        assert len(parts) == min(len(others), 2)
        assert not parts or len(parts[0]) - len(parts[-1]) <= 1


@contextmanager
def on_hosts(hosts: Sequence[str]) -> Iterator[list[Node]]:
    """Workers that believe to be on several hosts. They have TCP only."""
    options = bh.Options(timeout=20.0, transport="tcp", shutdown_timeout=5)
    ends = [SocketEndpoint(secret=b"of the tests of groups", unix=False, bind="127.0.0.1") for _ in hosts]
    records = [describe(f"worker{n}", n, ends[n], options, host=host) for n, host in enumerate(hosts)]
    nodes = [start_node(record, records, end, options) for record, end in zip(records, ends, strict=True)]
    try:
        with nodes[0].worker:
            yield nodes
    finally:
        shutdown_together(nodes, graceful=False, timeout=5)


def where(x: torch.Tensor) -> tuple[str, float]:
    return bh.get_worker_info().name, x.sum().item()


def test_a_large_tensor_goes_to_each_host_once() -> None:
    with on_hosts(["a", "b", "c", "b", "a", "d", "c", "b"]) as nodes:
        group = bh.group("*").others
        x = torch.ones(1 << 17)  # 512 KiB
        group.call(where, (x[:1],))
        before = [node.worker.counters["bytes_sent"]() for node in nodes]
        assert group.call(where, (x,)) == [(f"worker{number}", float(1 << 17)) for number in range(1, 8)]
        sent = [node.worker.counters["bytes_sent"]() - first for node, first in zip(nodes, before, strict=True)]
        # From worker 0: to worker 4 of its host, to b (which serves c too), and to d.
        assert [round(each / x.nbytes) for each in sent] == [3, 3, 1, 0, 0, 0, 0, 0]


def test_random_programs_over_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "TREE_BYTES", 0)
    with on_hosts(["a", "b", "c", "b", "d", "c"]):
        expect_as_in_one_process(range(20), bh.group("*"))
        with pytest.raises(KeyError) as caught:
            bh.group("*").call(fail_with, (torch.ones(1), "worker5"))
        assert any("'worker5'" in note for note in caught.value.__notes__)


def fail_with(x: torch.Tensor, name: str) -> None:
    if bh.get_worker_info().name == name:
        raise KeyError(name)


def test_a_name_that_is_exposed_goes_to_each_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "TREE_BYTES", 0)
    bh.expose(negative, name="tests.groups.negative")
    with on_hosts(["a", "b", "b"]):
        found: list[torch.Tensor] = bh.group("*").call("tests.groups.negative", (torch.ones(1),))
        assert found == [torch.tensor([-1.0])] * 3


def negative(x: torch.Tensor) -> torch.Tensor:
    return -x
