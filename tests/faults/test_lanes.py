"""Lanes that break, strangers that want to be lanes, and peers that send pieces which no sender cuts."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import time
from collections.abc import Iterator

import pytest

from backhaul._transport.base import ChannelClosedError, EndpointFactory
from backhaul._transport.sockets.certificates import issue
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.handshake import ClientHandshake, ServerHandshake
from backhaul._transport.sockets.lane_agreement import ASK, END, TICKETS
from backhaul._transport.sockets.laned_channel import LanedChannel
from backhaul._transport.sockets.tls import Credentials
from backhaul._wire.frames import HEADER, HEADER_BYTES, Frame, control_frame
from backhaul._wire.lane_pieces import GRAIN_BYTES, PIECE_HEAD
from backhaul.testing.transport_conformance import PATIENCE, Aside, Line, Pollers, join, send_all

from .attackers import SECRET, dial, read_exactly, read_to_end, wire

LANES = 3
MIB = 1 << 20


@pytest.fixture(params=["plain", "TLS"])
def endpoints(request: pytest.FixtureRequest) -> EndpointFactory:
    credentials = Credentials(issue(SECRET, "anyone")) if request.param == "TLS" else None
    make = functools.partial(SocketEndpoint, secret=SECRET, unix=False, bind="127.0.0.1", lanes=LANES)
    return functools.partial(make, credentials=credentials)


@pytest.fixture
def line(endpoints: EndpointFactory) -> Iterator[Line]:
    with contextlib.closing(endpoints()) as here, contextlib.closing(endpoints()) as there:
        yield join(here, there)


def channels(line: Line) -> tuple[LanedChannel, LanedChannel]:
    assert isinstance(line.near, LanedChannel)
    assert isinstance(line.far, LanedChannel)
    return line.near, line.far


def large(number: int = 1, size: int = MIB) -> Frame:
    return Frame(3, number, b"", [bytes(size)])


def open_lanes(line: Line) -> None:
    near, far = channels(line)
    with Pollers(line.here) as here, Pollers(line.there):
        far.send(large())  # the side that has not opened the channel may ask for lanes too
        here.wait_for(frames=1)
        deadline = time.monotonic() + PATIENCE
        while not near.lanes == far.lanes == LANES:
            assert time.monotonic() < deadline


def test_a_lane_that_breaks_in_the_middle_of_a_frame_ends_the_channel(line: Line) -> None:
    open_lanes(line)
    near, _ = channels(line)
    before = near.bytes_sent
    sending = Aside(lambda: near.send(large(2, 64 * MIB)))
    while near.bytes_sent == before:  # nobody reads, so the thread waits in the middle of the frame
        pass
    near._connection.lanes[1].shutdown(socket.SHUT_RDWR)
    with Pollers(line.here) as here, Pollers(line.there) as there:
        here.wait_for(losses=1)
        there.wait_for(losses=1)
        with pytest.raises(ChannelClosedError):
            sending.result()
        assert there.frames() == []
    open_lanes(join(line.here, line.there))


def test_frames_that_were_sent_arrive_although_the_sender_has_closed(line: Line) -> None:
    open_lanes(line)
    sent = [large(1, 20 * MIB), Frame(3, 2, b"small"), large(3, 3 * MIB), Frame(3, 4, b"small")]
    send_all(line.near, sent, timeout=0)
    line.near.close()
    with Pollers(line.here), Pollers(line.there) as there:
        there.wait_for(frames=4, losses=1)
        assert [frame.number for frame in there.frames()] == [1, 2, 3, 4]


def test_channels_that_end_leave_no_ticket(endpoints: EndpointFactory) -> None:
    with contextlib.closing(endpoints()) as here, contextlib.closing(endpoints()) as there:
        assert isinstance(there, SocketEndpoint)
        line = join(here, there)
        open_lanes(line)
        assert there.tickets == {}  # all were used
        _, far = channels(line)
        there.tickets.update(dict.fromkeys(far._tickets, far))  # as if lanes had never come
        far.close()
        with Pollers(there) as pollers:
            pollers.wait_for(losses=1)
        assert there.tickets == {}


# Attackers that know the secret speak without TLS.


@pytest.fixture
def target() -> Iterator[SocketEndpoint]:
    with contextlib.closing(SocketEndpoint(secret=SECRET, unix=False, bind="127.0.0.1", lanes=LANES)) as endpoint:
        yield endpoint


def enter(endpoint: SocketEndpoint, ticket: bytes | None = None) -> socket.socket:
    """A connection that has proven itself."""
    sock, handshake = dial(endpoint.addresses[0]), ClientHandshake(SECRET, ticket)
    sock.sendall(handshake.start())
    sock.sendall(handshake.feed(read_exactly(sock, handshake.wanted)))
    handshake.feed(read_exactly(sock, handshake.wanted))
    return sock


def ask(sock: socket.socket, count: int = LANES) -> list[bytes]:
    """The tickets that a peer gets."""
    sock.sendall(control_frame(ASK, count))
    _, _, kind, _, _, length, number, _ = HEADER.unpack(read_exactly(sock, HEADER_BYTES))
    assert (kind, length) == (TICKETS, 32)
    seed = read_exactly(sock, length)
    return [seed + bytes([index]) for index in range(number)]


def test_only_an_unused_ticket_opens_a_lane(target: SocketEndpoint, caplog: pytest.LogCaptureFixture) -> None:
    with Pollers(target), enter(target) as first:
        one, two, three = ask(first, 64)  # no more than the other side wants
        enter(target, one).close()
        for ticket in (one, bytes(33), two[:-1], three + b"\0"):  # used, or never given
            with caplog.at_level(logging.WARNING), dial(target.addresses[0]) as sock:
                handshake = ClientHandshake(SECRET, ticket)
                sock.sendall(handshake.start())
                sock.sendall(handshake.feed(read_exactly(sock, handshake.wanted)))
                assert read_to_end(sock) == ServerHandshake.refusal
        enter(target, two).close()


HEAD = Frame(3, 1, b"", [bytes(3 * GRAIN_BYTES)]).head()


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (HEAD, PIECE_HEAD.pack(1, 7, GRAIN_BYTES)),
        (HEAD, PIECE_HEAD.pack(1, 0, 4 * GRAIN_BYTES)),
        (HEAD, PIECE_HEAD.pack(0, 0, GRAIN_BYTES)),
        (HEAD, PIECE_HEAD.pack(1, 0, GRAIN_BYTES) + bytes(GRAIN_BYTES) + PIECE_HEAD.pack(1, 0, GRAIN_BYTES)),
        (HEAD + control_frame(END, 2), b""),
        (HEAD + control_frame(ASK, 1), b""),
        (HEAD[:-8] + bytes(8), b""),  # its lengths contradict each other
        (HEADER.pack(b"BkHl", 1, 3, 8, 1, 0, 1, 1 << 62), b""),  # beyond limits.frame_bytes
        (HEADER.pack(b"BkHl", 1, 3, 8, 0, 0, 1, 0), b""),
    ],
)
def test_a_peer_that_breaks_the_rules_loses_its_channel(
    target: SocketEndpoint, caplog: pytest.LogCaptureFixture, head: bytes, piece: bytes
) -> None:
    with Pollers(target) as pollers, enter(target) as first:
        with enter(target, ask(first)[0]) as lane, caplog.at_level(logging.WARNING):
            first.sendall(head)
            if piece:
                lane.sendall(piece)
            pollers.wait_for(losses=1)
            read_to_end(first)
        assert pollers.frames() == []
        assert len([each for each in caplog.messages if "closing the channel" in each]) == 1
        peer = SocketEndpoint(secret=SECRET)
        with contextlib.closing(peer):
            peer.connect(target.addresses[0], timeout=PATIENCE).send(Frame(3, 5))
            pollers.wait_for(frames=1)


def test_a_piece_waits_for_the_head_of_its_frame(target: SocketEndpoint) -> None:
    """The first connection of a slow path may be later than the others."""
    data = bytes(range(256)) * 64
    with Pollers(target) as pollers, enter(target) as first, enter(target, ask(first)[0]) as lane:
        lane.sendall(PIECE_HEAD.pack(1, 0, len(data)) + data)
        first.sendall(wire(Frame(3, 8, b"small")))
        pollers.wait_for(frames=1)
        first.sendall(Frame(3, 9, b"", [data]).head() + control_frame(END, 1) + wire(Frame(3, 10, b"small")))
        pollers.wait_for(frames=3)
        assert [frame.number for frame in pollers.frames()] == [8, 9, 10]
        assert bytes(pollers.frames()[1].buffers[0]) == data


def test_what_follows_a_large_frame_waits_for_it(target: SocketEndpoint) -> None:
    data = bytes(range(256)) * 64
    with Pollers(target) as pollers, enter(target) as first, enter(target, ask(first)[0]) as lane:
        first.sendall(Frame(3, 2, b"", [data]).head() + wire(Frame(3, 1)) + control_frame(END, 1) + wire(Frame(3, 3)))
        pollers.wait_for(frames=1)
        lane.sendall(PIECE_HEAD.pack(1, 0, len(data)) + data)
        pollers.wait_for(frames=3)
        assert [frame.number for frame in pollers.frames()] == [1, 2, 3]


@pytest.mark.parametrize("gone", ["first", "lane"])
def test_a_peer_that_dies_in_the_middle_of_a_frame(target: SocketEndpoint, gone: str) -> None:
    with Pollers(target) as pollers, enter(target) as first, enter(target, ask(first)[0]) as lane:
        first.sendall(HEAD + control_frame(END, 1))
        lane.sendall(PIECE_HEAD.pack(1, 0, GRAIN_BYTES) + bytes(100))
        (first if gone == "first" else lane).shutdown(socket.SHUT_RDWR)
        if gone == "first":
            lane.close()
        pollers.wait_for(losses=1)
        assert pollers.frames() == []
