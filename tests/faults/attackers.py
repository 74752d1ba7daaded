"""What the fault tests attack, and how: endpoints and workers on real sockets, and raw connections to them."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

import backhaul as bh
from backhaul._rpc.node import Node
from backhaul._transport.base import Channel, Endpoint, Received
from backhaul._transport.sockets.addresses import parse
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.handshake import ClientHandshake
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import Hello, Kind, Payload, Request, pack
from backhaul.testing.transport_conformance import PATIENCE, Pollers

SECRET = b"what the attackers do not know"
LIMIT = 1 << 20


def wire(*frames: Frame) -> bytes:
    return b"".join(part for frame in frames for part in frame.parts())


# The attacker's side.


def dial(address: str) -> socket.socket:
    """A plain connection. It says nothing yet."""
    family, where = parse(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE)
    sock.connect(where)
    return sock


def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        assert more, f"closed after {len(data)} of {count} bytes"
        data += more
    return data


def read_to_end(sock: socket.socket) -> bytes:
    """All that still comes, until the other side has closed: only then has it dealt with what we sent."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(1 << 16):
            data += more
    return data


def say(sock: socket.socket, data: bytes) -> None:
    """Send; the other side may have had enough already."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(data)


def say_and_leave(sock: socket.socket, data: bytes) -> bytes:
    """Send all, say that no more follows, and wait until the other side has closed."""
    say(sock, data)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    return read_to_end(sock)


def prove(sock: socket.socket, secret: bytes = SECRET, *, wait: bool = True) -> None:
    """Shake hands as a client does, with the right secret or another."""
    handshake = ClientHandshake(secret)
    sock.sendall(handshake.start())
    sock.sendall(handshake.feed(read_exactly(sock, handshake.wanted)))
    if wait:
        handshake.feed(read_exactly(sock, handshake.wanted))


def own_name(sock: socket.socket) -> str:
    """What the other side should call this connection in its log."""
    if sock.family == socket.AF_UNIX:
        return f"unix:pid {os.getpid()}"
    host, port = sock.getsockname()[:2]
    return f"tcp:{host}:{port}"


def warnings_about(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and name in record.getMessage()
    ]


# The attacked.


@dataclass
class Target(abc.ABC):
    """Something that listens on a Unix socket and on TCP, and serves honest peers."""

    endpoint: Endpoint
    allocated: list[int]  # sizes of the blocks it asked for while attacked

    @property
    def addresses(self) -> tuple[str, str]:
        unix, tcp = self.endpoint.addresses
        return unix, tcp

    @abc.abstractmethod
    def opening(self) -> list[Frame]:
        """What a peer says first once it is authenticated."""

    @abc.abstractmethod
    def check_old(self) -> None:
        """Assert that a channel which was there before still works."""

    def check(self) -> None:
        """Assert that old and new honest peers are served; forget what they made it allocate."""
        self.check_old()
        for address in self.addresses:
            peer = SocketEndpoint(secret=SECRET)
            try:
                self.check_new(peer.connect(address, timeout=PATIENCE))
            finally:
                peer.close()
        self.allocated.clear()

    def check_new(self, channel: Channel) -> None:
        assert channel.acquire()
        for frame in (*self.opening(), request(7)):
            channel.send(frame)
        numbers: list[int] = []
        while 7 not in numbers:
            event = channel.receive(PATIENCE)
            assert isinstance(event, Received), event
            numbers += [frame.number for frame in event.frames if frame.kind == Kind.REPLY]
        channel.release()


def request(number: int) -> Frame:
    """A call of ``operator.add(1, 2)``."""
    return Frame(Kind.REQUEST, number, pack(Request("operator:add", Payload(plain=[1, 2]))))


@dataclass
class BareEndpoint(Target):
    """An endpoint that answers each request, with nothing on top that looks into frames."""

    pollers: Pollers
    honest: Channel

    def opening(self) -> list[Frame]:
        return []

    def check_old(self) -> None:
        Target.check_new(self, self.honest)


@dataclass
class WholeWorker(Target):
    """The second worker of a cluster. The first is honest and current."""

    workers: list[bh.Worker]
    channel: Channel

    def opening(self) -> list[Frame]:
        first, second = self.workers
        hello = Hello(second.name, second.incarnation, pack(first.part(Node).peers.own.record))
        return [Frame(Kind.HELLO, 0, pack(hello))]

    def check_old(self) -> None:
        a, b = torch.rand(50_000), torch.rand(50_000)
        assert torch.equal(bh.rpc_sync(self.workers[1].name, torch.add, args=(a, b)), a + b)
        assert channel_to_second(self.workers) is self.channel


def channel_to_second(workers: list[bh.Worker]) -> Channel:
    channel = workers[0].part(Node).peers.find(workers[1].name).channel
    assert channel is not None
    return channel


def note_allocations(endpoint: SocketEndpoint) -> list[int]:
    sizes: list[int] = []
    allocate = endpoint.recycler.allocate

    def noting(size: int) -> Buffer:
        sizes.append(size)
        return allocate(size)

    endpoint.recycler.allocate = noting  # type: ignore[method-assign]
    return sizes


make_endpoint = functools.partial(SocketEndpoint, secret=SECRET, unix=True, bind="127.0.0.1", limit=LIMIT)


@contextlib.contextmanager
def bare_endpoint() -> Iterator[BareEndpoint]:
    def reply(event: Received) -> None:
        for frame in event.frames:
            if frame.kind == Kind.REQUEST:
                with contextlib.suppress(ConnectionError):
                    event.channel.send(Frame(Kind.REPLY, frame.number), timeout=0)

    with contextlib.ExitStack() as stack:
        endpoint, friend = make_endpoint(), SocketEndpoint(secret=SECRET)
        stack.callback(endpoint.close)
        stack.callback(friend.close)
        pollers = stack.enter_context(Pollers(endpoint, act=reply))
        honest = friend.connect(endpoint.addresses[0], timeout=PATIENCE)
        target = BareEndpoint(endpoint, note_allocations(endpoint), pollers, honest)
        target.check()
        yield target


@contextlib.contextmanager
def whole_worker() -> Iterator[WholeWorker]:
    options = bh.Options(shutdown_timeout=10, timeout=PATIENCE)
    with bh.cluster(["honest", "attacked"], options=options, endpoints=make_endpoint) as workers:
        bh.rpc_sync("attacked", torch.zeros, args=(1,))
        endpoint = workers[1].endpoint
        assert isinstance(endpoint, SocketEndpoint)
        target = WholeWorker(endpoint, note_allocations(endpoint), workers, channel_to_second(workers))
        target.check()
        yield target
