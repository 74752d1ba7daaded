"""Accepted connections that have not proven yet that they know the secret. Knows no frames."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Collection
from typing import Protocol, cast

from backhaul._transport.sockets.channel import SocketChannel
from backhaul._transport.sockets.epoll_set import EpollSet
from backhaul._transport.sockets.handshake import ServerHandshake
from backhaul._transport.sockets.laned_channel import LanedChannel, LanesOwner
from backhaul._transport.sockets.relay import Relay
from backhaul._transport.sockets.relay_legs import RelayHandshake, begins_leg
from backhaul._transport.sockets.tls import Credentials, begins_tls
from backhaul._transport.sockets.tls_channel import TlsChannel
from backhaul._transport.sockets.tls_socket import TlsSocket, explain
from backhaul.errors import AuthenticationError

log = logging.getLogger("backhaul")

_DISCARD_BYTES = 1 << 16  # to read at once from a peer that was refused
_MAX_DISCARDS = 64  # reads before a peer that was refused is dropped


class PendingOwner(Protocol):
    """What a pending connection needs of the object that has accepted it."""

    secret: bytes
    descriptors: EpollSet
    tickets: Collection[bytes]
    relay: Relay

    def admit(self, pending: PendingConnection) -> None:
        """The connection has proven itself."""

    def drop(self, pending: PendingConnection) -> None:
        """Close a connection that did not prove itself."""


class _RefusalError(Exception):
    """The peer cannot be admitted, and is told so."""

    def __init__(self, reason: str, last_word: bytes = b"") -> None:
        super().__init__(reason)
        self.last_word = last_word


class PendingConnection:
    """A connection without TLS.

    Attributes:
        since: When it was accepted.
        heard: Whether it has begun a handshake as it should.
    """

    def __init__(self, owner: PendingOwner, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.since = time.monotonic()
        self.heard = False
        self._owner = owner
        self._handshake: ServerHandshake | RelayHandshake = ServerHandshake(owner.secret, owner.tickets)
        self._begun = False  # the first byte has come, which tells what the peer wants
        self._ignored = 0  # how often bytes were discarded since the peer was refused; 0: it was not
        self._reading = threading.Lock()  # held by the thread that reads
        self._over = False  # it has become a channel, or was dropped

    @property
    def leg(self) -> RelayHandshake | None:
        """Set if this connection, which has proven itself, is not for this worker but a leg of a relayed one."""
        return self._handshake if isinstance(self._handshake, RelayHandshake) else None

    @property
    def ticket(self) -> bytes | None:
        """The ticket of a lane; None: the connection becomes a channel."""
        return self._handshake.ticket if isinstance(self._handshake, ServerHandshake) else None

    def make_channel(self, endpoint: LanesOwner) -> SocketChannel:
        """Make the channel that a connection becomes once it has proven itself."""
        if self.sock.family == socket.AF_UNIX:
            return SocketChannel(endpoint, self.sock, self.peer)
        return LanedChannel(endpoint, self.sock, self.peer, connects=False)

    def read(self) -> None:
        """The descriptor is readable. Several threads may call this at once: the event may belong to the connection
        that had the same descriptor before.
        """
        if not self._reading.acquire(blocking=False):
            return  # the thread that reads arms the descriptor again
        try:
            awaited = self._continue()
        except BaseException:
            self._drop()
            raise
        finally:
            self._reading.release()
        if awaited:  # not earlier: a thread that polls would find the connection being read
            self._owner.descriptors.arm(self.fd, awaited)

    def _continue(self) -> int:
        """Read what is there. Returns what to wait for next; 0: nothing, the connection is no longer pending."""
        if self._over:
            return 0
        if self._ignored:
            return self._ignore()
        try:
            if not self._begun:
                self._look()
            awaited = 0 if self.leg is not None else self._agree()
            if awaited:
                return awaited
            self._read()
        except BlockingIOError:
            pass
        except _RefusalError as error:
            return self._refuse(str(error), error.last_word)
        except AuthenticationError as error:
            return self._refuse(str(error), self._handshake.last_word)
        except OSError as error:
            reason = error.strerror or error
            log.warning("refused a connection from %s: %s", self.peer, reason, extra={"peer": self.peer})
            return self._drop()
        if not self._handshake.done:
            return select.EPOLLIN
        self._over = True
        self._owner.admit(self)
        return 0

    def _look(self) -> None:
        """Look at the first byte without reading it."""
        first = self.sock.recv(1, socket.MSG_PEEK)
        if not first:
            raise ConnectionResetError("closed before it was authenticated")
        self._begun = True
        if begins_leg(first):
            self._handshake = self._owner.relay.handshake()

    def _agree(self) -> int:
        """Returns what to wait for before the handshake of the secret can be read; 0: nothing."""
        return 0

    def _read(self) -> None:
        data = self.sock.recv(self._handshake.wanted)
        if not data:
            raise ConnectionResetError("closed before it was authenticated")
        answer = self._handshake.feed(data)
        if answer:
            self.heard = True
            self.sock.sendall(answer)  # a few bytes into an empty buffer; does not block

    def _refuse(self, reason: str, last_word: bytes) -> int:
        """Tell the peer why, and wait until the peer closes. If this side closed first while bytes of the peer arrive,
        the kernel would drop what was told. The connection stays pending, and is dropped when its time is over.
        """
        log.warning("refused a connection from %s: %s", self.peer, reason, extra={"peer": self.peer})
        self._ignored = 1
        try:
            if last_word:
                self.sock.sendall(last_word)
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return self._drop()
        return select.EPOLLIN

    def _ignore(self) -> int:
        self._ignored += 1
        try:
            over = not self._discard() or self._ignored > _MAX_DISCARDS
        except BlockingIOError:
            over = False
        except OSError:
            over = True
        return self._drop() if over else select.EPOLLIN

    def _drop(self) -> int:
        self._over = True
        self._owner.drop(self)
        return 0

    def _discard(self) -> int:
        return len(self.sock.recv(_DISCARD_BYTES))


class TlsPendingConnection(PendingConnection):
    """A connection that must speak TLS."""

    def __init__(self, owner: PendingOwner, sock: socket.socket, peer: str, credentials: Credentials) -> None:
        super().__init__(owner, sock, peer)
        self._credentials = credentials
        self._secure: TlsSocket | None = None
        self._agreed = False  # the handshake of TLS is done

    def make_channel(self, endpoint: LanesOwner) -> SocketChannel:
        assert self._secure is not None
        return TlsChannel(endpoint, self._secure, self.peer, connects=False)

    def _agree(self) -> int:
        if self._agreed:
            return 0
        if self._secure is None:
            first = self.sock.recv(2, socket.MSG_PEEK)
            if not first:
                raise ConnectionResetError("closed before it was authenticated")
            if not begins_tls(first):
                raise _RefusalError("it does not speak TLS", ServerHandshake.wants_tls)
            self.heard = True
            self._secure = TlsSocket(self._credentials.accept(self.sock))
            self.sock = cast("socket.socket", self._secure)
        try:
            self._secure.do_handshake()
        except ssl.SSLWantReadError:
            return select.EPOLLIN
        except ssl.SSLWantWriteError:
            return select.EPOLLOUT
        except ssl.SSLError as error:
            raise _RefusalError(explain(error, self._credentials)) from error
        self._agreed = True
        return 0

    def _discard(self) -> int:
        return super()._discard() if self._secure is None else self._secure.discard(_DISCARD_BYTES)

    def _read(self) -> None:
        super()._read()
        if self.leg is not None:
            return
        assert self._secure is not None
        while not self._handshake.done and self._secure.pending():  # the descriptor is not readable for these
            super()._read()


class RelayedPendingConnection(TlsPendingConnection):
    """A connection that another end has begun through a relay."""

    def make_channel(self, endpoint: LanesOwner) -> SocketChannel:
        assert self._secure is not None
        channel = TlsChannel(endpoint, self._secure, self.peer, connects=False, relayed=True)
        channel.relayed = True
        return channel
