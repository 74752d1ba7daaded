"""A connected, authenticated socket, as the two sides of a channel share it. Knows no frames."""

from __future__ import annotations

import contextlib
import os
import socket


class Connection:
    """A socket and why it is over. Thread-safe.

    Attributes:
        sock: The socket. It does not block.
        fd: Its descriptor.
        peer: Where the other end is, for people.
        ended: Why the connection is over; None while it is not. Set once.
        lost: The thread that holds the channel is about to report the loss, or has. The descriptor may belong to
            another file by now.
    """

    __slots__ = ("ended", "fd", "lost", "peer", "sock")

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.ended: str | None = None
        self.lost = False

    def end(self, reason: str) -> str:
        """Shut the socket down. That wakes the thread that reads it, which reports the loss. Returns the reason that
        counts: the first one.
        """
        if self.ended is None:
            self.ended = reason
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        return self.ended

    def sever(self) -> None:
        """Close this process's copy of the socket after a fork, see ``Endpoint.sever``."""
        self.ended = "this process was forked from a worker and is not a worker itself"
        self.lost = True
        fd = self.sock.detach()
        if fd >= 0:
            os.close(fd)
