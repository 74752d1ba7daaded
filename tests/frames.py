"""Counts the frames that the workers of this process send each other over sockets."""

from __future__ import annotations

import collections
import gc
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

import backhaul as bh
from backhaul._autograd.messages import AutogradKind
from backhaul._rpc.node import Node
from backhaul._rref.notices import RRefKind
from backhaul._transport.base import Event, Received
from backhaul._transport.sockets.channel import SocketChannel
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._wire.messages import Kind

DEADLINE_SECONDS = 20.0
TIMES = 20  # how often an operation is repeated
NAMES = {int(kind): kind.name for kind in (*Kind, *AutogradKind, *RRefKind)}


def sockets() -> SocketEndpoint:
    return SocketEndpoint(secret=b"x" * 32)


class Frames:
    """The frames that have arrived anywhere, without heartbeats."""

    def __init__(self, workers: Sequence[bh.Worker]) -> None:
        self._workers = workers
        self.arrived: collections.Counter[str] = collections.Counter()

    def of(self, operation: Callable[[], object]) -> dict[str, float]:
        """The frames of one operation. It runs a few times before: the first operation may set things up."""
        for _ in range(3):
            operation()
        self._wait_for_releases()
        self.arrived.clear()
        for _ in range(TIMES):
            operation()
        self._wait_for_releases()
        return {name: count / TIMES for name, count in self.arrived.items()}

    def _wait_for_releases(self) -> None:
        """Wait until the owners know of all references that were dropped, and no call or context is left."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (
            len({self._count("num_forks"), self._count("num_user_rrefs"), _count_handles()}) > 1
            or any(len(worker.part(Node).client.pending) for worker in self._workers)
            or self._count("num_autograd_contexts")
        ):
            assert time.monotonic() < deadline, "a reference was never released"
            time.sleep(0.002)

    def _count(self, counter: str) -> int:
        return sum(worker.counters[counter]() for worker in self._workers)


def _count_handles() -> int:
    """The references of this process to values of other workers."""
    return sum(isinstance(each, bh.RRef) and not each.is_owner() for each in gc.get_objects())


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[Frames]:
    """Three workers, of which the first is the current one, and their frames."""
    with bh.cluster(3, endpoints=sockets) as workers:
        counted, read = Frames(workers), SocketChannel._read

        def count(channel: SocketChannel) -> Event | None:
            event = read(channel)
            if isinstance(event, Received):
                kinds = [frame.kind for frame in event.frames]
                counted.arrived.update(NAMES[kind] for kind in kinds if kind != Kind.BEAT)
            return event

        monkeypatch.setattr(SocketChannel, "_read", count)
        yield counted
