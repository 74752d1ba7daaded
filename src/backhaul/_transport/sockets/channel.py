"""A connected, authenticated socket as a channel: how it is read, how many threads write to it, and what goes through
shared memory instead.

[Note: turns] Where the peer is as fast as this end, a large frame can be read, or a long queue written, without a pause
for many seconds. The thread that does so may be the only one that polls. It therefore stops after ``_TURN`` bytes, has
the descriptor watched again, and polls: heartbeats are due twice a second.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from backhaul._runtime import interrupts
from backhaul._transport.base import Channel, ChannelBrokenError, ChannelClosedError, Event, Lost, Received
from backhaul._transport.shm import shared_memory
from backhaul._transport.shm.copies import join
from backhaul._transport.shm.slots import Budget
from backhaul._transport.spin_wait import LONGEST, MAX_SPINS, SpinPolicy, offer
from backhaul._wire.frames import Frame, FrameReader
from backhaul._wire.memory import Buffer, Recycler
from backhaul.errors import ProtocolError

log = logging.getLogger("backhaul")

_COALESCE = 1 << 16  # a frame up to this size may be copied so as not to wait for another writer
_MAX_QUEUED = 16 << 20  # bytes of copied frames a channel holds before senders wait
_LONGEST = 1e6  # seconds; the system takes no longer waits than a few weeks
_PLEAS = 200  # times to look whether a thread that lingers has let go; it looks every microsecond or two
_MAX_PARTS = 512  # pieces per system call, well under the kernel's limit
_TURN = 4 << 20  # bytes that a thread which polls reads or writes before it looks after other things, see [Note: turns]


class Watcher(Protocol):
    """What a channel needs of its endpoint. Descriptors are watched for one event at a time."""

    limit: int
    buffers: int  # how many a frame may have
    quiet: bool  # see ``Endpoint``
    wakes: int  # how often somebody wanted a polling thread to look up
    recycler: Recycler
    shared: Budget

    def watch(self, fd: int, action: Callable[[], None], mask: int) -> None:
        """Call ``action`` once when ``fd`` is ready; ``arm`` for more."""

    def arm(self, fd: int, mask: int) -> None:
        """Watch ``fd`` for one more event. Does nothing once it, or the endpoint, is closed."""

    def forget(self, fd: int) -> None:
        """Watch ``fd`` no more; called before it is closed."""

    def flush_soon(self, channel: SocketChannel) -> None:
        """Call the channel's ``flush`` in about a millisecond."""

    def trim_later(self) -> None:
        """Call every channel's ``trim`` in some seconds."""


class SocketChannel(Channel):
    """A connected, authenticated socket."""

    def __init__(self, endpoint: Watcher, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._endpoint = endpoint
        self._sock = sock
        self._fd = sock.fileno()
        self._lender, self._borrower = _share(sock, endpoint.shared)
        slots = None if self._borrower is None else self
        self._reader = FrameReader(endpoint.limit, endpoint.recycler, slots, endpoint.buffers)
        self._holder: dict[int, object] = {}  # [0]: who reads, until it resumes; see [Note: interrupts]
        self._losing = False  # the holder is about to tell of the loss
        self._poller = select.poll()  # for receive; used by the holder
        self._poller.register(self._fd, select.POLLIN)
        self._luck = SpinPolicy()
        self._lingering = False  # the holder has nothing else to do
        self._wanted = False  # and another thread waits for the channel
        self._ended: str | None = None  # why the channel is over; set once
        self._writer: dict[int, object] = {}  # [0]: who writes to the socket, and may change _stalled
        self._waiters: collections.deque[threading.Lock] = collections.deque()  # of those who wait to write
        self._queue: collections.deque[Buffer] = collections.deque()  # memory of the channel's own
        self._queued = 0  # bytes in the queue
        self._counting = threading.Lock()  # guards the two above, held for no longer than they change
        self._stalled = False  # the queue waits for the socket; a poller goes on with it
        self._closing = False  # closed by this side; ends when the queue is written
        self._writable = False  # a poller was told so while another thread wrote: that one goes on with the queue
        self._out_fd = -1  # a second descriptor of the socket, to be told when it is writable
        self._written = 0  # bytes
        self._slotted = 0  # bytes in slots that frames have named
        self.bytes_received: int = 0
        self._control = 0  # those of them that were control frames

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """How many bytes have gone out, through shared memory too."""
        return self._written - self._control + self._slotted

    @property
    def backlog(self) -> int:
        return self._queued

    @property
    def slots_lent(self) -> int:
        """How many slots of shared memory the peer has."""
        return 0 if self._lender is None else self._lender.lent

    # Reading: by the one thread that holds the channel.

    def read(self) -> Event | None:
        """A poller was told that the channel is readable: take it, and return its frames or that it is lost."""
        mine = object()
        if self._holder.setdefault(0, mine) is not mine:
            return None  # somebody holds it, and arms it again
        event = self._read()
        if event is None:
            self.release()
        return event

    def acquire(self, holder: object = None) -> bool:
        if self._losing:  # its descriptor is another's by now; who has told of the loss is its holder still
            return False
        if holder is None:
            holder = object()
        if self._holder.setdefault(0, holder) is not holder and not (self._lingering and self._take_over(holder)):
            return False
        self._endpoint.arm(self._fd, 0)
        return True

    def _take_over(self, holder: object) -> bool:
        """Get the channel from a thread that lingers: who waits for something comes first."""
        self._wanted = True
        taken = False
        try:
            for _ in range(_PLEAS):
                taken = self._holder.setdefault(0, holder) is holder
                if taken or not self._lingering:
                    break
                time.sleep(0)  # lets go of the interpreter
        finally:  # also after an interrupt: nobody would arm the channel again
            self._wanted = False
            if not taken:
                self._endpoint.arm(self._fd, select.EPOLLIN)  # the other may have left that to us
        return taken

    def receive(self, timeout: float | None) -> Event | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._luck.begin()
        if self._luck.expecting:
            event = self._look()
            if event is not None:
                return event
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not interrupts.poll(self._poller, None if left is None else min(left, _LONGEST)):
                if left is not None and left <= _LONGEST:
                    return None
                continue
            event = self._read()
            if event is not None:
                return event

    def spin_read(self) -> Event | None:
        """The thread that read the channel last has nothing else to do: see whether more comes. If so, the channel is
        held as after ``read``.
        """
        mine = object()
        if not self._endpoint.quiet or not self._luck.expecting or self._holder.setdefault(0, mine) is not mine:
            return None
        self._endpoint.arm(self._fd, 0)
        self._lingering = True
        event = self._look()
        self._lingering = False
        if event is None:
            self.release()
        return event

    def _look(self) -> Event | None:
        """What comes within a moment, see [Note: looking]."""
        poll, endpoint = self._poller.poll, self._endpoint
        wakes, now = endpoint.wakes, time.perf_counter
        until = now() + LONGEST
        event = None
        for _ in range(MAX_SPINS):
            if not endpoint.quiet or endpoint.wakes != wakes or self._wanted:
                return None  # whoever is at work here wanted the interpreter: that says nothing of processors
            if poll(0) and (event := self._read()) is not None:
                break
            offer()
            if now() > until:
                break
        self._luck.looked()
        return event

    def _read(self) -> Event | None:
        """Frames, or that the channel is lost, or None if there is nothing whole to be had now, or not within one turn
        (see [Note: turns]).
        """
        reader = self._reader
        end = self.bytes_received + _TURN
        try:
            while True:
                count = self._sock.recv_into(reader.space)
                if not count:
                    midway = " in the middle of a frame" if reader.midway else ""
                    return self._lose(f"closed by the peer{midway}")
                self.bytes_received += count
                frames = reader.fed(count)
                if frames:
                    self._luck.end()
                    return Received(self, frames)
                if self.bytes_received >= end and not self._ahead():
                    return None
        except BlockingIOError:
            return None
        except ProtocolError as error:
            log.warning("closing the channel to %s: %s", self.peer, error)
            return self._lose(f"malformed input: {error}")
        except OSError as error:
            return self._lose(os.strerror(error.errno or 0))

    def _ahead(self) -> bool:
        """Whether bytes that were not read yet make no descriptor readable."""
        return False

    def resolve(self, place: int, size: int) -> Buffer:
        """See ``frames.Slots``."""
        assert self._borrower is not None
        return self._borrower.borrow(place, size)

    def control(self, kind: int, number: int, body: bytes) -> None:
        """See ``frames.Slots``."""
        assert self._borrower is not None
        if kind == shared_memory.OFFER:
            self._tell(self._borrower.offered(number, body))
        elif kind == shared_memory.RETIRE:
            self._borrower.retired(number)
        elif kind == shared_memory.ANSWER and self._lender is not None:
            self._lender.answered(number, body)
        else:
            raise ProtocolError(f"unexpected control frame of kind {kind}")

    @property
    def descriptor(self) -> int:
        return self._fd

    def take(self) -> Event | None:
        return self._read()

    def release(self) -> None:
        self._luck.begin()
        # In this order: armed first, a poller could find the channel still held and drop its event.
        self._holder.clear()
        if not self._wanted:  # else it is going to be held at once
            self._endpoint.arm(self._fd, select.EPOLLIN)

    def recover_after_interrupt(self, holder: object, *, whole: bool) -> Lost | None:
        mine = self._holder.get(0) is holder
        if mine and not whole:
            self._end("interrupted while it was read")
        if self._ended is not None and self._holder.setdefault(0, holder) is holder:
            return self._lose(self._ended)
        if mine:
            self._holder.clear()
        if not self._losing:
            self._endpoint.arm(self._fd, select.EPOLLIN)  # where it is not needed, it does no harm
        return None

    def _lose(self, reason: str) -> Lost:
        self._losing = True
        self._end(reason)
        self.free()
        return Lost(self, self._ended or reason)

    @interrupts.unwavering
    def free(self) -> None:
        """Close the descriptors. Only for the thread that holds the channel, or when nobody polls any more."""
        self._end("closed by this side")
        mine = object()
        try:
            self._await_turn(mine, None)  # a writer that waits has been woken by the shutdown in _end
            if self._sock.fileno() >= 0:  # else it is another's by now
                self._endpoint.forget(self._fd)
            if self._out_fd >= 0:
                self._endpoint.forget(self._out_fd)
                os.close(self._out_fd)
                self._out_fd = -1
            self._sock.close()
        finally:
            self._stop_writing(mine)
        if self._lender is not None:
            self._lender.close()
        if self._borrower is not None:
            self._borrower.close()
            self._reader.close()

    def sever(self) -> None:
        """See ``Endpoint.sever``."""
        self._ended = "this process was forked from a worker, and is none itself"
        self._closing = self._losing = True
        for fd in (self._sock.detach(), self._out_fd):
            if fd >= 0:
                os.close(fd)
        self._out_fd = -1

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader, which reports the loss

    def close(self) -> None:
        self._closing = True
        if self._writer:
            self._end("closed by this side")  # a writer waits in the middle of a frame: nothing whole can follow
            return
        self._flush_queue()

    @property
    def unread(self) -> bool:
        mine = object()
        try:
            self._writer.setdefault(0, mine)  # whoever writes keeps the descriptor from being closed
            poller = select.poll()
            poller.register(self._fd, select.POLLIN)
            return self._ended is None and bool(poller.poll(0))
        finally:
            self._stop_writing(mine)

    def abort(self, reason: str) -> None:
        self._closing = True
        self._end(reason)

    # Writing: one thread at a time writes; what others queue meanwhile goes out before it lets go.

    def send(self, frame: Frame, *, timeout: float | None = None) -> None:
        if self._ended is not None or self._closing:
            raise ChannelClosedError(f"the channel to {self.peer} is closed: {self._ended}")
        lender = self._lender
        if lender is None or not frame.buffers:
            self._send(frame.parts(), timeout)
            return
        places = lender.lend(frame.buffers)
        if places is not None:
            # Only now: the peer has seen nothing of this frame while it was copied, and has to be sent heartbeats.
            slotted = sum(len(buffer) for buffer, place in zip(frame.buffers, places, strict=True) if place)
            with self._counting:
                self._slotted += slotted
        self._send(frame.parts(places), timeout)
        if lender.news:
            self._tell_news()

    def _send(self, parts: list[Buffer], timeout: float | None) -> None:
        try:
            if self._writer.setdefault(0, parts) is not parts and (
                self._may_queue(parts) or not self._await_turn(parts, timeout)
            ):
                self._enqueue(join(parts, self._endpoint.recycler))
                self._flush_queue()
                return
            if not self._queue and not self._stalled:
                self._write(parts, timeout)
            else:  # others are in front: get behind them, then help if the socket takes it
                if not (self._stalled and self._may_queue(parts)):
                    self._write_queue(timeout)
                if self._stalled:
                    self._enqueue(join(parts, self._endpoint.recycler))
                else:
                    self._write(parts, timeout)
            self._writer.clear()
            if self._queue or self._closing or self._waiters:
                self._stop_writing(parts)
        except OSError as error:
            self._end(os.strerror(error.errno or 0))
            self._stop_writing(parts)
            raise ChannelBrokenError(f"the channel to {self.peer} broke: {self._ended}") from error
        except BaseException as error:
            if not interrupts.in_wait(error):
                self._end("interrupted while it was written")
            self._stop_writing(parts)
            raise

    def _await_turn(self, writer: object, timeout: float | None) -> bool:
        """Wait until nobody else writes; False if ``timeout`` seconds passed first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._writer.setdefault(0, writer) is not writer:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            # Once more, in this order: who lets go does so first and then looks for those who wait.
            if self._writer.setdefault(0, writer) is writer:
                break
            left = -1.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not interrupts.acquire(waiter, left):
                return False
        return True

    def _stop_writing(self, writer: object) -> None:
        """Let others write, if ``writer`` kept them from it, and see to what they have left."""
        if self._writer.get(0) is writer:
            self._writer.clear()
        while self._waiters:
            with contextlib.suppress(IndexError):  # another thread took it
                self._waiters.popleft().release()
        if self._queue or self._closing:
            self._flush_queue()

    def _may_queue(self, parts: list[Buffer]) -> bool:
        """Whether to copy these so as not to wait."""
        return self._queued < _MAX_QUEUED and len(parts) <= _MAX_PARTS and sum(map(len, parts)) <= _COALESCE

    def send_soon(self, frame: Frame, *, timeout: float | None = None) -> None:
        if frame.nbytes > _COALESCE or self._queued > _COALESCE:
            self.send(frame, timeout=timeout)
            return
        if self._ended is not None or self._closing:
            raise ChannelClosedError(f"the channel to {self.peer} is closed: {self._ended}")
        if self._enqueue(b"".join(frame.parts())):
            self._endpoint.flush_soon(self)

    def _tell(self, control: bytes) -> None:
        """Send a control frame, without waiting."""
        with contextlib.suppress(ChannelClosedError):
            self._send([control], 0)
        with self._counting:
            self._control += len(control)

    def _tell_news(self) -> None:
        assert self._lender is not None
        with contextlib.suppress(IndexError):  # another thread took it
            while self._lender.news:
                self._tell(self._lender.news.popleft())
        self._endpoint.trim_later()

    def trim(self) -> None:
        """Give shared memory back that is not used."""
        if self._lender is not None and self._ended is None:
            again = self._lender.trim()
            if self._lender.news or again:
                self._tell_news()

    def flush(self) -> None:
        self._flush_queue()

    def _enqueue(self, data: Buffer) -> bool:
        """Put something in the queue; whether it was empty before, so that somebody has to see to it."""
        with self._counting:
            empty = not self._queue
            self._queue.append(data)
            self._queued += len(data)
            return empty

    def _put_back(self, parts: Sequence[Buffer]) -> None:
        """Put the channel's own memory at the head of the queue."""
        with self._counting:
            self._queue.extendleft(reversed(parts))
            self._queued += sum(map(len, parts))

    def _dequeue(self) -> list[Buffer]:
        """Take what comes next from the queue, up to one turn."""
        batch: list[Buffer] = []
        left = _TURN
        with self._counting:
            while self._queue and len(batch) < _MAX_PARTS and left:
                part = self._queue.popleft()
                if len(part) > left:
                    whole = memoryview(part)
                    part, rest = whole[:left], whole[left:]
                    self._queue.appendleft(rest)
                batch.append(part)
                left -= len(part)
            self._queued -= _TURN - left
        return batch

    def _flush_queue(self) -> None:
        """Write what others queued while we wrote, unless somebody else is at it."""
        while self._queue and (self._writable or not self._stalled) and self._ended is None:
            mine = object()
            try:
                if self._writer.setdefault(0, mine) is not mine:
                    return  # the other looks at the queue again when it lets go
                if self._writable or not self._stalled:
                    self._write_queue(0.0)
                self._writer.clear()
            except OSError as error:
                self._end(os.strerror(error.errno or 0))
                self._writer.clear()
            except BaseException:
                self._end("interrupted while it was written")
                self._stop_writing(mine)
                raise
            if self._waiters:
                self._stop_writing(mine)
        if self._closing and not self._queue:
            self._end(self._ended or "closed by this side")

    def _write_queue(self, timeout: float | None) -> None:
        """Write what is queued; a thread that may not wait writes for one turn, see [Note: turns]."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._stalled = self._writable = False
        end = self._written + _TURN if timeout == 0 else None
        while self._queue and not self._stalled:
            if end is not None and self._written >= end:
                self._stall()
                return
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            self._write(self._dequeue(), left, own=True)

    def _write(self, parts: Sequence[Buffer], timeout: float | None, *, own: bool = False) -> None:
        """Write all parts; if the socket stays full for longer than that, leave the rest to a poller. ``own``: the
        memory is the channel's own, and need not be copied for that.
        """
        left = sum(map(len, parts))
        deadline = None
        while left:
            try:
                count = self._sock.sendmsg(parts if len(parts) <= _MAX_PARTS else parts[:_MAX_PARTS])
            except BlockingIOError:
                if timeout is not None and deadline is None:
                    deadline = time.monotonic() + timeout
                try:
                    if self._wait_writable(deadline):
                        continue
                except OSError:
                    raise
                except BaseException:  # an interrupt: others expect that a frame which has begun goes on
                    self._leave(parts, own)
                    raise
                self._leave(parts, own)
                return
            self._written += count
            left -= count
            if left:
                parts = _without(parts, count)

    def _wait_writable(self, deadline: float | None) -> bool:
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            ready = interrupts.poll(poller, None if left is None else min(left, _LONGEST))
            if self._ended is not None:
                raise OSError(errno.ESHUTDOWN, os.strerror(errno.ESHUTDOWN))
            if ready:
                return True

    def _leave(self, parts: Sequence[Buffer], own: bool) -> None:
        """Put the rest in the queue, and go on when the socket takes more."""
        self._put_back(parts if own else [join(parts, self._endpoint.recycler)])
        self._stall()

    def _stall(self) -> None:
        """Let a poller go on with the queue when the socket takes more."""
        self._stalled = True
        if self._out_fd < 0:
            self._out_fd = os.dup(self._fd)
            self._endpoint.watch(self._out_fd, self.write_on, select.EPOLLOUT)
        else:
            self._endpoint.arm(self._out_fd, select.EPOLLOUT)

    def write_on(self) -> None:
        """The socket takes more: go on with a stalled queue."""
        self._writable = True
        self._flush_queue()


def _without(parts: Sequence[Buffer], count: int) -> list[Buffer]:
    """The parts without their first ``count`` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[index + 1 :]]
        count -= len(part)
    return []


def _share(
    sock: socket.socket, budget: Budget
) -> tuple[shared_memory.HostLender | None, shared_memory.HostBorrower | None]:
    """The two ends of the channel's shared memory, where both processes are this host's and this user's."""
    if sock.family != socket.AF_UNIX:
        return None, None
    process, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if not budget.limit or user != os.geteuid() or not shared_memory.available():
        return None, shared_memory.HostBorrower(0)
    return shared_memory.HostLender(budget), shared_memory.HostBorrower(process)
