"""A channel over TCP, which may have lanes: large frames go over further connections, see ``lane_writer``.

[Note: lanes] A channel gets lanes when one of its sides sends the first large frame: the sides agree
(``lane_agreement``), and the side that has opened the channel opens the lanes (``lane_opening``). If a lane breaks, the
channel is lost: what the peer has read of its bytes is not known.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import Protocol, cast

from backhaul._runtime import interrupts
from backhaul._transport.base import ChannelClosedError, Event, Lost, Received
from backhaul._transport.sockets.channel import ChannelOwner, SocketChannel
from backhaul._transport.sockets.lane import Lane
from backhaul._transport.sockets.lane_agreement import LaneAgreement
from backhaul._transport.sockets.lane_opening import LaneOpening
from backhaul._transport.sockets.lane_reader import LaneReader
from backhaul._transport.sockets.lane_writer import LaneWriter
from backhaul._transport.sockets.tls_socket import TlsSocket
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul.errors import ProtocolError

log = logging.getLogger("backhaul")


class LanesOwner(ChannelOwner, Protocol):
    """What a channel with lanes needs from its endpoint."""

    tickets: dict[bytes, LanedChannel]
    """The channels that expect lanes, by the tickets of the lanes."""

    def count_lanes(self, sock: socket.socket) -> int:
        """How many lanes a channel may have; 1: none beside its connection."""

    def open_lane(self, opening: LaneOpening) -> None:
        """Open a connection."""


class LanedChannel(SocketChannel):
    """A channel over TCP.

    Args:
        endpoint: The endpoint.
        sock: The first connection.
        peer: Where the other end is.
        connects: Whether this side has opened the channel.
        relayed: Whether it goes through a relay.
    """

    _endpoint: LanesOwner

    def __init__(
        self, endpoint: LanesOwner, sock: socket.socket, peer: str, *, connects: bool, relayed: bool = False
    ) -> None:
        count = 1 if relayed else endpoint.count_lanes(sock)  # a relay joins single connections
        self._agreement = LaneAgreement(connects=connects, most=count)
        self._lanes = LaneReader(sock.fileno(), count > 1, endpoint.recycler, self._agree)
        super().__init__(endpoint, sock, peer, self._lanes)
        self._large = LaneWriter(self._connection, self._writer, endpoint, self._want) if count > 1 else None
        self._tickets: tuple[bytes, ...] = ()
        self._openings: list[LaneOpening] = []

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """How many bytes were sent."""
        return self._writer.written + (0 if self._large is None else self._large.written)

    @property
    def backlog(self) -> int:
        """How many bytes wait to be sent because the peer reads too slowly."""
        return self._writer.queue.nbytes + (0 if self._large is None else self._large.backlog)

    @property
    def lanes(self) -> int:
        """How many lanes there are."""
        return 0 if self._large is None else len(self._large.lanes)

    # Getting lanes.

    def _want(self) -> None:
        self._tell(self._agreement.want())

    def _tell(self, control: bytes) -> None:
        """Send a control frame without waiting."""
        if control:
            parts: list[Buffer] = [control]
            with contextlib.suppress(ChannelClosedError):
                self._writer.write(parts, 0)

    def _agree(self, kind: int, number: int, body: bytes) -> None:
        agreed = self._agreement.received(kind, number, body)
        self._tickets = agreed.tickets
        if agreed.answer:
            self._endpoint.tickets.update(dict.fromkeys(agreed.tickets, self))
            self._tell(agreed.answer)
        elif agreed.tickets:
            where = self._connection.sock.getpeername()
            openings = [LaneOpening(where, ticket, self._opened) for ticket in agreed.tickets]
            self._openings = list(openings)  # another thread takes out those that are done
            for opening in openings:
                self._endpoint.open_lane(opening)
        if agreed.refused and self._large is not None:
            self._large.settle()

    def _opened(self, opening: LaneOpening, sock: socket.socket | TlsSocket | None) -> None:
        with contextlib.suppress(ValueError):
            self._openings.remove(opening)
        if sock is not None:
            self.attach(sock)
        elif not self._openings and self._large is not None:
            self._large.settle()

    @interrupts.uninterruptible
    def attach(self, sock: socket.socket | TlsSocket) -> None:
        """Use one more connection, which has proven that it is a lane of this channel."""
        large = self._large
        if large is None or self._connection.ended is not None:
            sock.close()
            return
        lane = Lane(sock, self._lanes.inbox)
        try:
            self._lanes.add(lane)
            large.add(lane)
        except (OSError, ValueError):  # the channel was lost meanwhile
            sock.close()
        if (reason := self._connection.ended) is not None:
            self._connection.end(reason)

    # Reading.

    def _read(self) -> Event | None:
        lanes = self._lanes
        event: Event | None = None
        if not lanes.blocked:
            event = super()._read()
            if not lanes.active or type(event) is Lost or (event is not None and not lanes.inbox.unfinished):
                return event
        return self._read_lanes(cast("Received | None", event))

    def _read_lanes(self, event: Received | None) -> Event | None:
        """Add what comes over lanes to what has come over the first connection."""
        lanes = self._lanes
        try:
            while True:
                if lanes.blocked and self._connection.ended is not None:
                    return self._lose(self._connection.ended)
                blocked, before = lanes.blocked, lanes.received
                frame = lanes.read()
                self.bytes_received += lanes.received - before
                if frame is not None:
                    frames = [frame, *(self._reader.fed(0) if blocked else ())]
                    if event is None:
                        event = Received(self, frames)
                    else:
                        event.frames.extend(frames)
                if blocked and self._has_buffered():
                    more = super()._read()
                    if isinstance(more, Lost):
                        return more
                    if more is not None:
                        event = Received(self, [*event.frames, *more.frames]) if event is not None else more
                if not lanes.buffered:
                    return event
        except ProtocolError as error:
            log.warning("closing the channel to %s: %s", self.peer, error)
            return self._lose(f"malformed input: {error}")
        except OSError as error:
            return self._lose(error.strerror or str(error))

    # Writing.

    def send(self, frame: Frame, *, timeout: float | None = None) -> None:
        """See ``Channel.send``."""
        large = self._large
        if large is None or not frame.buffers or frame.pieces or not large.takes(frame):
            super().send(frame, timeout=timeout)
            return
        if self._connection.ended is not None or self._writer.closing:
            raise self._closed_error()
        large.send(frame, timeout)

    # The end.

    def close(self) -> None:
        """See ``Channel.close``."""
        super().close()
        if self._large is not None and self._large.sending:  # nothing whole can follow
            self._connection.end("closed by this side")

    @interrupts.uninterruptible
    def free(self) -> None:
        """See ``SocketChannel.free``."""
        super().free()
        for ticket in self._tickets:
            self._endpoint.tickets.pop(ticket, None)
        for opening in list(self._openings):
            opening.close()
        if self._large is not None:
            self._large.free()
            self._lanes.close()

    def sever(self) -> None:
        """See ``Endpoint.sever``."""
        super().sever()
        for opening in self._openings:
            opening.sever()
        if self._large is not None:
            self._large.sever()
            self._lanes.close()
