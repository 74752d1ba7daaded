"""A relay and its two ends over real sockets: what passes, what is refused, and how it ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from backhaul._transport.sockets import addresses, relay, relay_states
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.relay_legs import Leg, LegHandshake, new_leg

SECONDS = 20.0
MOST = 2


class Polled:
    """An endpoint, and a thread that polls it until it is stopped."""

    def __init__(self) -> None:
        self.endpoint = SocketEndpoint(secret=b"none is needed", unix=False, bind="127.0.0.1", relayed=MOST)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _poll(self) -> None:
        while not self._over.is_set():
            self.endpoint.poll(None)

    def close(self) -> None:
        if not self._over.is_set():
            self._over.set()
            self.endpoint.wake()
            self._thread.join()
            self.endpoint.close()

    def offer(self) -> tuple[Leg, Leg]:
        legs = self.endpoint.relay.offer()
        assert legs is not None
        return legs


@pytest.fixture
def polled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Polled]:
    monkeypatch.setattr(relay, "_CHECK_SECONDS", 0.02)
    made = Polled()
    yield made
    made.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


class End:
    """One end: a plain socket that has done the handshake of its leg, up to the verdict."""

    def __init__(self, polled: Polled, leg: Leg) -> None:
        family, where = addresses.parse(polled.endpoint.addresses[0])
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.settimeout(SECONDS)
        self.sock.connect(where)
        self._handshake = LegHandshake(leg)
        self.sock.sendall(self._handshake.start())
        self.sock.sendall(self._handshake.feed(self._receive()))

    def _receive(self) -> bytes:
        data = self.sock.recv(self._handshake.wanted, socket.MSG_WAITALL)
        if not data:
            raise ConnectionResetError
        return data

    def begin(self) -> socket.socket:
        """Wait for the verdict. Raises ``ConnectionError`` if it is no."""
        while not self._handshake.done:
            self._handshake.feed(self._receive())
        return self.sock

    def __enter__(self) -> End:
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()


@pytest.fixture
def ends(polled: Polled) -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = polled.offer()
    with End(polled, one) as here, End(polled, other) as there:
        yield here.begin(), there.begin()
    until(lambda: polled.endpoint.relay.carried == 0, "the connection does not end")


def read_all(sock: socket.socket) -> bytes:
    found = bytearray()
    while data := sock.recv(1 << 16):
        found += data
    return bytes(found)


def test_bytes_pass_in_both_directions_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    sent = [bytes([end]) * (3 << 20) + b"end" for end in (1, 2)]
    found: dict[int, bytes] = {}

    def send(end: int) -> None:
        ends[end].sendall(sent[end])
        ends[end].shutdown(socket.SHUT_WR)

    def read(end: int) -> None:
        found[end] = read_all(ends[1 - end])

    threads = [threading.Thread(target=work, args=(end,)) for work in (send, read) for end in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == sent


def test_a_slow_reader_holds_the_sender_back(polled: Polled, ends: tuple[socket.socket, socket.socket]) -> None:
    """The relay holds a bounded number of bytes, whatever the sender would like to send."""
    here, there = ends
    here.setblocking(False)
    piece, sent = bytes(1 << 16), 0
    full = held = 0
    (connection,) = polled.endpoint.relay._carried
    deadline = time.monotonic() + SECONDS
    # The buffers of the system take what they can; then nothing moves any more, and the relay holds what it has read.
    while full < 50 or not held:
        assert time.monotonic() < deadline
        try:
            sent += here.send(piece)
            full = 0
        except BlockingIOError:
            full += 1
            time.sleep(0.002)
        held = sum(len(flow.waiting) for flow in connection._flows.flows)
    assert held <= relay._CHUNK_BYTES
    here.setblocking(True)
    here.shutdown(socket.SHUT_WR)
    assert len(read_all(there)) == sent


def test_half_closed_the_other_direction_goes_on(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    here.sendall(b"a question")
    here.shutdown(socket.SHUT_WR)
    assert read_all(there) == b"a question"
    there.sendall(b"an answer")
    there.close()
    assert read_all(here) == b"an answer"


def test_half_closed_and_idle_it_ends(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[socket.socket, socket.socket]
) -> None:
    monkeypatch.setattr(relay_states, "HALF_CLOSED_SECONDS", 0.1)
    here, there = ends
    here.shutdown(socket.SHUT_WR)
    assert there.recv(1) == b""
    assert here.recv(1) == b"", "the relay gives up"


def test_an_end_that_dies_ends_the_other(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    here.close()  # with a reset, as the system does for a killed process with unread bytes
    assert there.recv(1) == b""


def test_a_relay_that_ends_ends_both(polled: Polled, ends: tuple[socket.socket, socket.socket]) -> None:
    polled.close()
    for end in ends:
        assert end.recv(1) == b""


def test_wrong_keys_and_used_legs_are_refused(polled: Polled) -> None:
    one, other = polled.offer()
    for wrong in (Leg(one.number, other.key), Leg(one.number, new_leg().key), new_leg()):
        with End(polled, wrong) as end, pytest.raises(ConnectionError):
            end.begin()
    with End(polled, one) as here:
        until(lambda: polled.endpoint.relay._key_of(one.number) is None, "the leg does not come")
        with End(polled, one) as again, pytest.raises(ConnectionError):
            again.begin()
        with End(polled, other) as there:
            here.begin().sendall(b"!")
            assert there.begin().recv(1) == b"!", "the refused connections have harmed nobody"
            with End(polled, other) as again, pytest.raises(ConnectionError):
                again.begin()


def test_a_leg_whose_other_end_does_not_come(polled: Polled) -> None:
    one, other = polled.offer()
    awaited = polled.endpoint.relay._awaited._offers[one.number]
    assert awaited.until == pytest.approx(time.monotonic() + relay_states.AWAIT_SECONDS, abs=5.0)
    with End(polled, one) as here:
        until(lambda: awaited.arrived == one.number, "the leg does not come")
        awaited.until = 0.0  # the time is over
        with pytest.raises(ConnectionRefusedError):
            here.begin()
    with End(polled, other) as late, pytest.raises(ConnectionError):
        late.begin()


def test_no_more_connections_than_allowed(polled: Polled) -> None:
    legs = [polled.offer() for _ in range(MOST)]
    assert polled.endpoint.relay.offer() is None
    polled.endpoint.relay.withdraw(legs[0][1])
    one, other = polled.offer()
    with End(polled, one) as here, End(polled, other) as there:
        here.begin(), there.begin()
        assert polled.endpoint.relay.offer() is None, "carried ones count too"
    until(lambda: polled.endpoint.relay.offer() is not None, "nobody gets the place")
