"""Becoming a member of a cluster that runs: the newcomer's side.

1. It asks any member, which names the leader, and then the leader. That enrols it: id, epoch, and who is there.
2. It starts, and shows its record to all of them. When all that can be reached have admitted it, it is a member.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from backhaul._devices.placement import check
from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul._rpc.node import Node, start_node
from backhaul._runtime import interrupts
from backhaul._runtime.runtime import Runtime
from backhaul._transport.base import Channel, ChannelClosedError, Endpoint, Lost
from backhaul._types import Options
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import Departure, Join, Kind, Refuse, Welcome, pack, unpack
from backhaul._wire.value_count import LEVELS, excess
from backhaul.errors import AuthenticationError, ProtocolError, RendezvousError

_PAUSE = 0.2  # seconds before asking again
_FIRST = 10.0  # seconds for an answer at one address, the leader's included; twice as many once that was not enough
_MOMENT = 0.1  # seconds after which interrupts are looked for
_AT_ONCE = 32  # members to which we show ourselves at the same time
_STEPS = 8  # from one that is not the leader to the next


class _UnansweredError(Exception):
    """A member has not said whether we may join."""


class Enrolled(NamedTuple):
    """What the leader has said: our record, those of the others, its own if it is among them, and proofs of who has
    left.
    """

    own: WorkerRecord
    others: list[WorkerRecord]
    leader: WorkerRecord | None
    left: tuple[Departure, ...]


def join(
    endpoint: Endpoint, own: WorkerRecord, addresses: Sequence[str], options: Options, *, runtime: Runtime | None = None
) -> Node:
    """Become a member of a cluster of which some listen at these addresses. Once this returns all members know it; if
    it raises (``RendezvousError``, ``AuthenticationError``) nothing is left, and the endpoint is closed.
    """
    runtime = runtime or Runtime()
    try:
        own, others, leader, left = enrol(endpoint, own, addresses, options.rendezvous_timeout, runtime)
        check(own, others)
    except BaseException:
        endpoint.close()
        raise
    node = start_node(own, others, endpoint, options, runtime=runtime)
    try:
        node.peers.enter(leader, left)
        node.worker.run(introduce, node, options.connect_timeout)
    except BaseException:
        node.shutdown(graceful=False, timeout=1.0)
        raise
    return node


def enrol(
    endpoint: Endpoint, own: WorkerRecord, addresses: Sequence[str], timeout: float, runtime: Runtime
) -> Enrolled:
    """Ask at these addresses to become a member.

    Raises ``RendezvousError``, ``AuthenticationError``.
    """
    deadline, allowed = runtime.now() + timeout, _FIRST
    problems: dict[str, str] = {}
    while True:
        began = runtime.now()
        for number, address in enumerate(addresses):
            now = runtime.now()
            share = (deadline - now) / (len(addresses) - number)  # so that there is time for those that follow
            try:
                answer = _ask_around(endpoint, own, address, now + min(allowed, share), runtime)
            except _UnansweredError as error:
                problems.setdefault(address, str(error))  # what a member has said before tells more
                continue
            if isinstance(answer, Enrolled):
                return answer
            problems[address] = answer.reason
            if not answer.later:
                break
        else:
            if runtime.now() + _PAUSE < deadline:
                if runtime.now() >= began + allowed:  # a leader may have to look for a silent member first
                    allowed *= 2
                runtime.one_shot().wait(_PAUSE)
                continue
        why = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
        raise RendezvousError(f"worker '{own.name}' cannot join: {why}", worker=own.name)


def _ask_around(
    endpoint: Endpoint, own: WorkerRecord, address: str, deadline: float, runtime: Runtime
) -> Enrolled | Refuse:
    for _ in range(_STEPS):
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
            return Enrolled(record, others, leader, answer.left)
        found = choose(record, own.host)
        if found is None:
            return Refuse(f"the leader '{record.name}' is on another host and listens only on its own")
        address = found
    return Refuse("the members do not agree on who is the leader", later=True)


def _ask(
    endpoint: Endpoint, channel: Channel, own: WorkerRecord, deadline: float, runtime: Runtime
) -> Welcome | Refuse:
    """One question. Nobody else polls the endpoint yet."""
    channel.send(Frame(Kind.JOIN, 0, pack(Join(pack(own)))))
    while (left := deadline - runtime.now()) > 0:
        event = endpoint.poll(min(left, _MOMENT))
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
                    welcome = unpack(_counted(frame.body, own), Welcome)
                    for record in (welcome.record, *welcome.members):
                        _counted(record, own)
                    return welcome
                if frame.kind == Kind.REFUSE:
                    return unpack(_counted(frame.body, own), Refuse)
        finally:
            event.channel.release()
    raise TimeoutError("no answer in time")


def _counted(message: Buffer, own: WorkerRecord) -> Buffer:
    """A message, or one inside of it, unless it has more values than we take. Raises ``ProtocolError``."""
    bounds = own.bounds
    if bounds is not None and bounds.values and (option := excess(message, bounds.values, bounds.depth + LEVELS)):
        raise ProtocolError(f"the answer to a question to join exceeds Options.{option} of '{own.name}'")
    return message


def introduce(node: Node, timeout: float) -> None:
    """Show our record to all members. Raises ``RendezvousError`` if one of them does not accept it."""
    peers = [peer for peer in node.peers if peer is not node.peers.own]
    refused: dict[str, str] = {}
    left = iter(peers)  # each takes the next; those who do not answer hold up none of the others
    taking = threading.Lock()
    deadline = node.worker.runtime.now() + timeout

    def show() -> None:
        while True:
            with taking:
                peer = next(left, None)
            if peer is None:
                return
            time_left = max(deadline - node.worker.runtime.now(), 0.01)
            if (reason := node.worker.run(node.membership.show_to, peer, time_left)) is not None:
                refused[peer.info.name] = reason

    runtime = node.worker.runtime
    threads = [runtime.spawn(show, name=f"introduce-{number}") for number in range(min(len(peers), _AT_ONCE))]
    for thread in threads:
        runtime.join(thread)
    for name, reason in refused.items():
        why = f"worker '{node.worker.name}' cannot join: worker '{name}' {reason}"
        raise RendezvousError(why, worker=node.worker.name)
