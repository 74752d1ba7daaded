"""Accepted connections that have not proven themselves yet."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import time
from typing import Protocol, cast

from backhaul.errors import AuthenticationError
from backhaul.transport.handshake import ServerHandshake
from backhaul.transport.socket_channel import SocketChannel, Watcher
from backhaul.transport.tls import Credentials, TlsChannel, TlsSocket, begins_tls, explain

log = logging.getLogger("backhaul")

_DISCARDED = 1 << 16  # bytes at once that come of a peer that was refused
_PATIENCE = 64  # how often


class Host(Watcher, Protocol):
    """What a newcomer needs of its endpoint."""

    secret: bytes

    def welcome(self, newcomer: Newcomer) -> None:
        """It has proven itself."""

    def drop(self, newcomer: Newcomer) -> None:
        """Close a connection that did not."""


class Newcomer:
    """A connection without TLS. Read by one thread at a time."""

    def __init__(self, endpoint: Host, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.since = time.monotonic()
        self._endpoint = endpoint
        self._handshake = ServerHandshake(endpoint.secret)
        self._ignored = 0  # how often something came that was not looked at any more

    def channel(self) -> SocketChannel:
        """What it becomes."""
        return SocketChannel(self._endpoint, self.sock, self.peer)

    def read(self) -> None:
        """Something came."""
        if self._ignored:
            self._ignore()
            return
        try:
            if not self._is_ready():
                return
            self._read()
        except BlockingIOError:
            pass
        except AuthenticationError as error:
            self._refuse(str(error), self._handshake.last_word)
            return
        except OSError as error:
            log.warning("refused a connection from %s: %s", self.peer, error.strerror or error)
            self._endpoint.drop(self)
            return
        if self._handshake.done:
            self._endpoint.welcome(self)
        else:
            self._endpoint.arm(self.fd, select.EPOLLIN)

    def _is_ready(self) -> bool:
        """Whether bytes of the handshake may be read; if not, it is armed for what it waits for, or dropped."""
        return True

    def _read(self) -> None:
        data = self.sock.recv(self._handshake.wanted)
        if not data:
            raise ConnectionResetError("closed before it was authenticated")
        answer = self._handshake.feed(data)
        if answer:
            self.sock.sendall(answer)  # a few bytes into an empty buffer: does not block

    def _refuse(self, reason: str, last_word: bytes = b"") -> None:
        """Say why, and wait for the peer to close: closing first, with bytes of its to come, would take back our last
        word. Its time as a newcomer runs on.
        """
        log.warning("refused a connection from %s: %s", self.peer, reason)
        self._ignored = 1
        try:
            if last_word:
                self.sock.sendall(last_word)
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._endpoint.drop(self)
        else:
            self._endpoint.arm(self.fd, select.EPOLLIN)

    def _ignore(self) -> None:
        self._ignored += 1
        try:
            over = not self._discard() or self._ignored > _PATIENCE
        except BlockingIOError:
            over = False
        except OSError:
            over = True
        if over:
            self._endpoint.drop(self)
        else:
            self._endpoint.arm(self.fd, select.EPOLLIN)

    def _discard(self) -> int:
        return len(self.sock.recv(_DISCARDED))


class TlsNewcomer(Newcomer):
    """A connection that has to speak TLS."""

    def __init__(self, endpoint: Host, sock: socket.socket, peer: str, credentials: Credentials) -> None:
        super().__init__(endpoint, sock, peer)
        self._credentials = credentials
        self._secure: TlsSocket | None = None
        self._agreed = False  # the handshake of TLS is over

    def channel(self) -> SocketChannel:
        assert self._secure is not None
        return TlsChannel(self._endpoint, self._secure, self.peer)

    def _is_ready(self) -> bool:
        if self._agreed:
            return True
        if self._secure is None:
            first = self.sock.recv(2, socket.MSG_PEEK)
            if not first:
                raise ConnectionResetError("closed before it was authenticated")
            if not begins_tls(first):
                self._refuse("it does not speak TLS", ServerHandshake.wants_tls)
                return False
            self._secure = TlsSocket(self._credentials.accept(self.sock))
            self.sock = cast("socket.socket", self._secure)
        try:
            self._secure.do_handshake()
        except ssl.SSLWantReadError:
            self._endpoint.arm(self.fd, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._endpoint.arm(self.fd, select.EPOLLOUT)
        except ssl.SSLError as error:
            self._refuse(explain(error))
        else:
            self._agreed = True
        return self._agreed

    def _discard(self) -> int:
        return super()._discard() if self._secure is None else self._secure.discard(_DISCARDED)

    def _read(self) -> None:
        super()._read()
        assert self._secure is not None
        while not self._handshake.done and self._secure.pending():  # no descriptor tells of these
            super()._read()
