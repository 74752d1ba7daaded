"""The connections that an endpoint relays for others: it joins two authenticated legs and passes bytes on between them.
Knows no frames, and nothing of what the bytes mean: they are encrypted between the two ends.

The threads that poll the endpoint pass the bytes on, a bounded amount at a time; see ``channel`` [Note: turns].
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from backhaul._transport.sockets.epoll_set import EpollSet
from backhaul._transport.sockets.relay_legs import REFUSAL, Leg, RelayHandshake, new_leg
from backhaul._transport.sockets.relay_states import AwaitedLegs, RelayedFlows

log = logging.getLogger("backhaul")

_CHUNK_BYTES = 1 << 18  # read at once, and held at most for each direction
_TURN_BYTES = 1 << 20  # passed on before the thread polls again
_CHECK_SECONDS = 2.5  # between looks for legs that are late and directions that hang

# An end whose host or network is gone closes nothing. The other end notices, unless it is gone too: then this does.
_KEEPALIVE: tuple[tuple[int, int], ...] = (
    (socket.TCP_KEEPIDLE, 15),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
)


class RelayedConnection:
    """Two joined legs. Thread-safe.

    Args:
        descriptors: Where both legs are awaited.
        legs: The sockets.
        over: Called once when the connection has ended.
    """

    def __init__(
        self,
        descriptors: EpollSet,
        legs: tuple[socket.socket, socket.socket],
        over: Callable[[RelayedConnection], None],
    ) -> None:
        self._descriptors = descriptors
        self._legs = legs
        self._over = over
        self._flows = RelayedFlows(time.monotonic())
        self._lock = threading.Lock()  # guards all of these, and the sockets
        self._ended = False

    def start(self) -> None:
        """Pass bytes on from now on."""
        with self._lock:
            if not self._ended:
                for leg in self._legs:
                    _watch_host(leg)
                    self._descriptors.watch(leg.fileno(), self._pass_on, select.EPOLLIN)

    def _pass_on(self) -> None:
        """A leg can be read or written."""
        with self._lock:
            if self._ended:
                return
            try:
                left = _TURN_BYTES
                while left > 0 and (count := self._move()):
                    left -= count
            except OSError as error:
                log.debug("a relayed connection has ended: %s", error)
                self._end()
                return
            if self._flows.over:
                self._end()
                return
            for end, leg in enumerate(self._legs):
                reads, writes = self._flows.interest(end)
                mask = (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if writes else 0)
                if mask:  # else the system would report again and again that the leg is closed
                    self._descriptors.arm(leg.fileno(), mask)

    def _move(self) -> int:
        """Read and write once in each direction. Returns how many bytes moved; a direction that ends counts as one."""
        moved = 0
        for end, flow in enumerate(self._flows.flows):
            source, sink = self._legs[end], self._legs[1 - end]
            with contextlib.suppress(BlockingIOError):
                if flow.wants:
                    data = source.recv(_CHUNK_BYTES)
                    flow.take(data)
                    moved += len(data) or 1
            with contextlib.suppress(BlockingIOError):
                if flow.waiting:
                    count = sink.send(flow.waiting)
                    flow.give(count)
                    moved += count
            if flow.to_finish:
                flow.finished = True
                sink.shutdown(socket.SHUT_WR)
        if moved:
            self._flows.moved(time.monotonic())
        return moved

    def end_if_stale(self, now: float) -> None:
        """End the connection if one direction has ended and the other does nothing."""
        with self._lock:
            if not self._ended and self._flows.stale(now):
                self._end()

    def close(self) -> None:
        """End the connection. Both ends notice."""
        with self._lock:
            if not self._ended:
                self._end()

    def _end(self) -> None:
        self._ended = True
        for leg in self._legs:
            self._descriptors.forget(leg.fileno())
            leg.close()
        self._over(self)

    def sever(self) -> None:
        """Close this process's copies of the sockets after a fork, see ``Endpoint.sever``."""
        for leg in self._legs:
            if (fd := leg.detach()) >= 0:
                os.close(fd)


class _Arrived:
    """A leg that waits for the other leg of its connection."""

    def __init__(self, sock: socket.socket, handshake: RelayHandshake) -> None:
        self.sock = sock
        self.handshake = handshake


class Relay:
    """The connections that one endpoint relays for others. Thread-safe.

    Attributes:
        most: How many there may be, see ``Limits.relayed``.
    """

    def __init__(self, descriptors: EpollSet, most: int) -> None:
        self._descriptors = descriptors
        self._timer = descriptors.add_timer(self._check)
        self._lock = threading.Lock()  # guards the three below
        self._awaited = AwaitedLegs(most)
        self._arrived: dict[bytes, _Arrived] = {}
        self._carried: set[RelayedConnection] = set()
        self._closed = False
        self.most = most

    @property
    def carried(self) -> int:
        """How many connections are carried now."""
        return len(self._carried)

    def offer(self) -> tuple[Leg, Leg] | None:
        """Await the two legs of a connection. Returns what their ends need; None: too many connections are relayed."""
        legs = new_leg(), new_leg()
        with self._lock:
            if not self._awaited.offer(*legs, time.monotonic()):
                return None
        self._timer.start(_CHECK_SECONDS)
        return legs

    def withdraw(self, leg: Leg) -> None:
        """A connection does not come about: await its legs no more."""
        with self._lock:
            self._drop(self._awaited.withdraw(leg.number))

    def handshake(self) -> RelayHandshake:
        """The handshake of a new leg."""
        return RelayHandshake(self._key_of)

    def _key_of(self, number: bytes) -> bytes | None:
        with self._lock:
            return self._awaited.key_of(number)

    def take(self, sock: socket.socket, handshake: RelayHandshake) -> None:
        """A leg has proven itself. Its socket, which no epoll set has any more, belongs to this object from now on."""
        arrived = _Arrived(sock, handshake)
        with self._lock:
            other = None if self._closed else self._awaited.arrive(handshake.number)
            if other is None:
                _refuse(sock)
                return
            if not other:
                self._arrived[handshake.number] = arrived
                return
            first = self._arrived.pop(other)
            made = RelayedConnection(self._descriptors, (first.sock, sock), self._ended)
            self._carried.add(made)
        self._join(made, first, arrived)

    @staticmethod
    def _join(made: RelayedConnection, *legs: _Arrived) -> None:
        try:
            for leg in legs:
                leg.sock.sendall(leg.handshake.verdict)  # a few bytes into an empty buffer; does not block
        except OSError as error:
            log.debug("a relayed connection has ended before it began: %s", error)
            made.close()
            return
        made.start()

    def _ended(self, connection: RelayedConnection) -> None:
        with self._lock:
            if connection in self._carried:
                self._carried.discard(connection)
                self._awaited.end()

    def _check(self) -> None:
        """Give up legs that are late, and connections that hang."""
        now = time.monotonic()
        with self._lock:
            self._drop(self._awaited.expire(now))
            carried = list(self._carried)
            again = bool(carried or len(self._awaited)) and not self._closed
        for connection in carried:
            connection.end_if_stale(now)
        if again:
            self._timer.start(_CHECK_SECONDS)

    def _drop(self, numbers: list[bytes]) -> None:
        for number in numbers:
            _refuse(self._arrived.pop(number).sock)

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._closed = True
            arrived, self._arrived = list(self._arrived.values()), {}
            carried = list(self._carried)
        for leg in arrived:
            leg.sock.close()
        for connection in carried:
            connection.close()

    def sever(self) -> None:
        """Close this process's copies of the sockets after a fork, see ``Endpoint.sever``."""
        for leg in self._arrived.values():
            if (fd := leg.sock.detach()) >= 0:
                os.close(fd)
        for connection in self._carried:
            connection.sever()


def _watch_host(leg: socket.socket) -> None:
    """Let the system end a leg that is idle if the host of its end does not answer."""
    if leg.family != socket.AF_UNIX:
        leg.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            leg.setsockopt(socket.IPPROTO_TCP, option, value)


def _refuse(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(REFUSAL)
    sock.close()
