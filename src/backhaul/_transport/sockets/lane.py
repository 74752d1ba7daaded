"""A further connection of a channel, which carries pieces of large frames. Knows no channels and no other lanes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

from backhaul._transport.sockets.tls_socket import TlsSocket
from backhaul._transport.sockets.write_queue import MAX_PARTS, without
from backhaul._wire.lane_pieces import Inbox, PieceReader, PieceSize
from backhaul._wire.memory import Buffer

# What a connection holds back unsent is late on a slow path, and what is sent later waits for it.
_UNSENT_BYTES = 32 << 10
# A path may forget a connection that is idle for minutes. These probes never end one before the channel is lost.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 60), (socket.TCP_KEEPCNT, 127))


class Lane:
    """A connected, authenticated socket beside the first one of a channel.

    Attributes:
        sock: The socket. It does not block.
        fd: Its descriptor.
        secure: Whether it is a connection of TLS.
        reader: What has been read. Used by the thread that holds the channel.
        size: How large its next piece is. This and what follows is used by the thread whose turn it is to write.
        rest: What the connection has not taken yet of a piece.
        full: The connection takes no more until an event says so.
    """

    __slots__ = ("fd", "full", "reader", "rest", "secure", "size", "sock")

    def __init__(self, sock: socket.socket | TlsSocket, inbox: Inbox) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.secure = isinstance(sock, TlsSocket)
        self.reader = PieceReader(inbox)
        self.size = PieceSize()
        self.rest: Sequence[Buffer] = ()
        self.full = False
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def buffered(self) -> bool:
        """Whether there are bytes to read that the descriptor does not report."""
        return isinstance(self.sock, TlsSocket) and self.sock.pending() > 0

    def write(self) -> int:
        """Write what is left of the piece, as far as the connection takes it. Returns how many bytes it has taken."""
        parts = self.rest if len(self.rest) <= MAX_PARTS else self.rest[:MAX_PARTS]
        asked = sum(map(len, parts))
        try:
            count = self.sock.sendmsg(parts)
        except BlockingIOError:
            count = 0
        if count == asked:
            self.rest = self.rest[len(parts) :]
        else:
            self.rest, self.full = without(self.rest, count), True
        self.size.took(count, asked)
        return count

    def sever(self) -> None:
        """Close this process's copy of the socket after a fork, see ``Endpoint.sever``."""
        if (fd := self.sock.detach()) >= 0:
            os.close(fd)
