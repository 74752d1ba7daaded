"""A connected, authenticated socket as a channel: which thread may read it, and how frames enter and leave it.

``socket_writer`` writes the bytes, ``shared_memory_link`` moves large buffers between processes of one host.

[Note: turns] If the peer is as fast as this end, a thread can read a large frame, or write a long queue, for many
seconds without a pause. That thread may be the only one that polls, and heartbeats are due twice a second. So the
thread stops after ``TURN_BYTES``, arms the descriptor again, and polls.

[Note: parking] In a burst every frame would wake a thread that polls. That thread would take the interpreter from the
thread that has work to do: the one that sends the burst, or the one that runs what has come. So a channel is *parked*
then: it is held by no thread, but the epoll set does not wait for it. A thread that waits for a reply takes it from
there. Otherwise it is released when the thread that parked it has nothing more to do or waits, or after one or two
milliseconds.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from typing import Protocol

from backhaul._runtime import interrupts
from backhaul._transport.base import Channel, ChannelClosedError, Event, Lost, Received
from backhaul._transport.shm import host_memory
from backhaul._transport.shm.slots import Budget
from backhaul._transport.sockets.connection import Connection
from backhaul._transport.sockets.epoll_set import ONE_SHOT
from backhaul._transport.sockets.lane_reader import LaneReader
from backhaul._transport.sockets.shared_memory_link import Trimmer, link_to_peer
from backhaul._transport.sockets.socket_writer import TURN_BYTES, SocketWriter, WriterOwner
from backhaul._transport.sockets.write_queue import MAX_COPIED_BYTES
from backhaul._transport.spin_wait import Busyness, SpinLimit, SpinPolicy
from backhaul._wire.frame_reader import FrameReader
from backhaul._wire.frames import Frame
from backhaul.errors import ProtocolError

log = logging.getLogger("backhaul")

_TAKE_OVER_TRIES = 200  # to take a channel from a thread that spins and checks ``wanted`` every microsecond or two
_MAX_QUEUED_FRAMES = 32  # small frames that wait for each other
_LONG_READ_BYTES = 1 << 18
_SILENT = ONE_SHOT
_READABLE = select.EPOLLIN | ONE_SHOT


class ChannelOwner(WriterOwner, Busyness, Protocol):
    """What a channel needs from its endpoint."""

    limit: int
    """The largest frame to accept, in bytes."""

    buffers: int
    """How many buffers a frame may have."""

    parked: set[SocketChannel]
    spin_limit: SpinLimit
    budget: Budget
    trimmer: Trimmer

    def flush_soon(self, channel: SocketChannel) -> None:
        """Call the channel's ``flush`` in about a millisecond."""


# Over the limit because the interfaces it implements, Channel and what endpoints need, have 19 of its methods.
class SocketChannel(Channel):
    """A connected, authenticated socket.

    One thread at a time holds the channel and reads it. While no thread holds it, the endpoint's epoll set waits for
    it. A thread of the endpoint that has nothing else to do may hold the channel only to spin; it gives way to a
    thread that wants to hold it.

    Attributes:
        wanted: Whether another thread wants to take the channel from the thread that spins.
    """

    def __init__(self, endpoint: ChannelOwner, sock: socket.socket, peer: str, lanes: LaneReader | None = None) -> None:
        self.peer = peer
        self.bytes_received: int = 0
        self._endpoint = endpoint
        self._connection = Connection(sock, peer, None if lanes is None else lanes.fd)
        self._writer = SocketWriter(self._connection, endpoint)
        self._shared = link_to_peer(sock, endpoint.budget, self._writer.write, endpoint.trimmer)
        self._reader = FrameReader(endpoint.limit, endpoint.recycler, self._shared, endpoint.buffers, lanes)
        self._holder: dict[int, object] = {}  # [0]: the thread that reads, until it releases; see [Note: interrupts]
        self._poller = select.poll()  # for ``receive``; used by the holder
        self._poller.register(self._connection.watched, select.POLLIN)
        self._idle_poller = select.poll()  # for ``spin_read``: this channel, and all others
        self._idle_poller.register(self._connection.watched, select.POLLIN)
        self._idle_poller.register(endpoint.descriptors.fd, select.POLLIN)
        self._own = (self._connection.watched,)
        self._all = (self._connection.watched, endpoint.descriptors.fd)
        self._spin_policy = SpinPolicy(endpoint.spin_limit)  # used by the holder
        self._parked: list[object] = []  # whoever takes the entry out of it holds the channel; see [Note: parking]
        self._since = 0.0  # when the wait for the next message began
        self._spinning = False  # the holder has nothing else to do
        self.wanted = False

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        """How many bytes were sent, through shared memory too."""
        return self._writer.written + (0 if self._shared is None else self._shared.counted)

    @property
    def backlog(self) -> int:
        return self._writer.queue.nbytes

    @property
    def slots_lent(self) -> int:
        """How many slots of shared memory the peer has."""
        return 0 if self._shared is None else self._shared.slots_lent

    # Reading: by the thread that holds the channel.

    def read(self) -> Event | None:
        """The epoll set has found the channel readable: hold it, and return its frames or its loss."""
        mine = object()
        if self._holder.setdefault(0, mine) is not mine:
            return None  # another thread holds it, and arms it when it releases
        event = self._read()
        if event is None:
            self.release()
        return event

    def acquire(self, holder: object = None) -> bool:
        if self._connection.lost:  # the thread that has reported the loss holds it for good
            return False
        if holder is None:
            holder = object()
        if self._holder.setdefault(0, holder) is holder:
            self._arm(_SILENT)
            return True
        if self._parked and self._unpark():
            self._holder[0] = holder
            return True
        if self._spinning and self._take_over(holder):
            self._arm(_SILENT)
            return True
        return False

    def park(self) -> None:
        self._parked.append(None)
        self._endpoint.parked.add(self)

    def unpark(self) -> None:
        """Let the channel deliver again if it is parked."""
        if self._unpark():
            self.release()

    def _unpark(self) -> bool:
        """Whether the calling thread holds the channel now, which was parked."""
        try:
            self._parked.pop()
        except IndexError:  # another thread was faster
            return False
        return True

    def _take_over(self, holder: object) -> bool:
        """Take the channel from a thread that spins: a thread that waits for a reply has priority."""
        self.wanted = True
        self._endpoint.signal[0] += 1
        taken = False
        try:
            for _ in range(_TAKE_OVER_TRIES):
                taken = self._holder.setdefault(0, holder) is holder
                if taken or not self._spinning:
                    break
                time.sleep(0)  # releases the interpreter
        finally:  # also after an interrupt, because no other thread would arm the channel
            self.wanted = False
            if not taken:
                self._arm(_READABLE)  # if ``wanted`` is set, the thread that spun does not arm the channel
        return taken

    def receive(self, timeout: float | None) -> Event | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._since = time.perf_counter()
        if self._spin_policy.spin_if_worthwhile(self._poller.poll, self._endpoint, self, timeout, self._own):
            event = self._read()
            if event is not None:
                return event
        while interrupts.poll(self._poller, None if deadline is None else deadline - time.monotonic()):
            event = self._read()
            if event is not None:
                return event
        return None

    def spin_read(self, timeout: float | None) -> Event | None:
        """The thread that read the channel last has nothing else to do: spin for more. If there is more, the thread
        holds the channel as after ``read``. If another channel has an event, the thread stops.
        """
        mine, endpoint = object(), self._endpoint
        self._since = time.perf_counter()
        alone = not self._spin_policy.allows_company
        if (
            (alone and not endpoint.quiet)
            or (alone and endpoint.spinner is not None)  # a thread that waits for a reply would compete with this one
            or not self._spin_policy.should_spin()
            or self._holder.setdefault(0, mine) is not mine
        ):
            return None
        self._arm(_SILENT)
        self._spinning = True
        ready = self._spin_policy.spin(self._idle_poller.poll, endpoint, self, timeout, self._all)
        self._spinning = False
        event = self._read() if ready else None
        if event is None:
            self.release()
        return event

    def _read(self) -> Event | None:
        """Read frames, or the loss of the channel. None if no complete frame has arrived, or none within one turn (see
        [Note: turns]).
        """
        reader = self._reader
        recv_into = self._connection.sock.recv_into
        end = self.bytes_received + TURN_BYTES
        try:
            while True:
                count = recv_into(reader.space)
                if not count:
                    midway = " in the middle of a frame" if reader.midway else ""
                    return self._lose(f"closed by the peer{midway}")
                self.bytes_received += count
                frames = reader.fed(count)
                if frames:
                    self._spin_policy.waited = time.perf_counter() - self._since
                    return Received(self, frames)
                if (self.bytes_received >= end and not self._has_buffered()) or reader.blocked:
                    return None
                if count >= _LONG_READ_BYTES:
                    os.sched_yield()  # else threads with little to do wait for the end of this thread's time slice
        except BlockingIOError:
            return None
        except ProtocolError as error:
            log.warning("closing the channel to %s: %s", self.peer, error, extra={"peer": self.peer})
            return self._lose(f"malformed input: {error}")
        except OSError as error:
            return self._lose(error.strerror or str(error))

    def _has_buffered(self) -> bool:
        """Whether there are bytes to read that the descriptor does not report, such as decrypted bytes of TLS."""
        return False

    @property
    def descriptor(self) -> int:
        return self._connection.watched

    def take(self) -> Event | None:
        return self._read()

    def release(self) -> None:
        self._since = time.perf_counter()
        # In this order: if the channel were armed first, a poll could find it still held and drop its event.
        self._holder.clear()
        if not self.wanted:  # else another thread is about to hold it
            self._arm(_READABLE)

    def _arm(self, mask: int) -> None:
        """Set the events that the epoll set waits for. Does not call ``EpollSet.arm``, to save a call per message."""
        try:
            self._endpoint.descriptors.modify(self._connection.watched, mask)
        except (OSError, ValueError):  # the channel, or the endpoint, is closed
            pass

    def recover_after_interrupt(self, holder: object, *, whole: bool) -> Lost | None:
        connection = self._connection
        mine = self._holder.get(0) is holder
        if mine and not whole:
            connection.end("interrupted while a thread read it")
        if connection.ended is not None and self._holder.setdefault(0, holder) is holder:
            return self._lose(connection.ended)
        if mine:
            self._holder.clear()
        if not connection.lost:
            self._arm(_READABLE)  # arming an armed channel does no harm
        return None

    # Writing.

    def send(self, frame: Frame, *, timeout: float | None = None) -> None:
        if self._connection.ended is not None or self._writer.closing:
            raise self._closed_error()
        shared = self._shared
        if shared is None or not frame.buffers:
            self._writer.write(frame.parts(), timeout)
            return
        places = None
        for buffer in frame.buffers:
            if len(buffer) >= host_memory.THRESHOLD:
                places = shared.lend(frame.buffers)
                break
        self._writer.write(frame.parts(places), timeout)
        if shared.news:
            shared.send_news()

    def send_soon(self, frame: Frame, *, timeout: float | None = None) -> None:
        queue = self._writer.queue
        if frame.nbytes > MAX_COPIED_BYTES or queue.nbytes > MAX_COPIED_BYTES:
            self.send(frame, timeout=timeout)
            return
        if self._connection.ended is not None or self._writer.closing:
            raise self._closed_error()
        if queue.append(b"".join(frame.parts())):
            self._flush_soon()
        elif len(queue.parts) >= _MAX_QUEUED_FRAMES:
            self._writer.flush()

    def _flush_soon(self) -> None:
        """Write the queue in about a millisecond, and read nothing meanwhile."""
        holder, parked = object(), list[None]()
        try:
            # In this order: the timer that ``flush_soon`` starts also unparks. It may expire before that returns.
            if not self._parked and self.acquire(holder):
                parked[:] = map(self._parked.append, (None,))  # no signal handler runs between the two
                self._endpoint.parked.add(self)
            self._endpoint.flush_soon(self)
        except BaseException:  # a signal handler raised, see [Note: interrupts]: no other thread would go on with these
            if parked:
                self._endpoint.parked.add(self)
            elif self._holder.get(0) is holder:
                self.release()
            self._endpoint.flush_soon(self)
            raise

    def _closed_error(self) -> ChannelClosedError:
        reason = self._connection.ended or "closed by this side"
        return ChannelClosedError(f"the channel to {self.peer} is closed: {reason}")

    def flush(self) -> None:
        self._writer.flush()

    # The end.

    def _lose(self, reason: str) -> Lost:
        self._connection.lost = True
        reason = self._connection.end(reason)
        self.free()
        return Lost(self, reason)

    @interrupts.uninterruptible
    def free(self) -> None:
        """Close the descriptors. Only for the thread that holds the channel, or when no thread polls any more."""
        self._connection.end("closed by this side")
        self._writer.free()
        if self._shared is not None:
            self._shared.close()
            self._reader.close()

    def close(self) -> None:
        self._writer.close()

    def abort(self, reason: str) -> None:
        self._writer.abort(reason)

    @property
    def unread(self) -> bool:
        return self._writer.while_open(self._is_readable)

    def _is_readable(self) -> bool:
        poller = select.poll()
        poller.register(self._connection.watched, select.POLLIN)
        return self._connection.ended is None and bool(poller.poll(0))

    def sever(self) -> None:
        """See ``Endpoint.sever``."""
        self._connection.sever()
        self._writer.sever()
