"""A network that exists in a simulation only: delays, losses and partitions drawn from a seed, in virtual time.

Frames of one channel arrive in order or not at all; those of different channels overtake each other. Everything that
happens is noted in the scheduler's trace. What runs when is the business of ``strands``.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from backhaul._sim.endpoints import SCHEME, Attempt, SimChannel, SimEndpoint
from backhaul._sim.scheduler import Scheduler, SimProcess
from backhaul._transport.base import ConnectTimeoutError
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Recycler


@dataclass(slots=True)
class NetworkConditions:
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
class _Cut:
    """One direction between two homes carries nothing; what was sent waits."""

    held: list[Callable[[], None]] = field(default_factory=list)


class SimNetwork:
    """All that is between workers. For strands of one scheduler.

    Args:
        scheduler: Of the simulation.
        weather: How it behaves.
    """

    def __init__(self, scheduler: Scheduler, conditions: NetworkConditions | None = None) -> None:
        self.scheduler = scheduler
        self.conditions = conditions or NetworkConditions()
        self.sent = 0  # frames
        self._numbers = itertools.count(1)
        self._endpoints: dict[str, SimEndpoint] = {}
        self._cuts: dict[tuple[str, str], _Cut] = {}
        self._silent: set[str] = set()  # homes that died without a word

    def endpoint(self, home: SimProcess) -> SimEndpoint:
        """Make an endpoint of a worker."""
        address = f"{SCHEME}{home.name}/{next(self._numbers)}"
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

    def crash(self, home: SimProcess, *, silent: bool = False) -> None:
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
        conditions, draw = self.conditions, self.scheduler.random
        if not conditions.delay:
            return 0.0
        delay = draw.expovariate(1 / conditions.delay)
        return delay * conditions.slowness if draw.random() < conditions.slow else delay

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
            self.scheduler.after(self.conditions.patience, give_up)
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
        target = address.removeprefix(SCHEME).rpartition("/")[0]
        attempt = Attempt(self.scheduler.running)
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

    def _reach(self, attempt: Attempt, endpoint: SimEndpoint, address: str, target: str) -> None:
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
        if self.scheduler.random.random() < self.conditions.duplicates:
            mine.ghost = SimChannel(there, endpoint.addresses[0], source, next(self._numbers))
            there.channels[mine.ghost] = None
        self._post(target, source, functools.partial(self._answer, attempt, mine, ""))

    def _answer(self, attempt: Attempt, channel: SimChannel | None, problem: str) -> None:
        if channel is not None and (attempt.given_up or channel.endpoint.closed or channel.endpoint.dead):
            if channel.ghost is not None:
                channel.ghost.end("closed by the peer")
            channel.forsake()
            self.close(channel)
            return
        if attempt.given_up:
            return  # its strand waits for other things
        if channel is not None:
            channel.endpoint.channels[channel] = None
        attempt.channel, attempt.problem = channel, problem
        if not attempt.given_up:  # else that strand waits for something else by now
            self.scheduler.wake(attempt.sim_task)

    def forget(self, endpoint: SimEndpoint) -> None:
        """An endpoint does not listen any more."""
        self._endpoints.pop(endpoint.addresses[0], None)
