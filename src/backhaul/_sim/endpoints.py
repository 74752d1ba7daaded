"""The ends of a simulated network: endpoints and channels, at which strands wait. What lies between is ``sim``'s."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backhaul._sim.scheduler import Scheduler, SimProcess, SimTask
from backhaul._transport.base import Channel, ChannelBrokenError, ChannelClosedError, Endpoint, Event, Lost, Received
from backhaul._transport.spin_wait import SpinPolicy
from backhaul._transport.waiter import ChannelWaiter
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Recycler

if TYPE_CHECKING:
    from backhaul._sim.network import SimNetwork

SCHEME = "sim:"


@dataclass(slots=True)
class Attempt:
    """Somebody connects."""

    sim_task: SimTask
    channel: SimChannel | None = None
    problem: str = ""
    given_up: bool = False


class SimChannel(Channel):
    """One end of a connection."""

    def __init__(self, endpoint: SimEndpoint, peer: str, target: str, number: int) -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.home = endpoint.home.name
        self.target = target  # the home of the other end
        self.other: SimChannel | None = None
        self.ghost: SimChannel | None = None  # at the other end: one that was tried before this one
        self.severed = False  # nothing that this end sends arrives any more
        self.due = 0.0  # when the last of what was sent arrives
        self._network = endpoint.network
        self._scheduler = endpoint.network.scheduler
        self._number = number
        self._inbox: collections.deque[Frame] = collections.deque()
        self._unread = 0  # bytes that this end has sent and the other has not taken
        self._senders: list[SimTask] = []  # wait for room
        self._armed = True  # not held, and not on the endpoint's list
        self._reader: SimTask | None = None
        self.bell: SimChannelWaiter | None = None
        self._ended: str | None = None
        self._told = False
        self.bytes_received: int = 0

    def __hash__(self) -> int:
        """Where channels are in sets, their order has to be the same in every run."""
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def open(self) -> bool:
        """Whether frames may come and go."""
        return self._ended is None

    @property
    def readable(self) -> bool:
        """Whether ``take`` has something."""
        return bool(self._inbox) or (self._ended is not None and not self._told)

    # Sending.

    def send(self, frame: Frame, *, timeout: float | None = None) -> None:
        if self.endpoint.dead:
            return  # a strand of a dead worker, on its way out
        if self._ended is not None:
            raise ChannelClosedError(f"the channel to {self.peer} is closed")
        copy = frame.copied(self.endpoint.recycler)
        self._wait_for_room(frame.nbytes, timeout)
        conditions, draw = self._network.conditions, self._scheduler.random
        if conditions.breaks and draw.random() < conditions.breaks:
            if draw.random() < 0.5:
                self._network.send(self, copy)
            self._scheduler.trace.note(f"{self._scheduler.now:.9f} {self.home} breaks {self._number}")
            self._network.drop(self, 0.0, draw.uniform(0.0, 2.0))
            raise ChannelBrokenError(f"the channel to {self.peer} broke")
        self._unread += copy.nbytes
        self._network.send(self, copy)
        self.bytes_sent += copy.nbytes
        self._scheduler.give_way()

    def _wait_for_room(self, size: int, timeout: float | None) -> None:
        capacity = self._network.conditions.capacity
        deadline = None if timeout is None else self._scheduler.now + timeout
        while self._ended is None and self._unread and self._unread + size > capacity:
            left = None if deadline is None else deadline - self._scheduler.now
            if left is not None and left <= 0:
                return
            me = self._scheduler.running
            self._senders.append(me)
            try:
                self._scheduler.wait(f"room in the channel to {self.peer}", left)
            finally:
                if me in self._senders:
                    self._senders.remove(me)
        if self._ended is not None:
            raise ChannelClosedError(f"the channel to {self.peer} is closed")

    def _make_room(self, frames: Collection[Frame]) -> None:
        self._unread -= sum(frame.nbytes for frame in frames)
        for sender in self._senders:
            self._scheduler.wake(sender)
        self._senders.clear()

    # Receiving.

    def arrive(self, action: Callable[[], None]) -> None:
        """Something that this end sent comes to the other."""
        if not self.severed:
            action()

    def put(self, frame: Frame) -> None:
        """A frame has come."""
        self._inbox.append(frame)
        self._notify()

    def _notify(self) -> None:
        if self._armed:
            self._armed = False
            self.endpoint.offer(self)
        elif self._reader is not None:
            self._scheduler.wake(self._reader)
        elif self.bell is not None:
            self.bell.notice()

    def take(self) -> Event | None:
        if self._inbox:
            frames = list(self._inbox)
            self._inbox.clear()
            self.bytes_received += sum(frame.nbytes for frame in frames)
            if self.other is not None:
                self.other._make_room(frames)
            return Received(self, frames)
        if self._ended is not None and not self._told:
            self._told = True
            self.endpoint.channels.pop(self, None)
            return Lost(self, self._ended)
        return None

    def acquire(self, holder: object = None) -> bool:
        if self._told:
            return False
        if self._armed:
            self._armed = False
            return True
        if self.endpoint.withdraw(self):
            return True
        self._scheduler.give_way(surely=True)  # whoever asks again and again lets others go on
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
        if self._told:
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
        if self._ended is None and not self.endpoint.dead:
            self.end(reason)
            self._network.close(self)

    def end(self, reason: str) -> None:
        """No more frames come or go here."""
        if self._ended is not None or self.endpoint.dead:
            return
        self._scheduler.trace.note(f"{self._scheduler.now:.9f} {self.home} loses {self._number}: {reason}")
        self._ended = reason
        self._make_room(())
        self._notify()

    def forsake(self) -> None:
        """Nobody at this end is there to be told."""
        self._ended = "dead"
        self._told = True


class SimChannelWaiter(ChannelWaiter):
    """See ``ChannelWaiter``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._rung = False
        self._waiter: SimTask | None = None

    def claim(self) -> None:
        """Who listens looks for itself all the same."""

    def register(self, channels: list[Channel]) -> None:
        """Nothing to keep."""

    def wake(self) -> None:
        self._rung = True
        self.notice()

    def notice(self) -> None:
        """Whoever listens has a look."""
        if self._waiter is not None:
            self._scheduler.wake(self._waiter)

    def wait(self, channels: list[Channel], timeout: float | None, *, spin: bool) -> list[Channel]:
        ours = [channel for channel in channels if isinstance(channel, SimChannel)]
        if not self._rung and not any(channel.readable for channel in ours):
            self._waiter = self._scheduler.running
            for channel in ours:
                channel.bell = self
            try:
                self._scheduler.wait(f"any of {len(ours)} channels", timeout)
            finally:
                self._waiter = None
                for channel in ours:
                    channel.bell = None
        self._rung = False
        return [channel for channel in ours if channel.readable]

    def close(self) -> None:
        """Nothing to free."""


class SimEndpoint(Endpoint):
    """A worker's end of the network."""

    def __init__(self, network: SimNetwork, home: SimProcess, address: str) -> None:
        self.addresses = (address,)
        self.network = network
        self.home = home
        self.channels: dict[SimChannel, None] = {}
        self.attempts: list[Attempt] = []
        self.recycler = Recycler()
        self.closed = False
        self.dead = False
        self._scheduler = network.scheduler
        self._ready: list[SimChannel | None] = []  # None: a poll is to end
        self._pollers: list[SimTask] = []

    def connect(self, address: str, *, timeout: float) -> Channel:
        if not address.startswith(SCHEME):
            raise ValueError(f"not an address of the simulation: {address!r}")
        if self.closed:
            raise ConnectionRefusedError(f"{self.addresses[0]} is closed")
        return self.network.connect(self, address, timeout)

    def offer(self, item: SimChannel | None) -> None:
        """Let one thread that polls have it, or the next that comes."""
        while self._pollers:
            place = int(self._scheduler.random.random() * len(self._pollers))
            if self._scheduler.wake(self._pollers.pop(place), gift=(item,)):
                return
        self._ready.append(item)

    def withdraw(self, channel: SimChannel) -> bool:
        """Take back what nobody has got hold of; whether that was so."""
        if channel in self._ready:
            self._ready.remove(channel)
            return True
        return False

    def poll(self, timeout: float | None) -> Event | None:
        if self._ready:
            place = int(self._scheduler.random.random() * len(self._ready))
            item = self._ready.pop(place)
        elif timeout is not None and timeout <= 0:
            return None
        else:
            me = self._scheduler.running
            self._pollers.append(me)
            try:
                came = self._scheduler.wait("events", timeout)
            finally:
                if me in self._pollers:
                    self._pollers.remove(me)
            if not came:
                return None
            (item,), me.gift = me.gift, None
        return item.take() if item is not None else None

    def wake(self) -> None:
        self.offer(None)
        self._scheduler.give_way()

    def wake_soon(self) -> None:
        self._scheduler.after(0.001, functools.partial(self.offer, None))

    def make_waiter(self, policy: SpinPolicy) -> ChannelWaiter:
        return SimChannelWaiter(self._scheduler)

    def close(self) -> None:
        if self.closed or self.dead:
            return
        self.closed = True
        self.network.forget(self)
        for attempt in self.attempts:
            attempt.problem = f"{self.addresses[0]} is closed"
            self._scheduler.wake(attempt.sim_task)
        for channel in list(self.channels):
            channel.close()
