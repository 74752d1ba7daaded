"""Channels of a simulated network. Sim tasks send, receive and wait here; ``network`` carries the frames."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from backhaul._sim.scheduler import Scheduler
from backhaul._sim.tasks import SimTask
from backhaul._transport.base import Channel, ChannelBrokenError, ChannelClosedError, Event, Lost, Received
from backhaul._wire.frames import Frame

if TYPE_CHECKING:
    from backhaul._sim.endpoints import SimChannelWaiter, SimEndpoint


class SendDirection:
    """The direction of a connection in which one end sends. Frames arrive in order, or not at all.

    Attributes:
        target: The name of the process at the other end.
        other: The other end, once there is one.
        duplicate: A channel at the other end that an earlier attempt to connect made, if it gets the first frame too.
        severed: Whether nothing that is sent from now on arrives.
        due: When the last frame that was sent arrives.
    """

    __slots__ = ("due", "duplicate", "other", "severed", "target")

    def __init__(self, target: str) -> None:
        self.target = target
        self.other: SimChannel | None = None
        self.duplicate: SimChannel | None = None
        self.severed = False
        self.due = 0.0

    def arrive(self, action: Callable[[], None]) -> None:
        """Let something that was sent take effect at the other end, unless the connection broke meanwhile."""
        if not self.severed:
            action()


class _SendWindow:
    """Flow control: how much one end has sent that the other has not read."""

    __slots__ = ("_scheduler", "_senders", "_unread_bytes")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._unread_bytes = 0
        self._senders: list[SimTask] = []  # wait for room

    def add(self, size: int) -> None:
        """Account for bytes that are sent."""
        self._unread_bytes += size

    def is_full(self, size: int, capacity: float) -> bool:
        """Whether ``size`` more bytes must wait."""
        return bool(self._unread_bytes) and self._unread_bytes + size > capacity

    def wait(self, where: str, timeout: float | None) -> None:
        """Wait until the other end reads something, or until the channel ends."""
        me = self._scheduler.running
        self._senders.append(me)
        try:
            self._scheduler.wait(where, timeout)
        finally:
            if me in self._senders:
                self._senders.remove(me)

    def make_room(self, frames: Collection[Frame]) -> None:
        """Account for frames that the other end has read, and wake all senders."""
        self._unread_bytes -= sum(frame.nbytes for frame in frames)
        for sender in self._senders:
            self._scheduler.wake(sender)
        self._senders.clear()


# Over the limit because the interface Channel has most of its methods.
class SimChannel(Channel):
    """One end of a connection.

    Attributes:
        outgoing: What the network knows about the direction in which this end sends.
        waiter: What listens to this channel among others, if anything does.
    """

    def __init__(self, endpoint: SimEndpoint, peer: str, target: str, number: int) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.outgoing = SendDirection(target)
        self.waiter: SimChannelWaiter | None = None
        self.bytes_received: int = 0
        self._window = _SendWindow(endpoint.network.scheduler)
        self._number = number
        self._inbox: collections.deque[Frame] = collections.deque()
        self._armed = True  # no thread has acquired it, and it is not on the endpoint's list
        self._reader: SimTask | None = None
        self._end_reason: str | None = None
        self._end_reported = False

    def __hash__(self) -> int:
        """A number, because the order of channels in sets must be the same in every run."""
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def source(self) -> str:
        """The name of the process at this end."""
        return self.endpoint.process.name

    @property
    def target(self) -> str:
        """The name of the process at the other end."""
        return self.outgoing.target

    @property
    def _scheduler(self) -> Scheduler:
        return self.endpoint.network.scheduler

    @property
    def open(self) -> bool:
        """Whether frames can be sent and received."""
        return self._end_reason is None

    @property
    def readable(self) -> bool:
        """Whether ``take`` returns an event."""
        return bool(self._inbox) or (self._end_reason is not None and not self._end_reported)

    # Sending.

    def send(self, frame: Frame, *, timeout: float | None = None) -> None:
        if self.endpoint.dead:
            return  # a task of a dead worker is being unwound
        if self._end_reason is not None:
            raise ChannelClosedError(f"the channel to {self.peer} is closed")
        network = self.endpoint.network
        copy = frame.copied(self.endpoint.recycler)
        self._wait_for_room(frame.nbytes, timeout)
        conditions, draw = network.conditions, self._scheduler.random
        if conditions.breaks and draw.random() < conditions.breaks:
            if draw.random() < 0.5:
                network.send(self, copy)
            self._scheduler.trace.note(f"{self._scheduler.now:.9f} {self.source} breaks {self._number}")
            network.drop(self, 0.0, draw.uniform(0.0, 2.0))
            raise ChannelBrokenError(f"the channel to {self.peer} broke")
        self._window.add(copy.nbytes)
        network.send(self, copy)
        self.bytes_sent += copy.nbytes
        self._scheduler.give_way()

    def _wait_for_room(self, size: int, timeout: float | None) -> None:
        capacity = self.endpoint.network.conditions.capacity
        deadline = None if timeout is None else self._scheduler.now + timeout
        while self._end_reason is None and self._window.is_full(size, capacity):
            left = None if deadline is None else deadline - self._scheduler.now
            if left is not None and left <= 0:
                return
            self._window.wait(f"room in the channel to {self.peer}", left)
        if self._end_reason is not None:
            raise ChannelClosedError(f"the channel to {self.peer} is closed")

    # Receiving.

    def put(self, frame: Frame) -> None:
        """Receive a frame."""
        self._inbox.append(frame)
        self._notify()

    def _notify(self) -> None:
        if self._armed:
            self._armed = False
            self.endpoint.offer(self)
        elif self._reader is not None:
            self._scheduler.wake(self._reader)
        elif self.waiter is not None:
            self.waiter.notice()

    def take(self) -> Event | None:
        if self._inbox:
            frames = list(self._inbox)
            self._inbox.clear()
            self.bytes_received += sum(frame.nbytes for frame in frames)
            if self.outgoing.other is not None:
                self.outgoing.other.acknowledge(frames)
            return Received(self, frames)
        if self._end_reason is not None and not self._end_reported:
            self._end_reported = True
            self.endpoint.channels.pop(self, None)
            return Lost(self, self._end_reason)
        return None

    def acknowledge(self, frames: Collection[Frame]) -> None:
        """Account for frames of this end that the other end has read."""
        self._window.make_room(frames)

    def acquire(self, holder: object = None) -> bool:
        if self._end_reported:
            return False
        if self._armed:
            self._armed = False
            return True
        if self.endpoint.withdraw(self):
            return True
        self._scheduler.give_way(always=True)  # a task that asks in a loop must let others run
        return False

    def receive(self, timeout: float | None) -> Event | None:
        deadline = None if timeout is None else self._scheduler.now + timeout
        while (event := self.take()) is None:
            left = None if deadline is None else deadline - self._scheduler.now
            if left is not None and left <= 0:
                return None
            self._reader = self._scheduler.running
            try:
                self._scheduler.wait(f"the channel to {self.peer}", left)
            finally:
                self._reader = None
        return event

    def release(self) -> None:
        if self._end_reported:
            return
        self._armed = True
        if self.readable:
            self._notify()

    @property
    def unread(self) -> bool:
        return bool(self._inbox)

    # The end.

    def close(self) -> None:
        self.abort("closed by this side")

    def abort(self, reason: str) -> None:
        if self._end_reason is None and not self.endpoint.dead:
            self.end(reason)
            self.endpoint.network.close(self)

    def end(self, reason: str) -> None:
        """End this side of the connection. No more frames can be sent or received here."""
        if self._end_reason is not None or self.endpoint.dead:
            return
        self._scheduler.trace.note(f"{self._scheduler.now:.9f} {self.source} loses {self._number}: {reason}")
        self._end_reason = reason
        self._window.make_room(())
        self._notify()

    def abandon(self) -> None:
        """End this side without an event, because its process is dead or never got the channel."""
        self._end_reason = "dead"
        self._end_reported = True
