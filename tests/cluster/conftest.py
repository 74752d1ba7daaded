"""Clusters inside this process over every transport that ships."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed

import backhaul as bh
from backhaul._transport.base import Channel, EndpointFactory
from backhaul._transport.inproc import InprocChannel, InprocEndpoint
from backhaul._transport.sockets.endpoint import SocketChannel, SocketEndpoint
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Kind

from .hosts import hosts
from .remote_functions import open_gates

__all__ = ["hosts"]

TRANSPORTS: dict[str, EndpointFactory] = {
    "inproc": InprocEndpoint,
    "unix": functools.partial(SocketEndpoint, secret=b"the tests' own"),
    "tcp": functools.partial(SocketEndpoint, secret=b"the tests' own", unix=False, bind="127.0.0.1"),
}


@pytest.fixture(scope="session", autouse=True)
def first_store() -> None:
    """The first TCPStore of a process opens a pipe of libuv's that stays for good: before a test is watched."""
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=TRANSPORTS)
def endpoints(request: pytest.FixtureRequest) -> EndpointFactory:
    return TRANSPORTS[request.param]


@pytest.fixture
def workers(endpoints: EndpointFactory) -> Iterator[list[bh.Worker]]:
    """Three workers with default options; ``alice`` is current."""
    with bh.cluster(["alice", "bob", "carol"], endpoints=endpoints) as made:
        yield made


@pytest.fixture
def gate_name() -> Iterator[str]:
    """A gate of this test's own, and a prefix for more. They are open afterwards: no handler stays behind."""
    name = uuid.uuid4().hex
    yield name
    open_gates(name)


@pytest.fixture
def when_sent(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Kind], None]], None]:
    """Have a function called after each frame that any worker has sent to another."""

    def watch(tell: Callable[[Kind], None]) -> None:
        for channel in (InprocChannel, SocketChannel):
            send = channel.send

            def watched(self: Channel, frame: Frame, *, timeout: float | None = None, send: Any = send) -> None:
                send(self, frame, timeout=timeout)
                tell(Kind(frame.kind))

            monkeypatch.setattr(channel, "send", watched)

    return watch
