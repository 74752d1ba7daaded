"""Opening connections to other workers, including the proof of both sides. Knows no frames."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time

from backhaul._runtime import interrupts
from backhaul._transport.base import ConnectTimeoutError
from backhaul._transport.sockets import addresses
from backhaul._transport.sockets.handshake import ClientHandshake
from backhaul._transport.sockets.interfaces import interfaces
from backhaul._transport.sockets.relay_legs import Leg, LegHandshake
from backhaul._transport.sockets.tls import Credentials
from backhaul._transport.sockets.tls_socket import explain
from backhaul.errors import AuthenticationError

# What is in the buffers of a connection delays the frames behind it. On one host larger buffers are not faster.
_UNIX_BUFFER_BYTES = 1 << 20
_LOCAL_BUFFER_BYTES = 640 << 10  # of TCP on one host
_LOCAL_WINDOW_BYTES = 1 << 20


def is_local(sock: socket.socket) -> bool:
    """Whether both ends of a connection are on this host."""
    with contextlib.suppress(OSError):
        there = sock.getpeername()
        return not isinstance(there, tuple) or bool(there[0] == sock.getsockname()[0])
    return False


def tune(sock: socket.socket) -> None:
    """Set the options of a new connection, on either side."""
    with contextlib.suppress(OSError):
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_local(sock):  # else TCP sizes its buffers itself, and better
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, _LOCAL_WINDOW_BYTES)


class Connector:
    """Opens connections. Thread-safe.

    Attributes:
        secret: What both sides must know.
        credentials: What this side proves itself with over TCP, which is then TLS.
        scope: The interface on which this worker listens, if that is known; link-local addresses are reached there.
    """

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.credentials: Credentials | None = None
        self.scope: str | None = None

    def connect(self, address: str, timeout: float) -> socket.socket:
        """Open a connection and authenticate both sides. The socket does not block; with TLS it is an SSL socket.

        Raises:
            ConnectionError: Nothing listens there; ``ConnectTimeoutError`` if there was no answer in time.
            AuthenticationError: One side does not know the other's secret, or does not accept its certificate.
        """
        plain = addresses.parse(address)[0] == socket.AF_UNIX
        return self._connect(address, timeout, None, None if plain else self.credentials)

    def connect_through(self, address: str, leg: Leg, credentials: Credentials, timeout: float) -> socket.socket:
        """As ``connect``, to the other end of a relayed connection. The relay listens at ``address``."""
        return self._connect(address, timeout, leg, credentials)

    def open_leg(self, address: str, leg: Leg, timeout: float) -> socket.socket:
        """Open a leg to the relay that listens at ``address``, and wait for the other end, which then begins. The
        socket does not block. Raises ``ConnectionError``.
        """
        deadline = time.monotonic() + timeout
        sock = self._open(address, timeout)
        try:
            _converse(sock, LegHandshake(leg), address, deadline)
            sock.setblocking(False)
            return sock
        except TimeoutError as error:
            sock.close()
            raise _timed_out(address, timeout) from error
        except BaseException:
            sock.close()
            raise

    def _connect(self, address: str, timeout: float, leg: Leg | None, credentials: Credentials | None) -> socket.socket:
        deadline = time.monotonic() + timeout
        sock = self._open(address, timeout)
        try:
            if leg is not None:
                _converse(sock, LegHandshake(leg), address, deadline)
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
            if credentials is not None:
                sock = credentials.connect(sock)
            _converse(sock, ClientHandshake(self.secret), address, deadline)
            sock.setblocking(False)
            return sock
        except TimeoutError as error:
            sock.close()
            raise _timed_out(address, timeout) from error
        except ssl.SSLError as error:  # the peer's verdict on our certificate may come as late as this
            sock.close()
            raise AuthenticationError(explain(error, credentials)) from error
        except BaseException:
            sock.close()
            raise

    def _open(self, address: str, timeout: float) -> socket.socket:
        family, where = addresses.parse(address)
        if isinstance(where, tuple) and addresses.is_link_local(where[0]):
            where = self._localize(where)
        sock = _open(family, where, timeout, address)
        tune(sock)
        return sock

    def _localize(self, where: tuple[str, int]) -> tuple[str, int]:
        there = [each.name for each in interfaces() if any(map(addresses.is_link_local, each.addresses))]
        try:
            return addresses.localize(where[0], self.scope, there), where[1]
        except ValueError as error:
            raise ConnectionError(str(error)) from error


def _converse(sock: socket.socket, handshake: ClientHandshake | LegHandshake, address: str, deadline: float) -> None:
    """Do a handshake. Raises what the handshake and the socket raise."""
    sock.sendall(handshake.start())
    while not handshake.done:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        data = _recv(sock, handshake.wanted)
        if not data:
            raise ConnectionResetError(f"{address} closed the connection during the handshake")
        sock.sendall(handshake.feed(data))


def _timed_out(address: str, timeout: float) -> ConnectTimeoutError:
    return ConnectTimeoutError(f"{address} did not answer within {timeout:g} s")


@interrupts.waits
def _open(family: socket.AddressFamily, where: addresses.SocketAddress, timeout: float, address: str) -> socket.socket:
    try:
        if isinstance(where, tuple):
            return socket.create_connection(where, timeout)
        sock = socket.socket(family, socket.SOCK_STREAM)
    except TimeoutError as error:
        raise _timed_out(address, timeout) from error
    except OSError as error:
        raise ConnectionError(f"cannot connect to {address}: {error}") from error
    try:
        # Not by settimeout: a non-blocking connect fails as soon as the listener's queue is full.
        limit = struct.pack("ll", int(timeout), max(int(timeout % 1 * 1e6), 1))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.connect(where)
        sock.settimeout(timeout)
        return sock
    except BlockingIOError as error:
        sock.close()
        raise _timed_out(address, timeout) from error
    except OSError as error:
        sock.close()
        raise ConnectionError(f"cannot connect to {address}: {error}") from error
    except BaseException:
        sock.close()
        raise


@interrupts.waits
def _recv(sock: socket.socket, size: int) -> bytes:
    return sock.recv(size)
