"""Sockets at their limits: peers that do not read, and a process that has no descriptors left."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest

from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._wire.frames import Frame
from backhaul.testing.transport_conformance import Aside, Pollers, join, next_frames, send_all

from .attackers import SECRET, dial, prove, request, wire


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[SocketEndpoint, SocketEndpoint]]:
    unix = request.param == "unix"
    with contextlib.ExitStack() as stack:
        made = [SocketEndpoint(secret=SECRET, unix=unix, bind=None if unix else "127.0.0.1") for _ in range(2)]
        for endpoint in made:
            stack.callback(endpoint.close)
        yield made[0], made[1]


@pytest.mark.parametrize("size", [4000, 60_000, 1_000_000])
def test_a_sender_waits_for_a_peer_that_does_not_read(pair: tuple[SocketEndpoint, SocketEndpoint], size: int) -> None:
    """What a channel holds for its peer is bounded, also once it has stalled, and for frames of every size."""
    line = join(*pair)
    line.near.send(Frame(3, 0, b"", [bytes(16 << 20)]), timeout=0)  # more than a socket takes: it stalls
    count = (48 << 20) // size
    frame = Frame(3, 1, b"", [bytes(size)])
    sending = Aside(lambda: send_all(line.near, [frame] * count))
    with pytest.raises(AssertionError, match="blocks"):
        sending.result(patience=0.5)
    with Pollers(line.here), Pollers(line.there) as there:
        sending.result()
        there.wait_for(frames=1 + count)


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_running_out_of_descriptors_stops_nobody_and_is_said_once(
    pair: tuple[SocketEndpoint, SocketEndpoint], caplog: pytest.LogCaptureFixture
) -> None:
    line = join(*pair)
    with dial(line.there.addresses[0]) as newcomer:
        with no_descriptors_left():
            for _ in range(50):
                assert line.there.poll(0) is None
            line.near.send(Frame(3, 1))
            assert [frame.number for frame in next_frames(line.there, 1)] == [1]
        assert 1 <= len(caplog.records) <= 5, f"{len(caplog.records)} warnings in 50 polls: the poller spins"
        with Pollers(line.there) as there:
            prove(newcomer)
            newcomer.sendall(wire(request(2)))
            there.wait_for(frames=1)


def test_a_channel_that_stalls_without_descriptors_is_lost_and_nothing_else(
    pair: tuple[SocketEndpoint, SocketEndpoint],
) -> None:
    """To be told when its socket is writable takes a descriptor."""
    line, other = join(*pair), join(*pair)
    with no_descriptors_left(), contextlib.suppress(ConnectionError):
        line.near.send(Frame(3, 1, b"", [bytes(16 << 20)]), timeout=0)
    with Pollers(line.here) as here, Pollers(line.there) as there:
        other.near.send(Frame(3, 2))
        there.wait_for(frames=1)
        if not there.frames(line.far):
            here.wait_for(losses=1)
            there.wait_for(losses=1)
            assert here.losses() == [line.near]
            assert there.losses() == [line.far]
