"""Channels over Unix sockets (one host) and TCP, with the secret handshake in front.

One epoll set per endpoint, every descriptor armed for one event at a time: the kernel hands each event to one of
the threads that wait in ``poll``, and the descriptor stays silent until it is armed again. Linux only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable

from backhaul._runtime import interrupts
from backhaul._transport.base import Channel, ConnectTimeoutError, Endpoint, Event
from backhaul._transport.shm.segments import default_ceiling
from backhaul._transport.shm.slots import Budget
from backhaul._transport.sockets import addresses
from backhaul._transport.sockets.channel import SocketChannel
from backhaul._transport.sockets.handshake import ClientHandshake
from backhaul._transport.sockets.pending_connections import PendingConnection, TlsPendingConnection
from backhaul._transport.sockets.tls import Credentials, TlsChannel, TlsSocket, explain
from backhaul._transport.timer import Timer
from backhaul._wire.frames import MAX_BUFFERS
from backhaul._wire.memory import Recycler
from backhaul.errors import AuthenticationError

log = logging.getLogger("backhaul")

_BRIEF = 0.002  # seconds; who polls for no longer than that has other things to do
_ONE_SHOT = select.EPOLLONESHOT
_SOCKET_BUFFER = 4 << 20
_SOON = 0.001  # seconds
_TRIM = 5.0  # seconds from one look at unused shared memory to the next
_HANDSHAKE_TIMEOUT = 10.0
_MAX_HANDSHAKES = 256
_BATCH = 16  # connections accepted at once, so that those which have come are heard before others crowd them out
_DEAF = 0.1  # seconds
_LONGEST = 1e6  # seconds; the system takes no longer waits than a few weeks


class SocketEndpoint(Endpoint):
    """A worker's listening sockets and its channels.

    Args:
        secret: What peers must know.
        unix: Whether to listen on an abstract Unix socket.
        bind: Host to listen on by TCP, or None.
        limit: Largest frame to accept.
        shm_bytes: How much shared memory to use at most; 0 for none. Default: see ``shm.default_ceiling``.
        credentials: What to prove itself with over TCP, which is then TLS.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        unix: bool = True,
        bind: str | None = None,
        limit: int = 8 << 30,
        shm_bytes: int | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.secret = secret
        self.credentials = credentials
        self.limit = limit
        self.buffers = MAX_BUFFERS
        self.shared = Budget(default_ceiling() if shm_bytes is None else shm_bytes)
        self.recycler = Recycler()
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Edge-triggered and never read: each write wakes one poller.
        self._epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        self._here = threading.local()  # .last: the channel that this thread read last
        self.wakes = 0
        self._timer = Timer()
        self._epoll.register(self._timer.fd, select.EPOLLIN | select.EPOLLET)
        self._trimmer = Timer()
        self._epoll.register(self._trimmer.fd, select.EPOLLIN | select.EPOLLET)
        self._trimming = False  # the trimmer is set
        self._patience = Timer()  # for newcomers
        self._epoll.register(self._patience.fd, select.EPOLLIN | select.EPOLLET)
        self._lock = threading.Lock()  # guards the tables below
        self._actions: dict[int, Callable[[], None]] = {}  # descriptor -> what to call when it is ready
        self._channels: dict[int, SocketChannel] = {}
        self._newcomers: dict[int, PendingConnection] = {}
        self._listeners: list[socket.socket] = []
        self.unflushed: set[SocketChannel] = set()
        self._closed = False
        self._deaf: list[socket.socket] = []  # listeners that could not accept, left alone for a while
        self._deaf_until = 0.0
        found: list[str] = []
        try:
            if unix:
                found.append(self._listen_unix())
            if bind is not None:
                found.append(self._listen_tcp(bind))
        except OSError:
            self.close()
            raise
        self.addresses = tuple(found)

    def _listen_unix(self) -> str:
        name = f"backhaul-{secrets.token_hex(12)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners.append(sock)
        sock.bind("\0" + name)
        self._start_listening(sock)
        return f"unix:@{name}"

    def _listen_tcp(self, host: str) -> str:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        self._listeners.append(sock)
        sock.bind(where)
        self._start_listening(sock)
        bound = sock.getsockname()
        # A wildcard is no address to be reached at; say the host's name instead.
        name = socket.gethostname() if bound[0] in ("0.0.0.0", "::") else bound[0]
        return addresses.show_tcp(name, bound[1])

    def _start_listening(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.listen(1024)
        self.watch(sock.fileno(), lambda: self._accept(sock), select.EPOLLIN)

    # Descriptors; see ``socket_channel.Watcher``.

    def watch(self, fd: int, action: Callable[[], None], mask: int) -> None:
        with self._lock:
            self._actions[fd] = action
        self._epoll.register(fd, mask | _ONE_SHOT)

    def arm(self, fd: int, mask: int) -> None:
        try:
            self._epoll.modify(fd, mask | _ONE_SHOT)
        except (OSError, ValueError):
            pass

    def forget(self, fd: int) -> None:
        with self._lock:
            self._actions.pop(fd, None)
            self._channels.pop(fd, None)
            self._newcomers.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def poll(self, timeout: float | None) -> Event | None:
        if self._deaf:
            self._listen_again()
            timeout = _DEAF if timeout is None else min(timeout, _DEAF)
        last: SocketChannel | None = getattr(self._here, "last", None)
        if last is not None and (timeout is None or timeout > _BRIEF):
            event = last.spin_read()
            if event is not None:
                return event
            self._here.last = None
        ready = self._epoll.poll(timeout if timeout is None else min(timeout, _LONGEST), 1)
        if not ready:
            return None
        channel = self._channels.get(ready[0][0])
        if channel is not None:
            self._here.last = channel
            return channel.read()
        action = self._actions.get(ready[0][0])
        if action is not None:
            action()
        if ready[0][0] == self._timer.fd:
            self.flush()
        elif ready[0][0] == self._trimmer.fd:
            self._trim()
        elif ready[0][0] == self._patience.fd:
            self._shed_newcomers()
        return None

    def flush(self) -> None:
        while self.unflushed:
            with contextlib.suppress(KeyError):  # another thread took it
                self.unflushed.pop().flush()

    def wake(self) -> None:
        self.wakes += 1  # for those who look without sleeping; a lost count does no harm
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def wake_soon(self) -> None:
        with self._lock:
            if not self._closed:
                self._timer.start(_SOON)

    def flush_soon(self, channel: SocketChannel) -> None:
        self.unflushed.add(channel)
        self.wake_soon()

    @property
    def shm_bytes(self) -> int:
        return self.shared.used

    def share_nothing(self) -> None:
        self.shared = Budget(0)

    def limit_buffers(self, most: int) -> None:
        self.buffers = most

    @property
    def shm_lent(self) -> int:
        with self._lock:
            channels = list(self._channels.values())
        return sum(channel.slots_lent for channel in channels)

    def trim_later(self) -> None:
        with self._lock:
            if not self._closed and not self._trimming:
                self._trimming = True
                self._trimmer.start(_TRIM)

    def _trim(self) -> None:
        with self._lock:
            self._trimming = False
            channels = list(self._channels.values())
        for channel in channels:
            channel.trim()

    # Connections.

    def _listen_again(self) -> None:
        with self._lock:
            due = self._deaf and time.monotonic() >= self._deaf_until
            listeners, self._deaf = (self._deaf, []) if due else ([], self._deaf)
        for listener in listeners:
            self.arm(listener.fileno(), select.EPOLLIN)

    def _accept(self, listener: socket.socket) -> None:
        try:
            for _ in range(_BATCH):
                sock, where = listener.accept()
                sock.setblocking(False)
                self._tune(sock)
                newcomer = self._meet(sock, _show_peer(sock, where))
                with self._lock:
                    self._newcomers[newcomer.fd] = newcomer
                self._shed_newcomers()
                self.watch(newcomer.fd, newcomer.read, select.EPOLLIN)
        except BlockingIOError:
            pass
        except OSError as error:  # too many descriptors, say: try again at the next connection
            log.warning("could not accept a connection: %s", error)
            with self._lock:
                self._deaf.append(listener)
                self._deaf_until = time.monotonic() + _DEAF
            return
        self.arm(listener.fileno(), select.EPOLLIN)

    def _meet(self, sock: socket.socket, peer: str) -> PendingConnection:
        if self.credentials is None or sock.family == socket.AF_UNIX:
            return PendingConnection(self, sock, peer)
        return TlsPendingConnection(self, sock, peer, self.credentials)

    def _shed_newcomers(self) -> None:
        """Make room: connections that will not prove themselves may not pile up. Look again when the next is late."""
        with self._lock:
            waiting = sorted(self._newcomers.values(), key=lambda newcomer: newcomer.since)
            if waiting and not self._closed:
                self._patience.start(_HANDSHAKE_TIMEOUT / 4)
        late = time.monotonic() - _HANDSHAKE_TIMEOUT
        for index, newcomer in enumerate(waiting):
            if newcomer.since < late or len(waiting) - index > _MAX_HANDSHAKES:
                with contextlib.suppress(OSError):
                    newcomer.sock.shutdown(socket.SHUT_RDWR)  # its own thread refuses and closes it

    def welcome(self, newcomer: PendingConnection) -> None:
        """A newcomer has proven itself: from here on its bytes are frames."""
        channel, fd = newcomer.channel(), newcomer.fd
        with self._lock:
            if self._newcomers.get(fd) is not newcomer:
                return  # this endpoint was closed
            self._newcomers.pop(fd)
            self._actions.pop(fd, None)
            self._channels[fd] = channel
        self.arm(fd, select.EPOLLIN)

    def drop(self, newcomer: PendingConnection) -> None:
        """Close a connection that did not prove itself."""
        with self._lock:
            if self._newcomers.get(newcomer.fd) is not newcomer:
                return  # another thread was faster, when this endpoint was closed
            del self._newcomers[newcomer.fd]
        self.forget(newcomer.fd)
        newcomer.sock.close()

    def connect(self, address: str, *, timeout: float) -> Channel:
        if self._closed:
            raise ConnectionAbortedError("this worker is closed")
        family, where = addresses.parse(address)
        deadline = time.monotonic() + timeout
        sock = self._open(family, where, timeout, address)
        try:
            self._tune(sock)
            if self.credentials is not None and family != socket.AF_UNIX:
                sock = self.credentials.connect(sock)
            handshake = ClientHandshake(self.secret)
            sock.sendall(handshake.start())
            while not handshake.done:
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
                data = _recv(sock, handshake.wanted)
                if not data:
                    raise ConnectionResetError(f"{address} closed the connection during the handshake")
                sock.sendall(handshake.feed(data))
            sock.setblocking(False)
            channel = (
                TlsChannel(self, TlsSocket(sock), address)
                if isinstance(sock, ssl.SSLSocket)
                else SocketChannel(self, sock, address)
            )
            with self._lock:
                if self._closed:
                    raise ConnectionAbortedError("this worker is closed")
                self._channels[sock.fileno()] = channel
            self._epoll.register(sock.fileno(), select.EPOLLIN | _ONE_SHOT)
            return channel
        except TimeoutError as error:
            sock.close()
            raise ConnectTimeoutError(f"{address} did not answer within {timeout:g} s") from error
        except ssl.SSLError as error:  # the verdict on our certificate may come as late as this
            sock.close()
            raise AuthenticationError(explain(error)) from error
        except BaseException:
            sock.close()
            raise

    @staticmethod
    @interrupts.waits
    def _open(
        family: socket.AddressFamily, where: addresses.SocketAddress, timeout: float, address: str
    ) -> socket.socket:
        try:
            if isinstance(where, tuple):
                return socket.create_connection(where, timeout)
            sock = socket.socket(family, socket.SOCK_STREAM)
        except TimeoutError as error:
            raise ConnectTimeoutError(f"{address} did not answer within {timeout:g} s") from error
        except OSError as error:
            raise ConnectionError(f"cannot connect to {address}: {error}") from error
        try:
            # Not by settimeout: a socket that does not block is refused as soon as the queue of the other is full.
            limit = struct.pack("ll", int(timeout), max(int(timeout % 1 * 1e6), 1))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            sock.connect(where)
            sock.settimeout(timeout)
            return sock
        except BlockingIOError as error:
            sock.close()
            raise ConnectTimeoutError(f"{address} did not answer within {timeout:g} s") from error
        except OSError as error:
            sock.close()
            raise ConnectionError(f"cannot connect to {address}: {error}") from error
        except BaseException:
            sock.close()
            raise

    @staticmethod
    def _tune(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if sock.family == socket.AF_UNIX:  # TCP sizes its buffers by itself, and better
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = list(self._channels.values())
            newcomers = list(self._newcomers.values())
        for sock in self._listeners:
            sock.close()
        for newcomer in newcomers:
            self.drop(newcomer)
        for channel in channels:
            channel.close()
            channel.free()
        self._epoll.close()
        with self._lock:
            os.close(self._wake_fd)
            self._timer.close()
            self._trimmer.close()
            self._patience.close()

    def sever(self) -> None:
        self._lock = threading.Lock()
        self._closed = True
        for sock in (*self._listeners, *(newcomer.sock for newcomer in self._newcomers.values())):
            if (fd := sock.detach()) >= 0:
                os.close(fd)
        for channel in self._channels.values():
            channel.sever()
        self._epoll.close()
        os.close(self._wake_fd)
        for timer in (self._timer, self._trimmer, self._patience):
            timer.close()


@interrupts.waits
def _recv(sock: socket.socket, size: int) -> bytes:
    return sock.recv(size)


def _show_peer(sock: socket.socket, where: object) -> str:
    if isinstance(where, tuple):
        return addresses.show_tcp(where[0], where[1])
    try:  # a Unix peer has no address; its process is what helps
        pid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
        return f"unix:pid {pid}"
    except OSError:
        return "unix"
