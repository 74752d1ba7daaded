"""The writing side of a channel with lanes: large frames.

One thread at a time writes large frames. Its frame is cut into pieces, and the lane that can take the next piece gets
it. So a slow lane, or one that has lost packets, carries less. Small frames of other threads go over the first
connection meanwhile.

[Note: order on lanes] A frame that is sent after the ``send`` of a large one has returned must not arrive before it. So
the writer sends END on the first connection just before ``send`` returns. A frame that cannot be written in time is
copied, and its END sent; a thread that polls writes its pieces. Heads go out in the order in which the pieces are cut.
"""

from __future__ import annotations

import collections
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import cast

from backhaul._runtime import interrupts
from backhaul._transport.base import ChannelBrokenError
from backhaul._transport.shm.copies import join
from backhaul._transport.sockets.connection import Connection
from backhaul._transport.sockets.lane import Lane
from backhaul._transport.sockets.lane_agreement import END
from backhaul._transport.sockets.socket_writer import TURN_BYTES, SocketWriter, WriterOwner
from backhaul._transport.sockets.turn import Turn
from backhaul._wire.frames import Frame, control_frame
from backhaul._wire.lane_pieces import Cutter
from backhaul._wire.memory import Buffer

LARGE_BYTES = 256 << 10
"""Payloads that are larger go over lanes."""

_MEAN_BYTES = 1 << 12  # of the buffers, at least: the receiver reads each by itself
_MAX_HEAD_BYTES = 1 << 16  # of a frame that does
OPENING_SECONDS = 1.0
"""How long the first large frame waits for lanes at most. Then it goes over the first connection."""


# Over the limit because the lanes, the frames that wait and the thread whose turn it is change together.
class LaneWriter:
    """Writes large frames to the lanes of one channel. Thread-safe.

    Attributes:
        lanes: The lanes.
        written: How many bytes they have taken.
        sending: A thread is in the middle of ``send``.

    Args:
        connection: The first connection.
        first: What writes to it.
        owner: The endpoint.
        want: Sees to it that the channel gets lanes.
    """

    def __init__(
        self, connection: Connection, first: SocketWriter, owner: WriterOwner, want: Callable[[], None]
    ) -> None:
        self.lanes: list[Lane] = []
        self.written = 0
        self.sending = False
        self._connection = connection
        self._first = first
        self._owner = owner
        self._want = want
        self._set = select.epoll()  # edge-triggered: a lane that was full takes more
        self._poller = select.poll()
        self._poller.register(self._set.fileno(), select.POLLIN)
        self._watched = False
        self._turn = Turn()
        self._lock = threading.Lock()  # guards what follows, and the order of heads
        self._cutters: collections.deque[Cutter] = collections.deque()  # frames of which not all pieces are cut
        self._number = 0
        self._beside = False  # a large frame is on its way over the first connection
        self._opening = threading.Lock()  # held until there are lanes, or will be none
        self._opening.acquire()
        self._settled = False

    @property
    def backlog(self) -> int:
        """How many bytes wait to be written."""
        return sum(cutter.left for cutter in list(self._cutters))

    def add(self, lane: Lane) -> None:
        """Write to one more lane."""
        self._connection.lanes.append(cast("socket.socket", lane.sock))
        self.lanes.append(lane)
        self._set.register(lane.fd, select.EPOLLOUT | select.EPOLLET)
        self.settle()

    def settle(self) -> None:
        """There are lanes now, or there will be none: nobody waits for them any more."""
        with self._lock:
            if self._settled:
                return
            self._settled = True
        self._opening.release()

    @staticmethod
    def takes(frame: Frame) -> bool:
        """Whether a frame is sent by ``send``. Others go over the first connection."""
        count, size = len(frame.buffers), 0
        for buffer in frame.buffers:
            size += len(buffer)
        return size > LARGE_BYTES and size >= count * _MEAN_BYTES and len(frame.body) + 8 * count < _MAX_HEAD_BYTES

    def send(self, frame: Frame, timeout: float | None) -> None:
        """Like ``Channel.send``, for a large frame."""
        me, deadline = object(), None if timeout is None else time.monotonic() + timeout
        try:
            if not self._settled:
                self._await_lanes(timeout)
            if not self._turn.wait(me, _left(deadline)):
                self._send_later(frame)
                return
            self.sending = True
            if self._push(deadline):
                self._send_now(frame, deadline)
            else:
                self._send_later(frame)
        except ChannelBrokenError:
            raise
        except OSError as error:
            reason = self._connection.end(error.strerror or str(error))
            raise ChannelBrokenError(f"the channel to {self._connection.peer} broke: {reason}") from error
        except BaseException as error:
            if not interrupts.in_wait(error):
                self._connection.end("interrupted while a thread wrote to it")
            raise
        finally:
            if self._turn.writer.get(0) is me:
                self.sending = False
            self._turn.give_back(me)
            self.go_on()

    def _await_lanes(self, timeout: float | None) -> None:
        self._want()
        if timeout == 0:
            return
        most = OPENING_SECONDS if timeout is None else min(timeout, OPENING_SECONDS)
        if interrupts.acquire(self._opening, most):
            self._opening.release()
        else:
            self.settle()  # the next large frame does not wait

    def _send_now(self, frame: Frame, deadline: float | None) -> None:
        with self._lock:
            self._beside = not self.lanes
            number = 0 if self._beside else self._announce(frame, frame.buffers)
        if not number:
            try:
                self._first.write(frame.parts(), _left(deadline))
            finally:
                self._beside = False
            return
        try:
            self._first.drain(_left(deadline))
            if not self._push(deadline):
                self._leave()
        except BaseException as error:
            if interrupts.in_wait(error):  # the peer expects the rest of a frame that has begun
                self._leave()
                self._first.queue.append(control_frame(END, number))
                self._first.flush()
            raise
        self._first.queue.append(control_frame(END, number))
        self._first.drain(_left(deadline))

    def _announce(self, frame: Frame, buffers: Sequence[Buffer], more: bytes = b"") -> int:
        """Queue the head of a frame, and the cutting of its pieces. Returns its number."""
        self._number += 1
        self._cutters.append(Cutter(self._number, buffers))
        self._first.queue.append(frame.head() + more)
        return self._number

    def _send_later(self, frame: Frame) -> None:
        """Copy a frame that cannot be written in time. See [Note: order on lanes]."""
        with self._lock:
            beside = self._beside or not self.lanes
            if not beside:
                self._first.held = True
                end = control_frame(END, self._number + 1)
                self._announce(frame, [join([buffer], self._owner.recycler) for buffer in frame.buffers], end)
        if beside:
            self._first.write(frame.parts(), 0)
        else:
            self._first.flush()

    def _leave(self) -> None:
        """Copy what the lanes have not taken, so that a thread that polls can go on with it."""
        self._first.held = True
        for cutter in list(self._cutters)[:1]:  # those that follow were copied before
            cutter.replace(join(cutter.rest(), self._owner.recycler))
        for lane in self.lanes:
            if lane.rest:
                lane.rest = [join(lane.rest, self._owner.recycler)]

    def _push(self, deadline: float | None, most: int | None = None) -> bool:
        """Write all pieces. False if ``deadline`` was reached first, or ``most`` bytes were written."""
        end = None if most is None else self.written + most
        while True:
            waits = progress = False
            for lane in self.lanes:
                if lane.full:
                    waits = waits or bool(lane.rest)
                    continue
                if not lane.rest and self._cutters:
                    lane.rest = self._cut(lane.size.nbytes)
                if lane.rest:
                    self.written += lane.write()
                    waits, progress = waits or bool(lane.rest), True
            if not waits and not self._cutters:
                return True
            if end is not None and self.written >= end:
                for lane in self.lanes:
                    if not lane.full:
                        self._set.modify(lane.fd, select.EPOLLOUT | select.EPOLLET)  # an event follows at once
                return False
            if progress:
                os.sched_yield()  # else a thread with a small frame waits for the end of this thread's time slice
            if not (progress and self._cutters) and not self._wait(deadline):
                return False

    def _cut(self, most: int) -> Sequence[Buffer]:
        with self._lock:
            cutter = self._cutters[0]
            piece = cutter.cut(most)
            if not cutter.left:
                self._cutters.popleft()
            return piece

    def _wait(self, deadline: float | None) -> bool:
        """Wait until a lane takes more; False if none does before ``deadline``."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is None or left > 0:
            interrupts.poll(self._poller, left)
        events = dict(self._set.poll(0))
        for lane in self.lanes:
            if lane.fd in events:
                lane.full = False
        if self._connection.ended is not None:
            raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN))
        return bool(events)

    def go_on(self) -> None:
        """Write what was left, unless another thread writes: that thread calls this when it stops."""
        while (self._cutters or any(lane.rest for lane in self.lanes)) and self._connection.ended is None:
            me = object()
            if self._turn.writer.setdefault(0, me) is not me:
                return
            try:
                done = self._push(0.0, TURN_BYTES)
            except OSError as error:
                self._connection.end(error.strerror or str(error))
                return
            except BaseException:
                self._connection.end("interrupted while a thread wrote to it")
                raise
            finally:
                self._turn.give_back(me)
            if not done:
                self._arm()
                return
        if self._first.held:
            with self._lock:
                self._first.held = bool(self._cutters) and self._connection.ended is None
            self._first.flush()

    def _arm(self) -> None:
        """Let a thread that polls go on when a lane takes more."""
        with self._lock:
            if self._set.closed:
                return
            if self._watched:
                self._owner.descriptors.arm(self._set.fileno(), select.EPOLLIN)
            else:
                self._watched = True
                self._owner.descriptors.watch(self._set.fileno(), self.go_on, select.EPOLLIN)

    def free(self) -> None:
        """Close the lanes. The connection has ended, which has woken a thread that waits for them."""
        me = object()
        self.settle()
        try:
            self._turn.wait(me, None)
            with self._lock:
                if self._watched and not self._set.closed:
                    self._owner.descriptors.forget(self._set.fileno())
                self._set.close()
            for lane in self.lanes:
                lane.sock.close()
            self._cutters.clear()
        finally:
            self._turn.give_back(me)

    def sever(self) -> None:
        """Close this process's copies of the descriptors after a fork, see ``Endpoint.sever``."""
        self._set.close()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
