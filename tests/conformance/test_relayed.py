"""Connections through a relay pass the conformance kit: they are channels like any other."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from backhaul._transport.base import Channel, EndpointFactory
from backhaul._transport.sockets.certificates import issue
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.tls import Credentials
from backhaul._wire.frames import Frame
from backhaul.testing.transport_conformance import TransportConformance
from backhaul.testing.transport_conformance.lines import Line, until_lost

SECRET = b"the conformance tests' own"


@functools.cache
def credentials() -> Credentials:
    return Credentials(issue(SECRET, "anyone"))


@pytest.fixture
def relay() -> Iterator[SocketEndpoint]:
    """An endpoint that a thread polls."""
    made = SocketEndpoint(secret=b"another secret, since a relay needs none")
    over = threading.Event()

    def poll() -> None:
        while not over.is_set():
            made.poll(None)

    thread = threading.Thread(target=poll)
    thread.start()
    yield made
    over.set()
    made.wake()
    thread.join()
    made.close()


class RelayedEndpoint(SocketEndpoint):
    """An endpoint that cannot be dialed. In place of members that tell it of a leg, a table of this process does."""

    numbers = itertools.count()

    def __init__(self, relay: SocketEndpoint, there: dict[str, RelayedEndpoint], credentials: Credentials) -> None:
        super().__init__(secret=SECRET, unix=False)
        self.addresses = (f"tcp:relayed:{next(self.numbers)}",)
        self._relay, self._there = relay, there
        self._answering = ThreadPoolExecutor(4)
        self.use_relays(credentials)
        there[self.addresses[0]] = self

    def connect(self, address: str, *, timeout: float) -> Channel:
        there = self._there.get(address)
        if there is None or self._closed:
            return super().connect(address, timeout=timeout)
        legs = self._relay.relay.offer()
        assert legs is not None
        where = self._relay.addresses[0]
        answer = there._answering.submit(functools.partial(there.accept_through, where, legs[1], timeout=timeout))
        try:
            return self.connect_through(where, legs[0], timeout=timeout)
        finally:
            answer.exception(timeout)

    def close(self) -> None:
        self._there.pop(self.addresses[0], None)
        self._answering.shutdown()
        super().close()
        deadline = time.monotonic() + 20
        while not self._there and self._relay.relay.carried:  # the relay frees its own descriptors a moment later
            assert time.monotonic() < deadline
            time.sleep(0.001)


class TestRelayed(TransportConformance):
    can_hold = True
    overtakes = True

    def test_closing_keeps_what_has_come(self, line: Line) -> None:
        """Some of what was sent is still on its way through the relay."""
        for number in range(3):
            line.near.send(Frame(3, number))
        deadline = time.monotonic() + 10
        while not line.far.unread:
            assert time.monotonic() < deadline
        line.far.close()
        found = [frame.number for frame in until_lost(line.there, line.far)]
        assert found
        assert found == [0, 1, 2][: len(found)]

    @pytest.fixture
    def endpoints(self, relay: SocketEndpoint) -> EndpointFactory:
        return functools.partial(RelayedEndpoint, relay, {}, credentials())
