"""A TCP proxy on loopback that cuts, delays, corrupts and half-closes the connections through it, on command."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Literal

Direction = Literal["out", "back"]
"""``out``: from who connects to who listens; ``back``: the other way."""

Change = Callable[[bytes, int], bytes]
"""Makes other bytes of those that pass by; also told how many went before them in that direction of the connection."""


class _Line:
    """A connection through the proxy, as two sockets."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near = near
        self.far = far

    def end(self, how: int = socket.SHUT_RDWR) -> None:
        for sock in (self.near, self.far):
            with contextlib.suppress(OSError):
                sock.shutdown(how)


class Proxy:
    """Listens on ``port`` of 127.0.0.1 and connects everyone who comes to ``target``. A context manager; thread-safe.

    Attributes:
        delay: Seconds that bytes are late, in both directions.
        change: What is done to bytes, by direction.
        passed: How many bytes have passed, by direction.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.delay = 0.0
        self.change: dict[Direction, Change] = {}
        self.passed: dict[Direction, int] = {"out": 0, "back": 0}
        self._target = target
        self._lock = threading.Lock()  # guards the tables
        self._lines: list[_Line] = []
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
            line = _Line(near, far)
            with self._lock:
                self._lines.append(line)
            pumps = [threading.Event(), threading.Event()]
            self._spawn(self._pump, line, near, far, "out", pumps)
            self._spawn(self._pump, line, far, near, "back", pumps[::-1])

    def _pump(
        self, line: _Line, source: socket.socket, sink: socket.socket, way: Direction, ended: list[threading.Event]
    ) -> None:
        before = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.delay:
                    time.sleep(self.delay)
                change = self.change.get(way)
                sink.sendall(data if change is None else change(data, before))
                before += len(data)
                with self._lock:
                    self.passed[way] += len(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        ended[0].set()
        if ended[1].is_set():  # the other way is over, too
            with self._lock:
                if line not in self._lines:
                    return
                self._lines.remove(line)
            line.near.close()
            line.far.close()

    @property
    def lines(self) -> int:
        """How many connections there are."""
        with self._lock:
            return len(self._lines)

    def cut(self, *, refuse: bool = False) -> None:
        """End all connections. ``refuse``: and let no others come, until ``heal``."""
        self._refusing = refuse
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            line.end()

    def half_close(self) -> None:
        """Let both ends of all connections see that nothing more comes, though both may still send."""
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            line.end(socket.SHUT_WR)

    def heal(self) -> None:
        """Let all pass unchanged from now on."""
        self._refusing, self.delay = False, 0.0
        self.change.clear()


def flip(at: int, mask: int = 0xFF) -> Change:
    """Change one byte: that behind ``at`` others of a connection."""

    def change(data: bytes, before: int) -> bytes:
        place = at - before
        if not 0 <= place < len(data):
            return data
        return data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]

    return change
