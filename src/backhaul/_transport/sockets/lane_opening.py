"""Opening one lane, without waiting: the threads that poll go on with it. Knows no channels."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from backhaul._transport.sockets.connector import tune
from backhaul._transport.sockets.epoll_set import EpollSet
from backhaul._transport.sockets.handshake import ClientHandshake
from backhaul._transport.sockets.tls import Credentials
from backhaul._transport.sockets.tls_socket import TlsSocket
from backhaul.errors import AuthenticationError

log = logging.getLogger("backhaul")

_OPENING_MILLISECONDS = 10_000  # how long the peer may take for each answer
_TCP_USER_TIMEOUT = 18

Opened: TypeAlias = "Callable[[LaneOpening, socket.socket | TlsSocket | None], None]"


class LaneOpening:
    """A connection that is going to be a lane. Thread-safe.

    Args:
        where: The address, as the system gives it.
        ticket: What the lane proves to know.
        opened: Called once, with this object and the socket, or with None if the lane cannot be opened.
    """

    def __init__(self, where: Any, ticket: bytes, opened: Opened) -> None:
        self._where = where
        self._ticket = ticket
        self._opened = opened
        self._busy = threading.Lock()  # held by the thread that goes on with it
        self._over = True  # it has not begun, or is done
        self._step: Callable[[], int] = self._connect

    def start(self, descriptors: EpollSet, secret: bytes, credentials: Credentials | None) -> None:
        """Begin. The descriptors call ``go_on``."""
        self._descriptors = descriptors
        self._credentials = credentials
        self._handshake = ClientHandshake(secret, self._ticket)
        family = socket.AF_INET6 if len(self._where) > 2 else socket.AF_INET
        try:
            self._sock: socket.socket | TlsSocket = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # too many open descriptors, for example
            log.warning("cannot open a further connection to %s: %s", self._where[0], error)
            self._opened(self, None)
            return
        self._over = False
        self._fd = self._sock.fileno()
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, _OPENING_MILLISECONDS)
        self._sock.connect_ex(self._where)
        descriptors.watch(self._fd, self.go_on, select.EPOLLOUT)

    def go_on(self) -> None:
        """The descriptor is ready. See ``PendingConnection.read`` for why several threads may call this."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            awaited = 0 if self._over else self._continue()
        finally:
            self._busy.release()
        if awaited:
            self._descriptors.arm(self._fd, awaited)

    def _continue(self) -> int:
        """Returns what to wait for next; 0: nothing."""
        try:
            while not self._handshake.done:
                if awaited := self._step():
                    return awaited
        except BlockingIOError:
            return select.EPOLLIN
        except (OSError, AuthenticationError) as error:  # errors of SSL are OSErrors
            log.warning("cannot open a further connection to %s: %s", self._where[0], error)
            self._end(None)
            return 0
        self._sock.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, 0)
        self._end(self._sock)
        return 0

    def _connect(self) -> int:
        assert isinstance(self._sock, socket.socket)
        if number := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, os.strerror(number))
        tune(self._sock)
        if self._credentials is not None:
            self._sock = TlsSocket(self._credentials.begin(self._sock))
            self._step = self._agree
        else:
            self._greet()
        return 0

    def _agree(self) -> int:
        assert isinstance(self._sock, TlsSocket)
        try:
            self._sock.do_handshake()
        except ssl.SSLWantReadError:
            return select.EPOLLIN
        except ssl.SSLWantWriteError:
            return select.EPOLLOUT
        self._greet()
        return 0

    def _greet(self) -> None:
        self._sock.sendall(self._handshake.start())
        self._step = self._read

    def _read(self) -> int:
        data = self._sock.recv(self._handshake.wanted)
        if not data:
            raise OSError(errno.ECONNRESET, "closed during the handshake")
        if answer := self._handshake.feed(data):
            self._sock.sendall(answer)  # a few bytes into an empty buffer; does not block
        return 0

    def _end(self, sock: socket.socket | TlsSocket | None) -> None:
        self._over = True
        self._descriptors.forget(self._fd)
        if sock is None:
            self._sock.close()
        self._opened(self, sock)

    def close(self) -> None:
        """Give up: the channel is lost."""
        with self._busy:
            if not self._over:
                self._over = True
                self._descriptors.forget(self._fd)
                self._sock.close()

    def sever(self) -> None:
        """Close this process's copy of the socket after a fork, see ``Endpoint.sever``."""
        if not self._over and (fd := self._sock.detach()) >= 0:
            os.close(fd)
