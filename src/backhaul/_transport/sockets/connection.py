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
        watched: The descriptor that is readable when bytes have come. That of the socket, unless the channel has more
            connections.
        lanes: The sockets of these. They end with the first one.
        peer: Where the other end is, for people.
        ended: Why the connection is over; None while it is not. Set once.
        lost: The thread that holds the channel is about to report the loss, or has. The descriptor may belong to
            another file by now.
    """

    __slots__ = ("ended", "fd", "lanes", "lost", "peer", "sock", "watched")

    def __init__(self, sock: socket.socket, peer: str, watched: int | None = None) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.watched = self.fd if watched is None else watched
        self.lanes: list[socket.socket] = []
        self.peer = peer
        self.ended: str | None = None
        self.lost = False

    def end(self, reason: str) -> str:
        """Shut the sockets down. That wakes the thread that reads it, which reports the loss. Returns the reason that
        counts: the first one.
        """
        if self.ended is None:
            self.ended = reason
        for sock in (self.sock, *self.lanes):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return self.ended

    def sever(self) -> None:
        """Close this process's copy of the socket after a fork, see ``Endpoint.sever``."""
        self.ended = "this process was forked from a worker and is not a worker itself"
        self.lost = True
        for sock in (self.sock, *self.lanes):
            fd = sock.detach()
            if fd >= 0:
                os.close(fd)
