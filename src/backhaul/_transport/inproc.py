"""Channels between workers of one process. They are queues. Each frame is copied once, so that each side has its own
memory.
"""

from __future__ import annotations

import collections
import itertools
import queue
import threading
import weakref

from backhaul._transport.base import Channel, ChannelClosedError, Endpoint, Event, Lost, Received
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Recycler

_numbers = itertools.count()
_endpoints: weakref.WeakValueDictionary[str, InprocEndpoint] = weakref.WeakValueDictionary()


class InprocChannel(Channel):
    """One end of a pair. The other end fills its inbox."""

    def __init__(self, endpoint: InprocEndpoint, peer: str) -> None:
        self.peer = peer
        self._endpoint = endpoint
        self._other: InprocChannel | None = None
        self._lock = threading.Lock()  # guards all below
        self._inbox: collections.deque[Frame] = collections.deque()
        self._armed = True  # not held, and not in the endpoint's queue of ready channels
        self._ended: str | None = None  # why no more frames will come
        self._loss_reported = False

    def pair_with(self, other: InprocChannel) -> None:
        """Connect the two ends of a channel."""
        self._other, other._other = other, self

    def send(self, frame: Frame, *, timeout: float | None = None) -> None:
        other = self._other
        if self._ended is not None or other is None:
            raise ChannelClosedError(f"the channel to {self.peer} is closed: {self._ended}")
        other._put(frame.copied(other._endpoint.recycler))
        with self._lock:
            self.bytes_sent += frame.nbytes

    def _put(self, frame: Frame) -> None:
        with self._lock:
            if self._ended is not None:
                raise ChannelClosedError(f"the channel to {self._endpoint.addresses[0]} is closed")
            self._inbox.append(frame)
            ready, self._armed = self._armed, False
        if ready:
            self._endpoint._ready.put(self)

    def take(self) -> Event | None:
        """Return the event for which this channel is in the queue of ready channels."""
        with self._lock:
            if self._inbox:
                frames = list(self._inbox)
                self._inbox.clear()
                return Received(self, frames)
            if self._ended is not None and not self._loss_reported:
                self._loss_reported = True
                return Lost(self, self._ended)
            return None

    def release(self) -> None:
        with self._lock:
            more = bool(self._inbox) or (self._ended is not None and not self._loss_reported)
            self._armed = not more
        if more:
            self._endpoint._ready.put(self)

    def close(self) -> None:
        self._end("closed by this side")
        if self._other is not None:
            self._other._end("closed by the peer")

    def abort(self, reason: str) -> None:
        self._end(reason)
        self.close()

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = reason
            ready, self._armed = self._armed, False
        if ready:
            self._endpoint._ready.put(self)


class InprocEndpoint(Endpoint):
    """A worker's end: a queue of channels that have an event."""

    def __init__(self) -> None:
        self.addresses = (f"inproc:{next(_numbers)}",)
        # Not a SimpleQueue: with several waiting threads, a wait with a timeout may last for ever (Python 3.11).
        self._ready: queue.Queue[InprocChannel | None] = queue.Queue()
        self._lock = threading.Lock()  # guards _channels and _closed
        self._channels: list[InprocChannel] = []
        self._closed = False
        self.recycler = Recycler()
        _endpoints[self.addresses[0]] = self

    def connect(self, address: str, *, timeout: float) -> Channel:
        if not address.startswith("inproc:"):
            raise ValueError(f"not an address in this process: {address!r} (inproc:number)")
        there = _endpoints.get(address)
        if there is None:
            raise ConnectionRefusedError(f"no worker of this process listens at {address}")
        mine, theirs = InprocChannel(self, address), InprocChannel(there, self.addresses[0])
        mine.pair_with(theirs)
        self._adopt(mine)
        try:
            there._adopt(theirs)
        except ConnectionError:
            with self._lock:
                self._channels.remove(mine)
            raise
        return mine

    def _adopt(self, channel: InprocChannel) -> None:
        with self._lock:
            if self._closed:
                raise ConnectionRefusedError(f"{self.addresses[0]} is closed")
            self._channels.append(channel)

    def poll(self, timeout: float | None) -> Event | None:
        try:
            channel = self._ready.get(timeout=timeout)
        except queue.Empty:
            return None
        if channel is None:
            return None
        event = channel.take()
        if isinstance(event, Lost):
            with self._lock:
                self._channels.remove(channel)
        return event

    def wake(self) -> None:
        self._ready.put(None)

    def close(self) -> None:
        _endpoints.pop(self.addresses[0], None)
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()
