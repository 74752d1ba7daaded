"""A network that exists in a simulation only: delays, losses and partitions drawn from a seed, in virtual time.

Frames of one channel arrive in order or not at all; those of different channels overtake each other. Everything that
happens is noted in the scheduler's trace. What runs when is the business of ``strands``.
"""

from __future__ import annotations

import collections
import functools
import itertools
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from backhaul.transport.base import (
    Channel,
    ChannelBrokenError,
    ChannelClosedError,
    ConnectTimeoutError,
    Endpoint,
    Event,
    Lost,
    Received,
)
from backhaul.transport.bell import Bell
from backhaul.transport.luck import Luck
from backhaul.transport.strands import Home, Scheduler, Strand
from backhaul.wire.frames import Frame
from backhaul.wire.memory import Recycler

_SCHEME = "sim:"


@dataclass(slots=True)
class Weather:
    """How the network behaves; may be changed at any time.

    Attributes:
        delay: Seconds that a message takes, on average.
        slow: How often one takes much longer, ``slowness`` times.
        slowness: How many times.
        duplicates: How often a new connection is preceded by one of which the peer sees the same first frame.
        breaks: How often a send breaks its channel.
        capacity: Bytes that a channel takes before a sender has to wait for the receiver.
        patience: Seconds after which a sender gives up a channel whose peer is silent.
    """

    delay: float = 0.0002
    slow: float = 0.0
    slowness: float = 100.0
    duplicates: float = 0.0
    breaks: float = 0.0
    capacity: float = float("inf")
    patience: float = 30.0


@dataclass(slots=True)
class _Attempt:
    """Somebody connects."""

    strand: Strand
    channel: SimChannel | None = None
    problem: str = ""
    given_up: bool = False


@dataclass(slots=True)
class _Cut:
    """One direction between two homes carries nothing; what was sent waits."""

    held: list[Callable[[], None]] = field(default_factory=list)


class SimNetwork:
    """All that is between workers. For strands of one scheduler.

    Args:
        scheduler: Of the simulation.
        weather: How it behaves.
    """

    def __init__(self, scheduler: Scheduler, weather: Weather | None = None) -> None:
        self.scheduler = scheduler
        self.weather = weather or Weather()
        self.sent = 0  # frames
        self._numbers = itertools.count(1)
        self._endpoints: dict[str, SimEndpoint] = {}
        self._cuts: dict[tuple[str, str], _Cut] = {}
        self._silent: set[str] = set()  # homes that died without a word

    def endpoint(self, home: Home) -> SimEndpoint:
        """Make an endpoint of a worker."""
        address = f"{_SCHEME}{home.name}/{next(self._numbers)}"
        made = self._endpoints[address] = SimEndpoint(self, home, address)
        return made

    @property
    def channels(self) -> list[SimChannel]:
        """All ends of channels that are not closed, in the order of their making."""
        found = [channel for end in self._endpoints.values() for channel in end.channels if channel.open]
        return sorted(found, key=hash)

    # Faults.

    def cut(self, source: str, target: str) -> None:
        """Let nothing get from one home to another, until ``heal``."""
        self._cuts.setdefault((source, target), _Cut())

    def heal(self, source: str, target: str) -> None:
        """Deliver what waited, and all that follows."""
        cut = self._cuts.pop((source, target), None)
        for action in cut.held if cut is not None else ():
            action()

    def heal_all(self) -> None:
        """End all partitions."""
        for source, target in list(self._cuts):
            self.heal(source, target)

    def drop(self, channel: SimChannel, near: float, far: float) -> None:
        """Break a channel: what is under way is lost. Its two ends learn of it after so many seconds."""
        other = channel.other
        for end, seconds in ((channel, near), (other, far)):
            if end is not None:
                end.severed = True
                self.scheduler.after(seconds, functools.partial(end.end, "connection reset by peer"))

    def crash(self, home: Home, *, silent: bool = False) -> None:
        """End a worker at once. Its peers see its channels close, or if ``silent`` nothing at all."""
        draw = self.scheduler.random
        if silent:
            self._silent.add(home.name)
        for endpoint in [end for end in self._endpoints.values() if end.home is home]:
            endpoint.dead = True
            del self._endpoints[endpoint.addresses[0]]
            for channel in endpoint.channels:
                other = channel.other
                if other is not None and not silent:
                    if draw.random() < 0.5:
                        other.severed = channel.severed = True  # what is under way is lost
                        self.scheduler.after(self._delay(), functools.partial(other.end, "connection reset by peer"))
                    else:
                        self._carry(channel, functools.partial(other.end, "closed by the peer"))
                channel.forsake()
        self.scheduler.kill(home)

    def returns(self, home: str) -> None:
        """A worker of that name is there again: from now on it answers, if only that it knows nothing."""
        self._silent.discard(home)
        for source, target in list(self._cuts):
            if home in (source, target):
                self.heal(source, target)

    # Carrying.

    def _delay(self) -> float:
        weather, draw = self.weather, self.scheduler.random
        if not weather.delay:
            return 0.0
        delay = draw.expovariate(1 / weather.delay)
        return delay * weather.slowness if draw.random() < weather.slow else delay

    def _blocked(self, source: str, target: str) -> _Cut | None:
        if target in self._silent or source in self._silent:
            return _Cut()  # nobody will ever look
        return self._cuts.get((source, target))

    def _post(self, source: str, target: str, action: Callable[[], None]) -> None:
        """Something that is not a frame goes from one home to another."""
        cut = self._blocked(source, target)
        if cut is not None:
            cut.held.append(functools.partial(self._post, source, target, action))
        else:
            self.scheduler.after(self._delay(), action)

    def _carry(self, channel: SimChannel, action: Callable[[], None]) -> None:
        """Something goes through a channel, behind all that went before."""
        if channel.severed:
            return
        cut = self._blocked(channel.home, channel.target)
        if cut is not None:
            waiting = [True]

            def release() -> None:
                waiting.clear()
                self._carry(channel, action)

            def give_up() -> None:
                if waiting and not channel.severed:
                    channel.severed = True
                    channel.end("timed out: the peer is silent")

            cut.held.append(release)
            self.scheduler.after(self.weather.patience, give_up)
            return
        if channel.other is not None and channel.other.endpoint.dead:  # its host is there, and knows of no connection
            channel.severed = True
            self.scheduler.after(self._delay(), functools.partial(channel.end, "connection reset by peer"))
            return
        now = self.scheduler.now
        when = max(now + self._delay(), channel.due)
        if when <= now:
            channel.arrive(action)
        else:
            channel.due = when
            self.scheduler.at(when, functools.partial(channel.arrive, action))

    def send(self, channel: SimChannel, frame: Frame) -> None:
        """A frame goes through a channel."""
        self.sent += 1
        other, ghost = channel.other, channel.ghost
        if ghost is not None:  # what was tried before came first, and is there until the peer learns that it is over
            channel.ghost = None
            channel.due = self.scheduler.now + self._delay()
            self._note("sent before", channel, frame)
            self.scheduler.at(channel.due, functools.partial(self._deliver, ghost, frame.copied(Recycler())))
            self.scheduler.at(
                channel.due + self.scheduler.random.uniform(0.001, 3.0),
                functools.partial(ghost.end, "closed by the peer"),
            )
        if other is not None:
            self._note("sends", channel, frame)
            self._carry(channel, functools.partial(self._deliver, other, frame))

    def _deliver(self, channel: SimChannel, frame: Frame) -> None:
        if channel.open:
            self._note("gets", channel, frame)
            channel.put(frame)
        elif channel.severed and channel.other is not None:  # it was given up in silence; now the sender hears of it
            self.scheduler.after(self._delay(), functools.partial(channel.other.end, "connection reset by peer"))

    def _note(self, what: str, channel: SimChannel, frame: Frame) -> None:
        digest = zlib.crc32(frame.body)
        self.scheduler.trace.note(
            f"{self.scheduler.now:.9f} {channel.home} {what} {frame.kind} {frame.number} {frame.nbytes} {digest:x} "
            f"on {hash(channel)}"
        )

    def close(self, channel: SimChannel) -> None:
        """One end of a channel was closed: the other learns of it behind all that was sent."""
        if channel.other is not None:
            self._carry(channel, functools.partial(channel.other.end, "closed by the peer"))

    # Connecting.

    def connect(self, endpoint: SimEndpoint, address: str, timeout: float) -> SimChannel:
        """See ``Endpoint.connect``."""
        target = address.removeprefix(_SCHEME).rpartition("/")[0]
        attempt = _Attempt(self.scheduler.running)
        source = endpoint.home.name
        endpoint.attempts.append(attempt)
        self.scheduler.trace.note(f"{self.scheduler.now:.9f} {source} connects to {target}")
        self._post(source, target, functools.partial(self._reach, attempt, endpoint, address, target))
        try:
            deadline = self.scheduler.now + timeout
            while attempt.channel is None and not attempt.problem:
                if not self.scheduler.wait(f"a connection to {target}", deadline - self.scheduler.now):
                    break
        finally:
            attempt.given_up = True
            endpoint.attempts.remove(attempt)
        if attempt.channel is not None:
            return attempt.channel
        if attempt.problem:
            raise ConnectionRefusedError(attempt.problem)
        raise ConnectTimeoutError(f"{address} did not answer within {timeout:g} s")

    def _reach(self, attempt: _Attempt, endpoint: SimEndpoint, address: str, target: str) -> None:
        there, source = self._endpoints.get(address), endpoint.home.name
        if there is not None and there.home.paused:
            again = functools.partial(self._reach, attempt, endpoint, address, target)
            there.home.on_resume.append(again)
            return
        if there is None or there.closed:
            self._post(target, source, functools.partial(self._answer, attempt, None, f"nobody listens at {address}"))
            return
        mine = SimChannel(endpoint, address, target, next(self._numbers))
        theirs = SimChannel(there, endpoint.addresses[0], source, next(self._numbers))
        mine.other, theirs.other = theirs, mine
        there.channels[theirs] = None
        if self.scheduler.random.random() < self.weather.duplicates:
            mine.ghost = SimChannel(there, endpoint.addresses[0], source, next(self._numbers))
            there.channels[mine.ghost] = None
        self._post(target, source, functools.partial(self._answer, attempt, mine, ""))

    def _answer(self, attempt: _Attempt, channel: SimChannel | None, problem: str) -> None:
        if channel is not None and (attempt.given_up or channel.endpoint.closed or channel.endpoint.dead):
            if channel.ghost is not None:
                channel.ghost.end("closed by the peer")
            channel.forsake()
            self.close(channel)
            return
        if channel is not None:
            channel.endpoint.channels[channel] = None
        attempt.channel, attempt.problem = channel, problem
        self.scheduler.wake(attempt.strand)

    def forget(self, endpoint: SimEndpoint) -> None:
        """An endpoint does not listen any more."""
        self._endpoints.pop(endpoint.addresses[0], None)


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
        self._senders: list[Strand] = []  # wait for room
        self._armed = True  # not held, and not on the endpoint's list
        self._reader: Strand | None = None
        self.bell: SimBell | None = None
        self._ended: str | None = None
        self._told = False

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
        weather, draw = self._network.weather, self._scheduler.random
        if weather.breaks and draw.random() < weather.breaks:
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
        capacity = self._network.weather.capacity
        deadline = None if timeout is None else self._scheduler.now + timeout
        while self._ended is None and self._unread and self._unread + size > capacity:
            left = None if deadline is None else deadline - self._scheduler.now
            if left is not None and left <= 0:
                return
            self._senders.append(self._scheduler.running)
            self._scheduler.wait(f"room in the channel to {self.peer}", left)
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
            if self.other is not None:
                self.other._make_room(frames)
            return Received(self, frames)
        if self._ended is not None and not self._told:
            self._told = True
            self.endpoint.channels.pop(self, None)
            return Lost(self, self._ended)
        return None

    def hold(self) -> bool:
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

    def resume(self) -> None:
        if self._told:
            return
        self._armed = True
        if self.readable:
            self._notify()

    # The end.

    def close(self) -> None:
        if self._ended is None and not self.endpoint.dead:
            self.end("closed by this side")
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


class SimBell(Bell):
    """See ``Bell``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._rung = False
        self._listener: Strand | None = None

    def ring(self) -> None:
        self._rung = True
        self.notice()

    def notice(self) -> None:
        """Whoever listens has a look."""
        if self._listener is not None:
            self._scheduler.wake(self._listener)

    def listen(self, channels: Collection[Channel], timeout: float | None, *, look: bool) -> list[Channel]:
        ours = [channel for channel in channels if isinstance(channel, SimChannel)]
        if not self._rung and not any(channel.readable for channel in ours):
            self._listener = self._scheduler.running
            for channel in ours:
                channel.bell = self
            try:
                self._scheduler.wait(f"any of {len(ours)} channels", timeout)
            finally:
                self._listener = None
                for channel in ours:
                    channel.bell = None
        return [channel for channel in ours if channel.readable]

    def hush(self) -> None:
        self._rung = False

    def close(self) -> None:
        """Nothing to free."""


class SimEndpoint(Endpoint):
    """A worker's end of the network."""

    def __init__(self, network: SimNetwork, home: Home, address: str) -> None:
        self.addresses = (address,)
        self.network = network
        self.home = home
        self.channels: dict[SimChannel, None] = {}
        self.attempts: list[_Attempt] = []
        self.recycler = Recycler()
        self.closed = False
        self.dead = False
        self._scheduler = network.scheduler
        self._ready: list[SimChannel | None] = []  # None: a poll is to end
        self._pollers: list[Strand] = []

    def connect(self, address: str, *, timeout: float) -> Channel:
        if not address.startswith(_SCHEME):
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

    def bell(self, luck: Luck) -> Bell:
        return SimBell(self._scheduler)

    def close(self) -> None:
        if self.closed or self.dead:
            return
        self.closed = True
        self.network.forget(self)
        for attempt in self.attempts:
            attempt.problem = f"{self.addresses[0]} is closed"
            self._scheduler.wake(attempt.strand)
        for channel in list(self.channels):
            channel.close()
