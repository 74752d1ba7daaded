"""Endpoints of a simulated network, at which sim tasks wait. ``network`` is what lies between."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backhaul._sim.channel import SimChannel
from backhaul._sim.scheduler import Scheduler
from backhaul._sim.tasks import SimProcess, SimTask
from backhaul._transport.base import Channel, Endpoint, Event
from backhaul._transport.waiter import ChannelWaiter
from backhaul._wire.memory import Recycler

if TYPE_CHECKING:
    from backhaul._sim.network import SimNetwork

SCHEME = "sim:"


@dataclass(slots=True)
class ConnectAttempt:
    """A task that connects. The network sets the channel, or the problem, and wakes the task."""

    task: SimTask
    channel: SimChannel | None = None
    problem: str = ""
    given_up: bool = False


class SimChannelWaiter(ChannelWaiter):
    """See ``ChannelWaiter``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._rung = False
        self._waiter: SimTask | None = None

    def claim(self) -> None:
        """Nothing to do: a listener checks the channels itself."""

    def register(self, channels: list[Channel]) -> None:
        """Nothing to do."""

    def wake(self) -> None:
        self._rung = True
        self.notice()

    def notice(self) -> None:
        """Let the task that listens check the channels again."""
        if self._waiter is not None:
            self._scheduler.wake(self._waiter)

    def wait(self, channels: list[Channel], timeout: float | None, *, spin: bool) -> list[Channel]:
        ours = [channel for channel in channels if isinstance(channel, SimChannel)]
        if not self._rung and not any(channel.readable for channel in ours):
            self._waiter = self._scheduler.running
            for channel in ours:
                channel.waiter = self
            try:
                self._scheduler.wait(f"any of {len(ours)} channels", timeout)
            finally:
                self._waiter = None
                for channel in ours:
                    channel.waiter = None
        self._rung = False
        return [channel for channel in ours if channel.readable]

    def close(self) -> None:
        """Nothing to do."""


class SimEndpoint(Endpoint):
    """A worker's end of the network.

    Attributes:
        channels: Its channels that have not reported their end, in the order of their making.
        attempts: Attempts to connect that are under way.
        closed: Whether the worker has closed it.
        dead: Whether its process was killed.
    """

    def __init__(self, network: SimNetwork, process: SimProcess, address: str) -> None:
        self.addresses = (address,)
        self.network = network
        self.process = process
        self.channels: dict[SimChannel, None] = {}
        self.attempts: list[ConnectAttempt] = []
        self.recycler = Recycler()
        self.closed = False
        self.dead = False
        self._scheduler = network.scheduler
        self._ready: list[SimChannel | None] = []  # None: one poll must return
        self._pollers: list[SimTask] = []

    def connect(self, address: str, *, timeout: float) -> Channel:
        if not address.startswith(SCHEME):
            raise ValueError(f"{address!r} is not an address of the simulation; those start with {SCHEME!r}")
        if self.closed:
            raise ConnectionRefusedError(f"{self.addresses[0]} is closed")
        return self.network.connect(self, address, timeout)

    def offer(self, item: SimChannel | None) -> None:
        """Hand a channel to one task that polls, or to the next task that does."""
        while self._pollers:
            place = int(self._scheduler.random.random() * len(self._pollers))
            if self._scheduler.wake(self._pollers.pop(place), item=(item,)):
                return
        self._ready.append(item)

    def withdraw(self, channel: SimChannel) -> bool:
        """Take back an offered channel. Returns whether no task had taken it yet."""
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
                woken = self._scheduler.wait("events", timeout)
            finally:
                if me in self._pollers:
                    self._pollers.remove(me)
            if not woken:
                return None
            (item,), me.item = me.item, None
        return item.take() if item is not None else None

    def wake(self) -> None:
        self.offer(None)
        self._scheduler.give_way()

    def wake_soon(self) -> None:
        self._scheduler.after(0.001, functools.partial(self.offer, None))

    def make_waiter(self) -> ChannelWaiter:
        return SimChannelWaiter(self._scheduler)

    def close(self) -> None:
        if self.closed or self.dead:
            return
        self.closed = True
        self.network.forget(self)
        for attempt in self.attempts:
            attempt.problem = f"{self.addresses[0]} is closed"
            self._scheduler.wake(attempt.task)
        for channel in list(self.channels):
            channel.close()
