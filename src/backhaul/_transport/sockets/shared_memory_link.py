"""The shared memory of one channel: what this process lends to the peer, and what it borrows.

Large buffers travel there, and the frames on the socket name their places. Knows the socket only as a writer of
control frames.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from backhaul._transport.base import ChannelClosedError
from backhaul._transport.shm import host_memory, segments
from backhaul._transport.shm.slots import Budget
from backhaul._transport.sockets.epoll_set import EpollSet
from backhaul._wire.memory import Buffer
from backhaul.errors import ProtocolError

_TRIM_SECONDS = 5.0  # until unused shared memory is given back


class Trimmer:
    """Gives unused shared memory back, some seconds after it was used. Thread-safe."""

    def __init__(self, descriptors: EpollSet) -> None:
        self._timer = descriptors.add_timer(self._trim)
        self._lock = threading.Lock()  # guards the links
        self._links: set[SharedMemoryLink] = set()

    def trim_later(self, link: SharedMemoryLink) -> None:
        """Call the link's ``trim`` in some seconds."""
        with self._lock:
            first = not self._links
            self._links.add(link)
        if first:
            self._timer.start(_TRIM_SECONDS)

    def _trim(self) -> None:
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            link.trim()


class SharedMemoryLink:
    """Both directions of a channel's shared memory. Thread-safe, but ``resolve`` and ``control`` are for the thread
    that reads the channel (``frames.Slots``).

    Attributes:
        news: Control frames that wait to be sent.
        counted: What to add to the bytes written to the socket to get the bytes sent: those in slots that frames have
            named, less those of control frames.
    """

    def __init__(
        self,
        lender: host_memory.HostLender | None,
        borrower: host_memory.HostBorrower,
        write: Callable[[list[Buffer], float | None], None],
        trimmer: Trimmer,
    ) -> None:
        self.counted = 0
        self._lender = lender
        self._borrower = borrower
        self._write = write
        self._trimmer = trimmer
        self._lock = threading.Lock()  # guards counted, and is held only while it changes
        self._closed = False
        self.news: Sequence[bytes] = () if lender is None else lender.news

    @property
    def slots_lent(self) -> int:
        """How many slots the peer has."""
        return 0 if self._lender is None else self._lender.lent

    def lend(self, buffers: Sequence[Buffer]) -> list[int] | None:
        """Copy large buffers into slots. Returns the places of all buffers (0: inline), or None if all go inline."""
        places = None if self._lender is None else self._lender.lend(buffers)
        if places is not None:
            # Counted after the copy: the peer sees nothing of the frame meanwhile, so heartbeats must be sent.
            slotted = sum(len(buffer) for buffer, place in zip(buffers, places, strict=True) if place)
            with self._lock:
                self.counted += slotted
        return places

    def resolve(self, place: int, size: int) -> Buffer:
        """See ``frames.Slots``."""
        return self._borrower.borrow(place, size)

    def control(self, kind: int, number: int, body: bytes) -> None:
        """See ``frames.Slots``."""
        if kind == host_memory.OFFER:
            self._tell(self._borrower.offered(number, body))
        elif kind == host_memory.RETIRE:
            self._borrower.retired(number)
        elif kind == host_memory.ANSWER and self._lender is not None:
            self._lender.answered(number, body)
        else:
            raise ProtocolError(f"unexpected control frame of kind {kind}")

    def _tell(self, control: bytes) -> None:
        """Send a control frame without waiting."""
        with contextlib.suppress(ChannelClosedError):
            self._write([control], 0)
        with self._lock:
            self.counted -= len(control)

    def send_news(self) -> None:
        """Send the control frames that wait."""
        assert self._lender is not None
        with contextlib.suppress(IndexError):  # another thread took it
            while self._lender.news:
                self._tell(self._lender.news.popleft())
        self._trimmer.trim_later(self)

    def trim(self) -> None:
        """Give back memory that is not used."""
        if self._lender is not None and not self._closed:
            again = self._lender.trim()
            if self._lender.news or again:
                self.send_news()

    def close(self) -> None:
        """The channel is lost: free everything that the peer lent or borrowed."""
        self._closed = True
        if self._lender is not None:
            self._lender.close()
        self._borrower.close()


def link_to_peer(
    sock: socket.socket, budget: Budget, write: Callable[[list[Buffer], float | None], None], trimmer: Trimmer
) -> SharedMemoryLink | None:
    """The channel's shared memory; None if the peer may be on another host. Lends only to processes of this user."""
    if sock.family != socket.AF_UNIX:
        return None
    process, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if not budget.limit or user != os.geteuid() or not segments.available():
        return SharedMemoryLink(None, host_memory.HostBorrower(0), write, trimmer)
    return SharedMemoryLink(host_memory.HostLender(budget), host_memory.HostBorrower(process), write, trimmer)
