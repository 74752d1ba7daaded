"""Asks to join a running cluster: the joiner's side, before it is a worker. The members' side is in ``enrollment``.

The joiner asks any member, which names the leader, and then asks the leader. The leader enrolls the joiner and tells it
its id and epoch, and who the members are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul._runtime import interrupts
from backhaul._runtime.runtime import Runtime
from backhaul._transport.base import Channel, ChannelClosedError, Endpoint, Lost
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import Departure, Join, Kind, Refuse, Welcome, pack, unpack
from backhaul._wire.value_count import LEVELS, excess
from backhaul.errors import AuthenticationError, ProtocolError, RendezvousError

_RETRY_SECONDS = 0.2  # before the joiner asks again
_ANSWER_SECONDS = 10.0  # for the answer at one address, the leader's included; doubled once that was not enough
_INTERRUPT_SECONDS = 0.1  # between checks for interrupts
_MAX_REDIRECTS = 8  # from a member that is not the leader to the next


class _UnansweredError(Exception):
    """A member has not said whether the joiner may join."""


class Enrolled(NamedTuple):
    """What the leader told the joiner.

    Attributes:
        own: The joiner's record, with its id and epoch.
        others: The records of the members.
        leader: The leader's record, if it is among them.
        left: Proofs of workers that have left.
        greeted: The ids of the members to which the joiner says hello; None: to all.
    """

    own: WorkerRecord
    others: list[WorkerRecord]
    leader: WorkerRecord | None
    left: tuple[Departure, ...]
    greeted: tuple[int, ...] | None

    @property
    def epoch(self) -> int:
        """The latest epoch of which the leader has told."""
        return max(record.epoch for record in (self.own, *self.others))


def ask_to_join(
    endpoint: Endpoint, own: WorkerRecord, addresses: Sequence[str], timeout: float, runtime: Runtime
) -> Enrolled:
    """Ask the members at these addresses to let a joiner in.

    Raises ``RendezvousError``, ``AuthenticationError``.
    """
    deadline, allowed = runtime.now() + timeout, _ANSWER_SECONDS
    problems: dict[str, str] = {}
    while True:
        began = runtime.now()
        for number, address in enumerate(addresses):
            now = runtime.now()
            share = (deadline - now) / (len(addresses) - number)  # leaves time for the addresses that follow
            try:
                answer = _ask_leader(endpoint, own, address, now + min(allowed, share), runtime)
            except _UnansweredError as error:
                problems.setdefault(address, str(error))  # what a member has answered before tells more
                continue
            if isinstance(answer, Enrolled):
                return answer
            problems[address] = answer.reason
            if not answer.later:
                break
        else:
            if runtime.now() + _RETRY_SECONDS < deadline:
                if runtime.now() >= began + allowed:  # a leader may have to probe a silent member first
                    allowed *= 2
                runtime.one_shot().wait(_RETRY_SECONDS)
                continue
        why = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
        raise RendezvousError(f"worker '{own.name}' cannot join: {why}", worker=own.name)


def _ask_leader(
    endpoint: Endpoint, own: WorkerRecord, address: str, deadline: float, runtime: Runtime
) -> Enrolled | Refuse:
    """Ask the member at ``address``, then the member that it names as the leader, until one enrolls or refuses."""
    for _ in range(_MAX_REDIRECTS):
        try:
            channel = endpoint.connect(address, timeout=max(deadline - runtime.now(), 0.001))
        except AuthenticationError as error:
            raise AuthenticationError(f"cannot join at {address}: {error}") from None
        except ConnectionError as error:
            raise _UnansweredError(str(error)) from None
        try:
            answer = _ask(endpoint, channel, own, deadline, runtime)
        except (ChannelClosedError, TimeoutError) as error:
            raise _UnansweredError(str(error)) from None
        finally:
            channel.abort("asked")
        if isinstance(answer, Refuse):
            return answer
        record = unpack(answer.record, WorkerRecord)
        if record.incarnation == own.incarnation:
            others = [unpack(other, WorkerRecord) for other in answer.members]
            leader = next((other for other in others if address in other.addresses), None)
            return Enrolled(record, others, leader, answer.left, answer.greeted)
        found = choose(record, own.host)
        if found is None:
            return Refuse(f"the leader '{record.name}' is on another host and listens only on its own")
        address = found
    return Refuse("the members do not agree on who is the leader", later=True)


def _ask(
    endpoint: Endpoint, channel: Channel, own: WorkerRecord, deadline: float, runtime: Runtime
) -> Welcome | Refuse:
    """Ask one member. No other thread polls the endpoint yet."""
    channel.send(Frame(Kind.JOIN, 0, pack(Join(pack(own)))))
    while (left := deadline - runtime.now()) > 0:
        event = endpoint.poll(min(left, _INTERRUPT_SECONDS))
        if event is None:
            interrupts.check()
            continue
        if isinstance(event, Lost):
            if event.channel is channel:
                raise ChannelClosedError(event.reason)
            continue
        try:
            for frame in event.frames if event.channel is channel else ():
                if frame.kind == Kind.WELCOME:
                    welcome = unpack(_within_bounds(frame.body, own), Welcome)
                    for record in (welcome.record, *welcome.members):
                        _within_bounds(record, own)
                    return welcome
                if frame.kind == Kind.REFUSE:
                    return unpack(_within_bounds(frame.body, own), Refuse)
        finally:
            event.channel.release()
    raise TimeoutError("no answer in time")


def _within_bounds(message: Buffer, own: WorkerRecord) -> Buffer:
    """The message, or a message inside it. Raises ``ProtocolError`` if it has more values than the joiner accepts."""
    bounds = own.bounds
    if bounds is not None and bounds.values and (option := excess(message, bounds.values, bounds.depth + LEVELS)):
        raise ProtocolError(f"the answer to a question to join exceeds Options.{option} of '{own.name}'")
    return message
