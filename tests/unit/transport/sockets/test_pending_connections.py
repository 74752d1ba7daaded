"""Pending connections that several threads read. Descriptors are used again, so a thread may get an event of a
connection that another thread has finished with.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from backhaul._transport.base import Received
from backhaul._transport.sockets import addresses
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.handshake import ClientHandshake
from backhaul._transport.sockets.pending_connections import PendingConnection
from backhaul._wire.frames import Frame

SECRET = b"ours"


@pytest.fixture
def endpoint() -> Iterator[SocketEndpoint]:
    made = SocketEndpoint(secret=SECRET)
    yield made
    made.close()


@pytest.fixture
def client(endpoint: SocketEndpoint) -> Iterator[socket.socket]:
    family, where = addresses.parse(endpoint.addresses[0])
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.settimeout(10)
        made.connect(where)
        yield made


def accept(endpoint: SocketEndpoint) -> PendingConnection:
    while not endpoint._acceptor.pending:
        endpoint.poll(1.0)
    (pending,) = endpoint._acceptor.pending.values()
    return pending


def shake_hands(endpoint: SocketEndpoint, pending: PendingConnection, client: socket.socket) -> None:
    handshake = ClientHandshake(SECRET)
    client.sendall(handshake.start())
    while not handshake.done:
        pending.read()
        client.sendall(handshake.feed(client.recv(handshake.wanted)))
    while endpoint._acceptor.pending:
        pending.read()


def test_a_late_event_takes_nothing_from_the_channel(
    endpoint: SocketEndpoint, client: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    pending = accept(endpoint)
    shake_hands(endpoint, pending, client)
    client.sendall(b"".join(Frame(3, 7, b"hello").parts()))
    pending.read()
    for _ in range(10):
        event = endpoint.poll(1.0)
        if event is not None:
            break
    assert isinstance(event, Received)
    assert [bytes(frame.body) for frame in event.frames] == [b"hello"]
    assert not caplog.records, "no connection was refused"


def test_a_late_event_closes_no_other_descriptor(
    endpoint: SocketEndpoint, client: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    pending = accept(endpoint)
    client.close()
    pending.read()
    assert not endpoint._acceptor.pending
    other = socket.socketpair()  # one of them has the descriptor now, as a rule
    with other[0], other[1]:
        pending.read()
        other[0].sendall(b"still there")
        assert other[1].recv(100) == b"still there"
    assert len(caplog.records) == 1, "refused once"


def test_one_thread_at_a_time_reads(
    endpoint: SocketEndpoint, client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = accept(endpoint)
    within, go_on = threading.Event(), threading.Event()
    feed = pending._handshake.feed
    fed: list[bytes] = []

    def slowly(data: bytes) -> bytes:
        fed.append(data)
        if not within.is_set():
            within.set()
            assert go_on.wait(10)
        return feed(data)

    monkeypatch.setattr(pending._handshake, "feed", slowly)
    handshake = ClientHandshake(SECRET)
    hello = handshake.start()
    client.sendall(hello[:3])
    reader = threading.Thread(target=pending.read)
    reader.start()
    assert within.wait(10)
    client.sendall(hello[3:])
    pending.read()
    assert fed == [hello[:3]], "the other thread reads"
    go_on.set()
    reader.join()
    endpoint.poll(1.0)  # it was armed again
    assert b"".join(fed) == hello
    client.sendall(handshake.feed(client.recv(handshake.wanted)))
    while endpoint._acceptor.pending:
        endpoint.poll(1.0)
    assert len(endpoint._channels) == 1
