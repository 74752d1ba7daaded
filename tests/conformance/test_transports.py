"""Every transport that ships passes the conformance kit."""

from __future__ import annotations

import functools
import socket
import time

import pytest

from backhaul._transport.base import EndpointFactory
from backhaul._transport.inproc import InprocEndpoint
from backhaul._transport.sockets.certificates import issue
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.laned_channel import LanedChannel
from backhaul._transport.sockets.tls import Credentials
from backhaul._wire.frames import Frame
from backhaul.testing.transport_conformance import PATIENCE, Line, Pollers, TransportConformance, join
from backhaul.testing.transport_conformance.losses import LossConformance
from backhaul.testing.transport_conformance.sending import SendingConformance

SECRET = b"the conformance tests' own"


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def credentials() -> Credentials:
    return Credentials(issue(SECRET, "anyone"))


class TestInproc(TransportConformance):
    @pytest.fixture
    def endpoints(self) -> EndpointFactory:
        return InprocEndpoint

    def test_a_closed_endpoint_leaves_no_trace_at_the_one_it_tried_to_reach(self) -> None:
        here, there = InprocEndpoint(), InprocEndpoint()
        here.close()
        with pytest.raises(ConnectionError):
            here.connect(there.addresses[0], timeout=1)
        assert there._channels == []
        there.close()


class TestUnix(TransportConformance):
    can_hold = True
    overtakes = True

    @pytest.fixture
    def endpoints(self) -> EndpointFactory:
        return functools.partial(SocketEndpoint, secret=SECRET)


class TestUnixWithoutSharedMemory(TransportConformance):
    can_hold = True
    overtakes = True

    @pytest.fixture
    def endpoints(self) -> EndpointFactory:
        return functools.partial(SocketEndpoint, secret=SECRET, shm_bytes=0)


class TestUnixWithAllInSharedMemory(TransportConformance):
    """As far as there are slots: of each size the first buffers go inline."""

    can_hold = True

    @pytest.fixture
    def endpoints(self, monkeypatch: pytest.MonkeyPatch) -> EndpointFactory:
        monkeypatch.setattr("backhaul._transport.shm.host_memory.THRESHOLD", 1)
        return functools.partial(SocketEndpoint, secret=SECRET)


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that poll stop in the middle of nearly every frame."""
    monkeypatch.setattr("backhaul._transport.sockets.channel.TURN_BYTES", 5000)
    monkeypatch.setattr("backhaul._transport.sockets.socket_writer.TURN_BYTES", 5000)
    monkeypatch.setattr("backhaul._transport.sockets.lane_writer.TURN_BYTES", 5000)
    monkeypatch.setattr("backhaul._transport.sockets.lane_reader._TURN_BYTES", 5000)
    monkeypatch.setattr("backhaul._transport.sockets.lane_reader._LANE_BYTES", 3000)
    monkeypatch.setattr("backhaul._wire.frame_reader._MAX_READ_BYTES", 3000)
    monkeypatch.setattr("backhaul._transport.sockets.tls_socket._WRITE_BYTES", 5000)


class TestUnixInShortTurns(TransportConformance):
    can_hold = True
    overtakes = True

    @pytest.fixture
    def endpoints(self, short_turns: None) -> EndpointFactory:
        return functools.partial(SocketEndpoint, secret=SECRET, shm_bytes=0)


class TestTcp(TransportConformance):
    can_hold = True
    overtakes = True

    @pytest.fixture
    def endpoints(self) -> EndpointFactory:
        return functools.partial(SocketEndpoint, secret=SECRET, unix=False, bind="127.0.0.1")


class TestTls(TransportConformance):
    can_hold = True
    overtakes = True

    @pytest.fixture
    def endpoints(self, credentials: Credentials) -> EndpointFactory:
        return functools.partial(SocketEndpoint, secret=SECRET, unix=False, bind="127.0.0.1", credentials=credentials)


class TestTlsInShortTurns(TransportConformance):
    can_hold = True
    overtakes = True

    @pytest.fixture
    def endpoints(self, credentials: Credentials, short_turns: None) -> EndpointFactory:
        return functools.partial(SocketEndpoint, secret=SECRET, unix=False, bind="127.0.0.1", credentials=credentials)


@pytest.fixture
def large_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of 30 KB go over lanes. A thread waits for them for a moment only: in most tests nobody polls its end."""
    monkeypatch.setattr("backhaul._transport.sockets.lane_writer.LARGE_BYTES", 30_000)
    monkeypatch.setattr("backhaul._transport.sockets.lane_writer.OPENING_SECONDS", 0.02)


def line_with_lanes(make: EndpointFactory, count: int = 3) -> Line:
    line = join(make(), make())
    assert isinstance(line.near, LanedChannel)
    assert isinstance(line.far, LanedChannel)
    with Pollers(line.here) as here, Pollers(line.there) as there:
        line.near.send(Frame(3, 0, b"", [bytes(40_000)]))
        deadline = time.monotonic() + PATIENCE
        while not line.near.lanes == line.far.lanes == count:
            assert time.monotonic() < deadline
        line.far.send(Frame(3, 0, b"", [bytes(40_000)]))
        here.wait_for(frames=1)
        there.wait_for(frames=1)
    return line


class TestLanes(TransportConformance):
    """Large frames go over several connections."""

    can_hold = True
    overtakes = True

    @pytest.fixture
    def endpoints(self, large_frames: None) -> EndpointFactory:
        return functools.partial(SocketEndpoint, secret=SECRET, unix=False, bind="127.0.0.1", lanes=3)

    @pytest.fixture
    def line(self, make: EndpointFactory) -> Line:
        return line_with_lanes(make)


class TestLanesOfTlsInShortTurns(SendingConformance, LossConformance):
    can_hold = True
    overtakes = True

    @pytest.fixture
    def endpoints(self, large_frames: None, credentials: Credentials, short_turns: None) -> EndpointFactory:
        where = {"unix": False, "bind": "127.0.0.1"}
        return functools.partial(SocketEndpoint, secret=SECRET, credentials=credentials, lanes=3, **where)

    @pytest.fixture
    def line(self, make: EndpointFactory) -> Line:
        return line_with_lanes(make)


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")
class TestTcpOverIpv6(TransportConformance):
    can_hold = True
    overtakes = True

    @pytest.fixture
    def endpoints(self) -> EndpointFactory:
        return functools.partial(SocketEndpoint, secret=SECRET, unix=False, bind="::1")
