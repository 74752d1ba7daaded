"""A simulated network. It draws delays, losses and partitions from a seed, in virtual time.

Frames of one channel arrive in order, or not at all. Frames of different channels may overtake each other. The
scheduler's trace records everything that happens. This module does not decide which task runs; ``scheduler`` does.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from backhaul._sim.channel import SimChannel
from backhaul._sim.endpoints import SCHEME, ConnectAttempt, SimEndpoint
from backhaul._sim.partitions import Partitions
from backhaul._sim.scheduler import Scheduler
from backhaul._sim.tasks import SimProcess
from backhaul._transport.base import ConnectTimeoutError
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Recycler


@dataclass(slots=True)
class NetworkConditions:
    """How the network behaves; may be changed at any time.

    Attributes:
        delay: Seconds that a message takes, on average.
        slow: The probability that a message takes ``slowness`` times as long.
        slowness: See ``slow``.
        duplicates: The probability that an earlier attempt made a second channel, which gets the same first frame.
        breaks: The probability that a send breaks its channel.
        capacity: Bytes that a channel takes before a sender must wait for the receiver.
        silence_seconds: After this time a sender gives up a channel whose peer does not answer.
    """

    delay: float = 0.0002
    slow: float = 0.0
    slowness: float = 100.0
    duplicates: float = 0.0
    breaks: float = 0.0
    capacity: float = float("inf")
    silence_seconds: float = 30.0


class SimNetwork:
    """Carries frames between the endpoints of simulated processes. For tasks of one scheduler.

    Args:
        scheduler: The scheduler of the simulation.
        conditions: How the network behaves.

    Attributes:
        partitions: Which processes cannot reach each other.
        sent: The number of frames that were sent.
    """

    def __init__(self, scheduler: Scheduler, conditions: NetworkConditions | None = None) -> None:
        self.scheduler = scheduler
        self.conditions = conditions or NetworkConditions()
        self.partitions = Partitions()
        self.sent = 0
        self._numbers = itertools.count(1)
        self._endpoints: dict[str, SimEndpoint] = {}

    def endpoint(self, process: SimProcess) -> SimEndpoint:
        """Create an endpoint of a process."""
        address = f"{SCHEME}{process.name}/{next(self._numbers)}"
        made = self._endpoints[address] = SimEndpoint(self, process, address)
        return made

    @property
    def channels(self) -> list[SimChannel]:
        """All ends of open channels, in the order of their making."""
        found = [channel for end in self._endpoints.values() for channel in end.channels if channel.open]
        return sorted(found, key=hash)

    # Faults.

    def drop(self, channel: SimChannel, near: float, far: float) -> None:
        """Break a connection. What is under way is lost. ``channel`` and the other end learn of it after ``near`` and
        ``far`` seconds.
        """
        for end, seconds in ((channel, near), (channel.outgoing.other, far)):
            if end is not None:
                end.outgoing.severed = True
                self.scheduler.after(seconds, functools.partial(end.end, "connection reset by peer"))

    def crash(self, process: SimProcess, *, silent: bool = False) -> None:
        """Kill a process. Its peers see its channels close; if ``silent``, they see nothing."""
        draw = self.scheduler.random
        if silent:
            self.partitions.silence(process.name)
        for endpoint in [end for end in self._endpoints.values() if end.process is process]:
            endpoint.dead = True
            del self._endpoints[endpoint.addresses[0]]
            for channel in endpoint.channels:
                other = channel.outgoing.other
                if other is not None and not silent:
                    if draw.random() < 0.5:
                        other.outgoing.severed = channel.outgoing.severed = True  # what is under way is lost
                        self.scheduler.after(self._delay(), functools.partial(other.end, "connection reset by peer"))
                    else:
                        self._carry(channel, functools.partial(other.end, "closed by the peer"))
                channel.abandon()
        self.scheduler.kill(process)

    # Carrying.

    def _delay(self) -> float:
        conditions, draw = self.conditions, self.scheduler.random
        if not conditions.delay:
            return 0.0
        delay = draw.expovariate(1 / conditions.delay)
        return delay * conditions.slowness if draw.random() < conditions.slow else delay

    def _post(self, source: str, target: str, action: Callable[[], None]) -> None:
        """Carry something that is not a frame from one process to another."""
        waiting = self.partitions.waiting(source, target)
        if waiting is not None:
            waiting.append(functools.partial(self._post, source, target, action))
        else:
            self.scheduler.after(self._delay(), action)

    def _carry(self, channel: SimChannel, action: Callable[[], None]) -> None:
        """Carry something through a channel, after everything that was sent before."""
        outgoing = channel.outgoing
        if outgoing.severed:
            return
        waiting = self.partitions.waiting(channel.source, channel.target)
        if waiting is not None:
            held = [True]

            def release() -> None:
                held.clear()
                self._carry(channel, action)

            def give_up() -> None:
                if held and not outgoing.severed:
                    outgoing.severed = True
                    channel.end("timed out: the peer is silent")

            waiting.append(release)
            self.scheduler.after(self.conditions.silence_seconds, give_up)
            return
        if outgoing.other is not None and outgoing.other.endpoint.dead:  # its host answers that it has no connection
            outgoing.severed = True
            self.scheduler.after(self._delay(), functools.partial(channel.end, "connection reset by peer"))
            return
        now = self.scheduler.now
        when = max(now + self._delay(), outgoing.due)
        if when <= now:
            outgoing.arrive(action)
        else:
            outgoing.due = when
            self.scheduler.at(when, functools.partial(outgoing.arrive, action))

    def send(self, channel: SimChannel, frame: Frame) -> None:
        """Carry a frame through a channel."""
        self.sent += 1
        outgoing = channel.outgoing
        other, duplicate = outgoing.other, outgoing.duplicate
        if duplicate is not None:  # the earlier channel gets the frame first, and lives until the peer sees its end
            outgoing.duplicate = None
            outgoing.due = self.scheduler.now + self._delay()
            self._note("sent before", channel, frame)
            self.scheduler.at(outgoing.due, functools.partial(self._deliver, duplicate, frame.copied(Recycler())))
            self.scheduler.at(
                outgoing.due + self.scheduler.random.uniform(0.001, 3.0),
                functools.partial(duplicate.end, "closed by the peer"),
            )
        if other is not None:
            self._note("sends", channel, frame)
            self._carry(channel, functools.partial(self._deliver, other, frame))

    def _deliver(self, channel: SimChannel, frame: Frame) -> None:
        other = channel.outgoing.other
        if channel.open:
            self._note("gets", channel, frame)
            channel.put(frame)
        elif channel.outgoing.severed and other is not None:  # this end gave up in silence; now the sender learns of it
            self.scheduler.after(self._delay(), functools.partial(other.end, "connection reset by peer"))

    def _note(self, what: str, channel: SimChannel, frame: Frame) -> None:
        digest = zlib.crc32(frame.body)
        self.scheduler.trace.note(
            f"{self.scheduler.now:.9f} {channel.source} {what} {frame.kind} {frame.number} {frame.nbytes} {digest:x} "
            f"on {hash(channel)}"
        )

    def close(self, channel: SimChannel) -> None:
        """One end of a channel was closed. The other end learns of it after everything that was sent before."""
        other = channel.outgoing.other
        if other is not None:
            self._carry(channel, functools.partial(other.end, "closed by the peer"))

    # Connecting.

    def connect(self, endpoint: SimEndpoint, address: str, timeout: float) -> SimChannel:
        """See ``Endpoint.connect``."""
        target = address.removeprefix(SCHEME).rpartition("/")[0]
        attempt = ConnectAttempt(self.scheduler.running)
        source = endpoint.process.name
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

    def _reach(self, attempt: ConnectAttempt, endpoint: SimEndpoint, address: str, target: str) -> None:
        """The attempt has reached the process of the address."""
        there, source = self._endpoints.get(address), endpoint.process.name
        if there is not None and there.process.paused:
            again = functools.partial(self._reach, attempt, endpoint, address, target)
            there.process.on_resume.append(again)
            return
        if there is None or there.closed:
            problem = f"no endpoint listens at {address}"
            self._post(target, source, functools.partial(self._answer, attempt, None, problem))
            return
        mine = SimChannel(endpoint, address, target, next(self._numbers))
        theirs = SimChannel(there, endpoint.addresses[0], source, next(self._numbers))
        mine.outgoing.other, theirs.outgoing.other = theirs, mine
        there.channels[theirs] = None
        if self.scheduler.random.random() < self.conditions.duplicates:
            duplicate = mine.outgoing.duplicate = SimChannel(there, endpoint.addresses[0], source, next(self._numbers))
            there.channels[duplicate] = None
        self._post(target, source, functools.partial(self._answer, attempt, mine, ""))

    def _answer(self, attempt: ConnectAttempt, channel: SimChannel | None, problem: str) -> None:
        """The answer has reached the process that connects."""
        if channel is not None and (attempt.given_up or channel.endpoint.closed or channel.endpoint.dead):
            if channel.outgoing.duplicate is not None:
                channel.outgoing.duplicate.end("closed by the peer")
            channel.abandon()
            self.close(channel)
            return
        if attempt.given_up:
            return  # its task waits for something else by now
        if channel is not None:
            channel.endpoint.channels[channel] = None
        attempt.channel, attempt.problem = channel, problem
        self.scheduler.wake(attempt.task)

    def forget(self, endpoint: SimEndpoint) -> None:
        """An endpoint does not listen any more."""
        self._endpoints.pop(endpoint.addresses[0], None)
