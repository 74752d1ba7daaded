"""Listening sockets and the connections that they accept, until each has proven itself. Knows no frames."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection

from backhaul._transport.sockets import addresses
from backhaul._transport.sockets.connector import tune
from backhaul._transport.sockets.epoll_set import EpollSet
from backhaul._transport.sockets.pending_connections import (
    PendingConnection,
    RelayedPendingConnection,
    TlsPendingConnection,
)
from backhaul._transport.sockets.relay import Relay
from backhaul._transport.sockets.tcp_listener import TcpListener
from backhaul._transport.sockets.tls import Credentials

log = logging.getLogger("backhaul")

_HANDSHAKE_SECONDS = 10.0  # until a connection must have proven itself
_MAX_PENDING = 256  # of each kind, see ``_drop_late``
_BATCH = 16  # connections accepted at once; then those that were accepted are read, before others crowd them out
_PAUSE_SECONDS = 0.1  # before a listener that could not accept is tried again


class Acceptor:
    """Accepts connections, and hands those that have proven themselves on. Thread-safe.

    Attributes:
        pending: Connections that have not proven themselves yet, by descriptor.
        paused: Listeners that could not accept; they wait for ``resume``.

    Args:
        descriptors: The epoll set of the endpoint.
        secret: What peers must know.
        relay: What takes the legs of relayed connections.
        accepted: Called with each connection that has proven itself, after it has left the epoll set.
        tickets: Of the lanes that channels expect.
    """

    def __init__(
        self,
        descriptors: EpollSet,
        secret: bytes,
        relay: Relay,
        accepted: Callable[[PendingConnection], None],
        tickets: Collection[bytes] = (),
    ) -> None:
        self.secret = secret
        self.tickets = tickets
        self.relay = relay
        self.descriptors = descriptors
        self.pending: dict[int, PendingConnection] = {}
        self._credentials: Credentials | None = None
        self._accepted = accepted
        self._timer = descriptors.add_timer(self._drop_late)
        self._lock = threading.Lock()  # guards the tables
        self._listeners: list[socket.socket] = []
        self.paused: list[socket.socket] = []
        self._paused_until = 0.0

    def listen_unix(self) -> str:
        """Listen on an abstract Unix socket. Returns its address."""
        name = f"backhaul-{secrets.token_hex(12)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners.append(sock)
        sock.bind("\0" + name)
        sock.setblocking(False)
        sock.listen(1024)
        self.descriptors.watch(sock.fileno(), lambda: self._accept(sock), select.EPOLLIN)
        return f"unix:@{name}"

    def listen_tcp(self, listener: TcpListener, credentials: Credentials | None) -> str:
        """Accept connections at a TCP socket, which belongs to this object from now on. Returns its address."""
        self._credentials = credentials
        self._listeners.append(listener.sock)
        self.descriptors.watch(listener.sock.fileno(), lambda: self._accept(listener.sock), select.EPOLLIN)
        return listener.address

    def _accept(self, listener: socket.socket) -> None:
        try:
            for _ in range(_BATCH):
                sock, where = listener.accept()
                sock.setblocking(False)
                tune(sock)
                self._await_proof(self._make_pending(sock, _show_peer(sock, where)))
        except BlockingIOError:
            pass
        except OSError as error:  # too many open descriptors, for example
            log.warning("could not accept a connection, trying again in %g s: %s", _PAUSE_SECONDS, error)
            with self._lock:
                self.paused.append(listener)
                self._paused_until = time.monotonic() + _PAUSE_SECONDS
            return
        self.descriptors.arm(listener.fileno(), select.EPOLLIN)

    def take(self, sock: socket.socket, peer: str, credentials: Credentials) -> None:
        """Accept what the other end of a relayed connection begins: TLS, whatever this worker's ports take."""
        self._await_proof(RelayedPendingConnection(self, sock, peer, credentials))

    def _await_proof(self, pending: PendingConnection) -> None:
        with self._lock:
            self.pending[pending.fd] = pending
        self._drop_late()
        self.descriptors.watch(pending.fd, pending.read, select.EPOLLIN)

    def _make_pending(self, sock: socket.socket, peer: str) -> PendingConnection:
        if self._credentials is None or sock.family == socket.AF_UNIX:
            return PendingConnection(self, sock, peer)
        return TlsPendingConnection(self, sock, peer, self._credentials)

    def resume(self, timeout: float | None) -> float:
        """Let paused listeners accept again, if their pause is over. Returns how long a poll may take at most."""
        with self._lock:
            due = self.paused and time.monotonic() >= self._paused_until
            listeners, self.paused = (self.paused, []) if due else ([], self.paused)
        for listener in listeners:
            self.descriptors.arm(listener.fileno(), select.EPOLLIN)
        return _PAUSE_SECONDS if timeout is None else min(timeout, _PAUSE_SECONDS)

    def _drop_late(self) -> None:
        """Shut down connections that did not prove themselves in time, and the oldest if there are too many. Those that
        have said nothing yet are counted apart: they do not crowd out one whose handshake has begun, and the reverse.
        Check again when the next one may be late.
        """
        with self._lock:
            waiting = sorted(self.pending.values(), key=lambda pending: pending.since)
        if waiting:
            self._timer.start(_HANDSHAKE_SECONDS / 4)
        late = time.monotonic() - _HANDSHAKE_SECONDS
        for heard in (False, True):
            alike = [pending for pending in waiting if pending.heard == heard]
            for index, pending in enumerate(alike):
                if pending.since < late or len(alike) - index > _MAX_PENDING:
                    with contextlib.suppress(OSError):
                        pending.sock.shutdown(socket.SHUT_RDWR)  # the thread that reads it refuses and closes it

    def admit(self, pending: PendingConnection) -> None:
        """The connection has proven itself: from here on its bytes are frames."""
        with self._lock:
            if self.pending.get(pending.fd) is not pending:
                return  # the endpoint was closed
            del self.pending[pending.fd]
        self.descriptors.forget(pending.fd)
        if pending.leg is not None:
            self.relay.take(pending.sock, pending.leg)
        else:
            self._accepted(pending)

    def drop(self, pending: PendingConnection) -> None:
        """Close a connection that did not prove itself."""
        with self._lock:
            if self.pending.get(pending.fd) is not pending:
                return  # another thread has closed it already
            del self.pending[pending.fd]
        self.descriptors.forget(pending.fd)
        pending.sock.close()

    def close(self) -> None:
        """Stop listening, and close what is pending."""
        for sock in self._listeners:
            sock.close()
        with self._lock:
            waiting = list(self.pending.values())
        for pending in waiting:
            self.drop(pending)

    def sever(self) -> None:
        """Close this process's copies of the sockets after a fork, see ``Endpoint.sever``."""
        for sock in (*self._listeners, *(pending.sock for pending in self.pending.values())):
            if (fd := sock.detach()) >= 0:
                os.close(fd)


def _show_peer(sock: socket.socket, where: object) -> str:
    if isinstance(where, tuple):
        return addresses.show_tcp(where[0], where[1])
    try:  # a Unix peer has no address; its process id is what helps
        pid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
        return f"unix:pid {pid}"
    except OSError:
        return "unix"
