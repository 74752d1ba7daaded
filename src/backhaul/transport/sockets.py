"""Channels over Unix sockets (one host) and TCP, with the secret handshake in front.

One epoll set per endpoint, every descriptor armed for one event at a time: the kernel hands each event to one of
the threads that wait in ``poll``, and the descriptor stays silent until it is armed again. Linux only.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from backhaul.errors import AuthenticationError, ProtocolError
from backhaul.transport import addresses
from backhaul.transport.base import Channel, ChannelClosedError, Endpoint, Event, Lost, Received
from backhaul.transport.handshake import ClientHandshake, ServerHandshake
from backhaul.wire.frames import Frame, FrameReader
from backhaul.wire.memory import Buffer, Recycler

log = logging.getLogger("backhaul")

_ONE_SHOT = select.EPOLLONESHOT
_SOCKET_BUFFER = 4 << 20
_COALESCE = 1 << 16  # a frame up to this size may be copied so as not to wait for another writer
_MAX_QUEUED = 16 << 20  # bytes of copied frames a channel holds before senders wait
_MAX_PARTS = 512  # pieces per system call, well under the kernel's limit
_HANDSHAKE_TIMEOUT = 10.0
_MAX_HANDSHAKES = 256


class SocketChannel(Channel):
    """A connected, authenticated socket."""

    def __init__(self, endpoint: SocketEndpoint, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._endpoint = endpoint
        self._sock = sock
        self._fd = sock.fileno()
        self._reader = FrameReader(endpoint.limit, endpoint.recycler)
        self._held = threading.Lock()  # held by whoever reads, until it resumes
        self._poller = select.poll()  # for receive; used by the holder
        self._poller.register(self._fd, select.POLLIN)
        self._ended: str | None = None  # why the channel is over; set once
        self._writing = threading.Lock()  # held by whoever writes to the socket; guards _stalled
        self._queue: collections.deque[bytes] = collections.deque()
        self._queued = 0  # bytes in the queue
        self._counting = threading.Lock()  # guards the two above, held for no longer than they change
        self._stalled = False  # the queue waits for the socket; a poller goes on with it
        self._out_fd = -1  # a second descriptor of the socket, to be told when it is writable

    # Reading: by the one thread that holds the channel.

    def read(self) -> Event | None:
        """A poller was told that the channel is readable: take it, and return its frames or that it is lost."""
        if not self._held.acquire(blocking=False):
            return None  # somebody holds it, and arms it again
        event = self._read()
        if event is None:
            self.resume()
        return event

    def hold(self) -> bool:
        if not self._held.acquire(blocking=False):
            return False
        with contextlib.suppress(OSError, ValueError):
            self._endpoint.arm(self._fd, 0)
        return True

    def receive(self, timeout: float | None) -> Event | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000
            if not self._poller.poll(left):
                return None
            event = self._read()
            if event is not None:
                return event

    def _read(self) -> Event | None:
        """Frames, or that the channel is lost, or None if there is nothing whole to be had now."""
        reader = self._reader
        try:
            while True:
                count = self._sock.recv_into(reader.writable())
                if not count:
                    midway = " in the middle of a frame" if reader.midway else ""
                    return self._lose(f"closed by the peer{midway}")
                frames = reader.fed(count)
                if frames:
                    return Received(self, frames)
        except BlockingIOError:
            return None
        except ProtocolError as error:
            log.warning("closing the channel to %s: %s", self.peer, error)
            return self._lose(f"malformed input: {error}")
        except OSError as error:
            return self._lose(os.strerror(error.errno or 0))

    def resume(self) -> None:
        # In this order: armed first, a poller could find the channel still held and drop its event.
        self._held.release()
        with contextlib.suppress(OSError, ValueError):  # the endpoint has been closed
            self._endpoint.arm(self._fd, select.EPOLLIN)

    def _lose(self, reason: str) -> Lost:
        self._end(reason)
        with self._writing:  # a writer that waits has been woken by the shutdown in _end
            self._endpoint.forget(self._fd)
            if self._out_fd >= 0:
                self._endpoint.forget(self._out_fd)
                os.close(self._out_fd)
            self._sock.close()
        return Lost(self, self._ended or reason)

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader, which reports the loss

    def close(self) -> None:
        if self._ended is None:
            self._ended = "closed by this side"
        self._end(self._ended)

    # Writing: one thread at a time writes; what others queue meanwhile goes out before it lets go.

    def send(self, frame: Frame, *, timeout: float | None = None) -> None:
        if self._ended is not None:
            raise ChannelClosedError(f"the channel to {self.peer} is closed: {self._ended}")
        deadline = None if timeout is None else time.monotonic() + timeout
        parts = frame.parts()
        small = len(parts) <= _MAX_PARTS and frame.nbytes <= _COALESCE
        if self._writing.acquire(blocking=False):
            pass
        elif small and self._queued < _MAX_QUEUED:
            self._enqueue(b"".join(parts))
            self._flush_queue()
            return
        elif not self._writing.acquire(timeout=-1 if timeout is None else timeout):
            self._enqueue(b"".join(parts))
            self._flush_queue()
            return
        try:
            if self._stalled or self._queue:
                # Others are in front: get behind them, then help if the socket takes it.
                if not (self._stalled and small):
                    self._write_queue(deadline)
                if self._stalled:
                    self._enqueue(b"".join(parts))
                    return
            self._write(parts, deadline)
        except OSError as error:
            self._end(os.strerror(error.errno or 0))
            raise ChannelClosedError(f"the channel to {self.peer} broke: {error}") from error
        finally:
            self._writing.release()
        self._flush_queue()

    def _enqueue(self, data: bytes, *, first: bool = False) -> None:
        with self._counting:
            if first:
                self._queue.appendleft(data)
            else:
                self._queue.append(data)
            self._queued += len(data)

    def _dequeue(self) -> list[Buffer]:
        batch: list[Buffer] = []
        with self._counting:
            while self._queue and len(batch) < _MAX_PARTS:
                batch.append(self._queue.popleft())
            self._queued -= sum(map(len, batch))
        return batch

    def _flush_queue(self) -> None:
        """Write what others queued while we wrote, unless somebody else is at it."""
        while self._queue and not self._stalled and self._ended is None:
            if not self._writing.acquire(blocking=False):
                return  # the holder looks at the queue again when it lets go
            try:
                if not self._stalled:
                    self._write_queue(0.0)
            except OSError as error:
                self._end(os.strerror(error.errno or 0))
            finally:
                self._writing.release()

    def _write_queue(self, deadline: float | None) -> None:
        self._stalled = False
        while self._queue and not self._stalled:
            self._write(self._dequeue(), deadline)

    def _write(self, parts: Sequence[Buffer], deadline: float | None) -> None:
        """Write all parts; if the socket stays full past the deadline, leave the rest to a poller."""
        first, skip = 0, 0  # everything before byte `skip` of part `first` is written
        while first < len(parts):
            batch = list(parts[first : first + _MAX_PARTS])
            if skip:
                batch[0] = memoryview(batch[0])[skip:]
            try:
                count = self._sock.sendmsg(batch)
            except BlockingIOError:
                if self._wait_writable(deadline):
                    continue
                self._stall(b"".join(batch + list(parts[first + len(batch) :])))
                return
            count += skip
            while first < len(parts) and count >= len(parts[first]):
                count -= len(parts[first])
                first += 1
            skip = count

    def _wait_writable(self, deadline: float | None) -> bool:
        wait = None if deadline is None else (deadline - time.monotonic()) * 1000
        if wait is not None and wait <= 0:
            return False
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        ready = poller.poll(wait)
        if self._ended is not None:
            raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN))
        return bool(ready)

    def _stall(self, rest: bytes) -> None:
        self._enqueue(rest, first=True)
        self._stalled = True
        if self._out_fd < 0:
            self._out_fd = os.dup(self._fd)
            self._endpoint.watch(self._out_fd, self.write_on, select.EPOLLOUT)
        else:
            self._endpoint.arm(self._out_fd, select.EPOLLOUT)

    def write_on(self) -> None:
        """The socket takes more: go on with a stalled queue."""
        with self._writing:
            if self._ended is not None or not self._stalled:
                return
            try:
                self._write_queue(0.0)
            except OSError as error:
                self._end(os.strerror(error.errno or 0))
        self._flush_queue()


class _Newcomer:
    """An accepted connection that has not proven itself yet. Read by one thread at a time."""

    def __init__(self, endpoint: SocketEndpoint, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.since = time.monotonic()
        self._endpoint = endpoint
        self._handshake = ServerHandshake(endpoint.secret)
        self._gone = False

    def read(self) -> None:
        try:
            data = self.sock.recv(self._handshake.wanted)
            if not data:
                raise ConnectionResetError("closed before it was authenticated")
            answer = self._handshake.feed(data)
            if answer:
                self.sock.sendall(answer)  # a few bytes into an empty buffer: does not block
        except BlockingIOError:
            pass
        except AuthenticationError as error:
            with contextlib.suppress(OSError):
                self.sock.sendall(ServerHandshake.refusal)
            self.refuse(str(error))
            return
        except OSError as error:
            self.refuse(str(error))
            return
        if self._handshake.done:
            self._endpoint.welcome(self)
        else:
            self._endpoint.arm(self.sock.fileno(), select.EPOLLIN)

    def refuse(self, reason: str) -> None:
        log.warning("refused a connection from %s: %s", self.peer, reason)
        self._endpoint.drop(self)


class SocketEndpoint(Endpoint):
    """A worker's listening sockets and its channels.

    Args:
        secret: What peers must know.
        unix: Whether to listen on an abstract Unix socket.
        bind: Host to listen on by TCP, or None.
        limit: Largest frame to accept.
    """

    def __init__(
        self, *, secret: bytes, unix: bool = True, bind: str | None = None, limit: int = 8 << 30
    ) -> None:
        self.secret = secret
        self.limit = limit
        self.recycler = Recycler()
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Edge-triggered and never read: each write wakes one poller.
        self._epoll.register(self._wake_fd, select.EPOLLIN | select.EPOLLET)
        self._lock = threading.Lock()  # guards the tables below
        self._actions: dict[int, Callable[[], None]] = {}  # descriptor -> what to call when it is ready
        self._channels: dict[int, SocketChannel] = {}
        self._newcomers: dict[int, _Newcomer] = {}
        self._listeners: list[socket.socket] = []
        self._closed = False
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
        family, _, _, _, where = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
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

    # Descriptors.

    def watch(self, fd: int, action: Callable[[], None], mask: int) -> None:
        """Call ``action`` once when ``fd`` is ready; ``arm`` for more."""
        with self._lock:
            self._actions[fd] = action
        self._epoll.register(fd, mask | _ONE_SHOT)

    def arm(self, fd: int, mask: int) -> None:
        """Watch ``fd`` for one more event."""
        self._epoll.modify(fd, mask | _ONE_SHOT)

    def forget(self, fd: int) -> None:
        """Watch ``fd`` no more; called before it is closed."""
        with self._lock:
            self._actions.pop(fd, None)
            self._channels.pop(fd, None)
            self._newcomers.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def poll(self, timeout: float | None) -> Event | None:
        ready = self._epoll.poll(timeout, 1)
        if not ready:
            return None
        channel = self._channels.get(ready[0][0])
        if channel is not None:
            return channel.read()
        action = self._actions.get(ready[0][0])
        if action is not None:
            action()
        return None

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # Connections.

    def _accept(self, listener: socket.socket) -> None:
        try:
            while True:
                sock, where = listener.accept()
                sock.setblocking(False)
                self._tune(sock)
                newcomer = _Newcomer(self, sock, _show_peer(sock, where))
                self._shed_newcomers()
                with self._lock:
                    self._newcomers[sock.fileno()] = newcomer
                self.watch(sock.fileno(), newcomer.read, select.EPOLLIN)
        except BlockingIOError:
            pass
        except OSError as error:  # too many descriptors, say: try again at the next connection
            log.warning("could not accept a connection: %s", error)
        self.arm(listener.fileno(), select.EPOLLIN)

    def _shed_newcomers(self) -> None:
        """Make room: connections that will not prove themselves may not pile up."""
        with self._lock:
            waiting = sorted(self._newcomers.values(), key=lambda newcomer: newcomer.since)
        late = time.monotonic() - _HANDSHAKE_TIMEOUT
        for index, newcomer in enumerate(waiting):
            if newcomer.since < late or len(waiting) - index >= _MAX_HANDSHAKES:
                with contextlib.suppress(OSError):
                    newcomer.sock.shutdown(socket.SHUT_RDWR)  # its own thread refuses and closes it

    def welcome(self, newcomer: _Newcomer) -> None:
        """A newcomer has proven itself: from here on its bytes are frames."""
        channel = SocketChannel(self, newcomer.sock, newcomer.peer)
        fd = newcomer.sock.fileno()
        with self._lock:
            self._newcomers.pop(fd, None)
            self._actions.pop(fd, None)
            self._channels[fd] = channel
        self.arm(fd, select.EPOLLIN)

    def drop(self, newcomer: _Newcomer) -> None:
        """Close a connection that did not prove itself."""
        self.forget(newcomer.sock.fileno())
        newcomer.sock.close()

    def connect(self, address: str, *, timeout: float) -> Channel:
        family, where = addresses.parse(address)
        deadline = time.monotonic() + timeout
        sock = self._open(family, where, timeout, address)
        try:
            self._tune(sock)
            handshake = ClientHandshake(self.secret)
            sock.sendall(handshake.start())
            while not handshake.done:
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
                data = sock.recv(handshake.wanted)
                if not data:
                    raise ConnectionResetError(f"{address} closed the connection during the handshake")
                sock.sendall(handshake.feed(data))
            sock.setblocking(False)
            channel = SocketChannel(self, sock, address)
            with self._lock:
                if self._closed:
                    raise ConnectionAbortedError("this worker is closed")
                self._channels[sock.fileno()] = channel
            self._epoll.register(sock.fileno(), select.EPOLLIN | _ONE_SHOT)
            return channel
        except TimeoutError as error:
            sock.close()
            raise ConnectionError(f"{address} did not answer within {timeout:g} s") from error
        except BaseException:
            sock.close()
            raise

    @staticmethod
    def _open(
        family: socket.AddressFamily, where: addresses.SocketAddress, timeout: float, address: str
    ) -> socket.socket:
        try:
            if isinstance(where, tuple):
                return socket.create_connection(where, timeout)
            sock = socket.socket(family, socket.SOCK_STREAM)
        except TimeoutError as error:
            raise ConnectionError(f"{address} did not answer within {timeout:g} s") from error
        except OSError as error:
            raise ConnectionError(f"cannot connect to {address}: {error}") from error
        try:
            sock.settimeout(timeout)
            sock.connect(where)
            return sock
        except OSError as error:
            sock.close()
            raise ConnectionError(f"cannot connect to {address}: {error}") from error

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
            channel._lose("closed by this side")
        self._epoll.close()
        os.close(self._wake_fd)


def _show_peer(sock: socket.socket, where: object) -> str:
    if isinstance(where, tuple):
        return addresses.show_tcp(where[0], where[1])
    try:  # a Unix peer has no address; its process is what helps
        pid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
        return f"unix:pid {pid}"
    except OSError:
        return "unix"
