"""A TCP proxy on loopback. On command it cuts, delays, corrupts and half-closes the connections through it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Literal

Direction = Literal["out", "back"]
"""``out``: from the client to the server; ``back``: from the server to the client."""

Change = Callable[[bytes, int], bytes]
"""Takes bytes, and how many passed before them in that direction of the connection; returns the bytes to pass on."""


class _Connection:
    """A connection through the proxy: one socket to the client, one to the target."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near = near
        self.far = far

    def end(self, how: int = socket.SHUT_RDWR) -> None:
        for sock in (self.near, self.far):
            with contextlib.suppress(OSError):
                sock.shutdown(how)


class Proxy:
    """Listens on ``port`` of 127.0.0.1 and connects each client to ``target``. A context manager; thread-safe.

    Attributes:
        delay: Seconds by which bytes are late, in both directions.
        change: How bytes are changed, by direction.
        passed: How many bytes have passed, by direction.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.delay = 0.0
        self.change: dict[Direction, Change] = {}
        self.passed: dict[Direction, int] = {"out": 0, "back": 0}
        self._target = target
        self._lock = threading.Lock()  # guards passed and _connections
        self._connections: list[_Connection] = []
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._refusing = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._spawn(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def _spawn(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                near.close()
                continue
            try:
                far = socket.create_connection(self._target, timeout=10)
            except OSError:
                near.close()
                continue
            for sock in (near, far):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(near, far)
            with self._lock:
                self._connections.append(connection)
            pumps = [threading.Event(), threading.Event()]
            self._spawn(self._pump, connection, near, far, "out", pumps)
            self._spawn(self._pump, connection, far, near, "back", pumps[::-1])

    def _pump(
        self,
        connection: _Connection,
        source: socket.socket,
        sink: socket.socket,
        direction: Direction,
        ended: list[threading.Event],
    ) -> None:
        before = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.delay:
                    time.sleep(self.delay)
                change = self.change.get(direction)
                sink.sendall(data if change is None else change(data, before))
                before += len(data)
                with self._lock:
                    self.passed[direction] += len(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        ended[0].set()
        if ended[1].is_set():  # the other direction has ended too
            with self._lock:
                if connection not in self._connections:
                    return
                self._connections.remove(connection)
            connection.near.close()
            connection.far.close()

    @property
    def connections(self) -> int:
        """The number of connections."""
        with self._lock:
            return len(self._connections)

    def cut(self, *, refuse: bool = False) -> None:
        """End all connections. With ``refuse``, also refuse new ones until ``heal``."""
        self._refusing = refuse
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.end()

    def half_close(self) -> None:
        """Send end-of-file to both ends of all connections. Both may still send."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.end(socket.SHUT_WR)

    def heal(self) -> None:
        """Let all bytes pass unchanged and at once from now on, and accept new connections."""
        self._refusing, self.delay = False, 0.0
        self.change.clear()


def flip(at: int, mask: int = 0xFF) -> Change:
    """A change that flips bits of byte number ``at`` of a connection."""

    def change(data: bytes, before: int) -> bytes:
        place = at - before
        if not 0 <= place < len(data):
            return data
        return data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]

    return change
