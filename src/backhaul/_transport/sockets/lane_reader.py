"""The reading side of a channel with lanes. Used by the thread that holds the channel.

The channel's descriptor is an epoll set of its connections, so that the endpoint, and each thread that holds the
channel, waits for all of them as for one. While the channel has no lanes, the set has the first connection only.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Sequence

from backhaul._transport.sockets.lane import Lane
from backhaul._transport.sockets.lane_agreement import END
from backhaul._wire.frames import Frame
from backhaul._wire.lane_pieces import Inbox
from backhaul._wire.memory import Recycler

_TURN_BYTES = 4 << 20  # then the first connection is read, and other channels
_LANE_BYTES = 1 << 20  # then other lanes are read
_CALL_BYTES = 1 << 12  # what a system call costs at least
_BROKEN = select.EPOLLHUP | select.EPOLLERR


class LaneReader:
    """Reads the lanes of one channel. See ``frames.Lanes``.

    Attributes:
        fd: A descriptor that is readable if any connection of the channel is.
        several: Whether the channel may have lanes.
        blocked: The first connection must not be read now: what follows there comes after a large frame.
        received: How many bytes have come over lanes.
        inbox: The large frames.

    Args:
        first: The descriptor of the first connection.
        several: Whether the channel may have lanes.
        recycler: Where the memory of frames comes from.
        agree: Called for control frames about lanes.
    """

    def __init__(self, first: int, several: bool, recycler: Recycler, agree: Callable[[int, int, bytes], None]) -> None:
        self.several = several
        self.blocked = False
        self.received = 0
        self.inbox = Inbox(recycler)
        self._first = first
        self._left = 0  # how many bytes are still to be read in this turn
        self._agree = agree
        self._lanes: dict[int, Lane] = {}
        self._waiting: list[Lane] = []  # their pieces are of frames whose heads have not come
        self._buffered: list[Lane] = []  # they have bytes to read that the set does not report
        self._set = select.epoll() if several else None
        self.fd = first
        if self._set is not None:
            self.fd = self._set.fileno()
            self._set.register(first, select.EPOLLIN)

    @property
    def active(self) -> bool:
        """Whether there are lanes."""
        return bool(self._lanes)

    @property
    def buffered(self) -> bool:
        """Whether to call ``read`` again before the set is waited for."""
        return bool(self._buffered)

    def add(self, lane: Lane) -> None:
        """Read one more lane. May be called by any thread."""
        assert self._set is not None
        self._lanes[lane.fd] = lane
        self._set.register(lane.fd, select.EPOLLIN)

    # What ``FrameReader`` finds on the first connection.

    def announce(self, frame: Frame, lengths: Sequence[int]) -> None:
        """See ``frames.Lanes``."""
        self.inbox.announce(frame, lengths)
        self._resume()
        self._block()

    def control(self, kind: int, number: int, body: bytes) -> None:
        """See ``frames.Lanes``."""
        if kind == END:
            self.inbox.end(number)
            self._block()
        else:
            self._agree(kind, number, body)

    def _block(self) -> None:
        if self.blocked != self.inbox.blocked and self._set is not None:
            self.blocked = self.inbox.blocked
            self._set.modify(self._first, 0 if self.blocked else select.EPOLLIN)

    def _resume(self) -> None:
        """A head counts from now on: lanes may go on that have waited for it."""
        waiting, self._waiting = self._waiting, []
        for lane in waiting:
            lane.reader.go_on()
            if lane.reader.waiting:
                self._waiting.append(lane)
            elif self._set is not None:
                self._set.modify(lane.fd, select.EPOLLIN)
                self._note_buffered(lane)

    def _note_buffered(self, lane: Lane) -> None:
        if lane.buffered and not lane.reader.waiting and lane not in self._buffered:
            self._buffered.append(lane)

    # What comes over lanes.

    def read(self) -> Frame | None:
        """Read for one turn, see [Note: turns]. Returns as soon as a frame is complete, or the first connection can be
        read. Raises ``OSError`` or ``ProtocolError`` if the channel is lost.
        """
        assert self._set is not None
        self._left = _TURN_BYTES
        while self._left > 0:
            ready, self._buffered = self._buffered, []
            first = False
            if not ready:
                for fd, mask in self._set.poll(0):
                    lane = self._lanes.get(fd)
                    if mask & _BROKEN and (self.blocked if lane is None else lane.reader.waiting):
                        raise _reset()
                    if lane is not None:
                        ready.append(lane)
                    else:
                        first = True
            if not ready:
                return None
            for lane in ready:
                frame = self._read_lane(lane)
                if frame is not None:
                    self._buffered += (other for other in ready if other.buffered and other not in self._buffered)
                    return frame
            if first:
                return None
        return None

    def _read_lane(self, lane: Lane) -> Frame | None:
        reader, frame, stop = lane.reader, None, self._left - _LANE_BYTES
        recv_into = lane.sock.recv_into
        try:
            while not reader.waiting and self._left > stop and frame is None:
                asked = len(reader.space)
                count = recv_into(reader.space)
                if not count:
                    self._remove(lane)
                    return None
                self.received += count
                self._left -= max(count, _CALL_BYTES)
                frame = reader.fed(count)
                if count < asked and not lane.secure:
                    break  # there is no more
        except BlockingIOError:
            return None
        if frame is not None:
            self._resume()
            self._block()
        if reader.waiting and lane not in self._waiting and self._set is not None:
            self._waiting.append(lane)
            self._set.modify(lane.fd, 0)
        self._note_buffered(lane)
        if self._left <= stop:
            os.sched_yield()  # else threads with little to do wait for the end of this thread's time slice
        return frame

    def _remove(self, lane: Lane) -> None:
        """The peer has closed a lane. It closes the first connection too, which is read to its end."""
        if lane.reader.midway:
            raise _reset()
        assert self._set is not None
        self._set.unregister(lane.fd)
        del self._lanes[lane.fd]
        if not self._lanes and self.inbox.unfinished:
            raise _reset()

    def close(self) -> None:
        """Close the descriptors of this side, but no connections."""
        self._lanes.clear()
        if self._set is not None:
            self._set.close()


def _reset() -> OSError:
    return OSError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
