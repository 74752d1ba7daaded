"""The writing side of a channel: many threads send, one at a time writes to the socket. Knows no frames, only bytes.

See [Note: interrupts] and [Note: turns].

[Note: overtaking] Between two pieces of a large frame (``frames`` [Note: pieces]), its thread writes the small frames
that other threads have queued meanwhile. These frames overtake the large one. For every other thread this looks as if
the thread of the large frame had called ``send`` later. A frame of that thread itself overtakes nothing, since ``send``
returns only when the large frame is written or queued.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from backhaul._runtime import interrupts
from backhaul._transport.base import ChannelBrokenError
from backhaul._transport.shm.copies import join
from backhaul._transport.sockets.connection import Connection
from backhaul._transport.sockets.epoll_set import EpollSet
from backhaul._transport.sockets.turn import Turn
from backhaul._transport.sockets.write_queue import MAX_PARTS, WriteQueue, without
from backhaul._wire.frames import GAP, MAX_GAP_BYTES, fill_gap
from backhaul._wire.memory import Buffer, Recycler

TURN_BYTES = 4 << 20
"""How much a thread that polls reads or writes before it polls again, see [Note: turns]."""


class WriterOwner(Protocol):
    """What the writing side of a channel needs of its endpoint."""

    recycler: Recycler
    descriptors: EpollSet

    def forget(self, fd: int) -> None:
        """Wait for this descriptor no more. Called before it is closed."""


class SocketWriter:
    """Writes to a connected socket. Thread-safe.

    One thread at a time writes. Frames that other threads queue meanwhile are written before that thread stops.

    Attributes:
        queue: What waits to be written.
        written: How many bytes the socket has taken.
        closing: This side has closed the channel. The connection ends when the queue is written.
        held: The connection does not end yet: other connections of the channel have parts of frames to write.
    """

    def __init__(self, connection: Connection, endpoint: WriterOwner) -> None:
        self.queue = WriteQueue()
        self.written = 0
        self.closing = False
        self._connection = connection
        self._endpoint = endpoint
        self.held = False
        self._turn = Turn()
        self._writer = self._turn.writer  # [0]: the thread that writes, and may change _stalled
        self._waiters = self._turn.waiters
        self._stalled = False  # the queue waits for the socket; a thread that polls goes on with it
        self._writable = False  # a poll said so while another thread wrote: that thread goes on with the queue
        self._out_fd = -1  # a second descriptor of the socket, to wait until it is writable

    def write(self, parts: list[Buffer], timeout: float | None) -> None:
        """Write all parts. If the socket stays full for ``timeout`` seconds, the rest is copied and written later.

        Raises:
            ChannelBrokenError: The connection broke.
        """
        queue = self.queue
        try:
            if self._writer.setdefault(0, parts) is not parts and (
                queue.accepts(parts) or not self._turn.wait(parts, timeout)
            ):
                queue.append(join(parts, self._endpoint.recycler))
                self.flush()
                return
            if not queue.parts and not self._stalled:
                self._write_frame(parts, timeout)
            else:  # earlier bytes wait: write them first, if the socket takes them
                if not (self._stalled and queue.accepts(parts)):
                    self._write_queue(timeout)
                if self._stalled:
                    queue.append(join(parts, self._endpoint.recycler))
                else:
                    self._write_frame(parts, timeout)
            self._writer.clear()
            if queue.parts or self.closing or self._waiters:
                self._stop_writing(parts)
        except BaseException as error:
            self._fail(error, parts)
            raise

    def drain(self, timeout: float | None) -> None:
        """Write what is queued. What the socket does not take within ``timeout`` seconds is written later."""
        mine = object()
        try:
            if self.queue.parts and self._turn.wait(mine, timeout):
                self._write_queue(timeout)
            self._stop_writing(mine)
        except BaseException as error:
            self._fail(error, mine)
            raise

    def _fail(self, error: BaseException, writer: object) -> None:
        """A thread could not write to the end."""
        if isinstance(error, OSError):
            reason = self._connection.end(error.strerror or str(error))
            self._stop_writing(writer)
            raise ChannelBrokenError(f"the channel to {self._connection.peer} broke: {reason}") from error
        if not interrupts.in_wait(error):
            self._connection.end("interrupted while a thread wrote to it")
        self._stop_writing(writer)

    def _stop_writing(self, writer: object) -> None:
        """Let other threads write, if ``writer`` kept them from it, and write what they have queued."""
        self._turn.give_back(writer)
        if self.queue.parts or self.closing:
            self.flush()

    def flush(self) -> None:
        """Write what is queued, unless another thread writes: that thread looks at the queue when it stops."""
        connection, queue = self._connection, self.queue
        while queue.parts and (self._writable or not self._stalled) and connection.ended is None:
            mine = object()
            try:
                if self._writer.setdefault(0, mine) is not mine:
                    return
                if self._writable or not self._stalled:
                    self._write_queue(0.0)
                self._writer.clear()
            except OSError as error:
                connection.end(error.strerror or str(error))
                self._writer.clear()
            except BaseException:
                connection.end("interrupted while a thread wrote to it")
                self._stop_writing(mine)
                raise
            if self._waiters:
                self._stop_writing(mine)
        if self.closing and not queue.parts and not self.held:
            connection.end("closed by this side")

    def _write_queue(self, timeout: float | None) -> None:
        """Write what is queued. A thread that may not wait writes for one turn, see [Note: turns]."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._stalled = self._writable = False
        end = self.written + TURN_BYTES if timeout == 0 else None
        while self.queue.parts and not self._stalled:
            if end is not None and self.written >= end:
                self._stall()
                return
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            self._write(self.queue.take(TURN_BYTES), left, own=True)

    def _write_frame(self, parts: list[Buffer], timeout: float | None) -> None:
        """Write a frame. If it comes in pieces, fill the gaps with what other threads have queued; see
        [Note: overtaking].
        """
        gaps = [index for index, part in enumerate(parts) if part is GAP] if len(parts) > 2 else ()
        deadline = None if timeout is None or not gaps else time.monotonic() + timeout
        start = 0
        for end in (*gaps, len(parts)):
            piece = parts[start:end]
            if start:
                os.sched_yield()  # else a thread with a small frame waits for the end of this thread's time slice
                piece[:1] = fill_gap(self.queue.take_whole(MAX_GAP_BYTES))
                if deadline is not None:
                    timeout = max(deadline - time.monotonic(), 0.0)
            if not self._write(piece, timeout, rest=parts[end:]):
                return
            start = end

    def _write(
        self, parts: Sequence[Buffer], timeout: float | None, *, rest: Sequence[Buffer] = (), own: bool = False
    ) -> bool:
        """Write all parts. If the socket stays full for longer than ``timeout``, leave the rest to a thread that polls,
        and return False.

        Args:
            parts: What to write.
            timeout: How many seconds to wait; None: any time.
            rest: What follows these parts, to be left to that thread as well.
            own: The memory is the queue's own, and need not be copied to stay there.
        """
        left = sum(map(len, parts))
        deadline = None
        while left:
            try:
                count = self._connection.sock.sendmsg(parts if len(parts) <= MAX_PARTS else parts[:MAX_PARTS])
            except BlockingIOError:
                if timeout is not None and deadline is None:
                    deadline = time.monotonic() + timeout
                try:
                    if self._wait_writable(deadline):
                        continue
                except OSError:
                    raise
                except BaseException:  # an interrupt: the peer expects the rest of a frame that has begun
                    self._leave([*parts, *rest], own)
                    raise
                self._leave([*parts, *rest], own)
                return False
            self.written += count
            left -= count
            if left:
                parts = without(parts, count)
        return True

    def _wait_writable(self, deadline: float | None) -> bool:
        """Wait until the socket takes more; False if it does not before ``deadline``."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        poller = select.poll()
        poller.register(self._connection.fd, select.POLLOUT)
        ready = interrupts.poll(poller, left)
        if self._connection.ended is not None:
            raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN))
        return bool(ready)

    def _leave(self, parts: Sequence[Buffer], own: bool) -> None:
        """Put the rest at the head of the queue. A thread that polls writes it when the socket takes more."""
        self.queue.put_back(parts if own else [join(parts, self._endpoint.recycler)])
        self._stall()

    def _stall(self) -> None:
        """Let a thread that polls go on with the queue when the socket takes more."""
        self._stalled = True
        descriptors = self._endpoint.descriptors
        if self._out_fd < 0:
            self._out_fd = os.dup(self._connection.fd)
            descriptors.watch(self._out_fd, self.write_on, select.EPOLLOUT)
        else:
            descriptors.arm(self._out_fd, select.EPOLLOUT)

    def write_on(self) -> None:
        """The socket takes more: go on with a stalled queue."""
        self._writable = True
        self.flush()

    def close(self) -> None:
        """End the connection once the queue is written."""
        self.closing = True
        if self._writer:  # a thread waits in the middle of a frame: nothing whole can follow
            self._connection.end("closed by this side")
            return
        self.flush()

    def abort(self, reason: str) -> None:
        """End the connection at once. What is queued is dropped."""
        self.closing = True
        self._connection.end(reason)

    def while_open(self, check: Callable[[], bool]) -> bool:
        """Call ``check`` while no thread can close the descriptor. Does not wait."""
        mine = object()
        try:
            self._writer.setdefault(0, mine)  # ``free`` waits for the thread that writes, whichever it is
            return check()
        finally:
            self._stop_writing(mine)

    def free(self) -> None:
        """Close the descriptors. The connection has ended, which has woken a writer that waits for the socket."""
        mine = object()
        sock = self._connection.sock
        try:
            self._turn.wait(mine, None)
            if sock.fileno() >= 0:  # else the descriptor belongs to another file by now
                self._endpoint.forget(self._connection.watched)
            if self._out_fd >= 0:
                self._endpoint.forget(self._out_fd)
                os.close(self._out_fd)
                self._out_fd = -1
            sock.close()
        finally:
            self._stop_writing(mine)

    def sever(self) -> None:
        """Close this process's copy of the second descriptor after a fork, see ``Endpoint.sever``."""
        self.closing = True
        fd, self._out_fd = self._out_fd, -1
        if fd >= 0:
            os.close(fd)
