"""Reaches workers that cannot be dialed. The worker that wants to talk to one asks a member at which that worker has a
channel (``relay_choice``). If the caller can be dialed itself, that member tells the worker to dial it. If not, the
member relays a connection between the two, over which they do everything that they do over any other.

Moves no bytes itself: ``_transport.sockets.relay`` does. Decides nothing about who may be a member.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading

import msgspec

from backhaul._rpc.cluster.internal_calls import InternalCalls, caller
from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul._rpc.cluster.partition_healing import PartitionHealing
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.cluster.relay_choice import asked_for
from backhaul._rpc.security.policy import internal
from backhaul._runtime.runtime import OneShotEvent
from backhaul._transport.base import Channel, ConnectTimeoutError
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.relay_legs import KEY_BYTES, NUMBER_BYTES, Leg
from backhaul._transport.sockets.relay_states import AWAIT_SECONDS
from backhaul._wire.messages import pack, prepare, unpack
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import AuthenticationError, BackhaulError

log = logging.getLogger("backhaul")

_ASK_SECONDS = 4.0  # for a member to say whether it can help
_TELL_SECONDS = 3.0  # for the worker that is meant to hear of it
_DIAL_SECONDS = 5.0  # for that worker to open a channel
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 0.5  # before the members are asked again
_MAX_DIALED = 64  # connections that this worker opens because members have asked it to, at the same time
_MAX_ANSWER_BYTES = 1 << 12

# What a member answers.
DIALS = "dials"  # the worker that is meant was told to dial the caller
RELAYED = "relayed"  # both ends were given a leg
LOST = "lost"  # it had a channel to that worker, and has lost it
ABSENT = "absent"  # that worker has no channel to it
BUSY = "busy"  # it relays too many connections


class Help(msgspec.Struct, array_like=True, frozen=True):
    """What a member does for a worker that wants to reach another.

    Attributes:
        how: One of the words above.
        leg: The leg of the caller, if the connection is relayed.
        reason: Why the member does not help, for people.
    """

    how: str
    leg: Leg | None = None
    reason: str = ""


prepare(Help, Leg)


class _NotYetError(ConnectionError):
    """The worker has no channel to a member that was asked. It may still come."""


class Relaying:
    """One worker's part in reaching workers that cannot be dialed: as the one that wants to reach such a worker, as the
    member that helps, and as such a worker. Thread-safe.
    """

    def __init__(self, worker: Worker, peers: Peers, calls: InternalCalls, healing: PartitionHealing) -> None:
        self._worker = worker
        self._peers = peers
        self._calls = calls
        self._healing = healing
        self._now = worker.runtime.now
        self._endpoint = worker.endpoint if isinstance(worker.endpoint, SocketEndpoint) else None
        self._lock = threading.Lock()  # guards the two below
        self._awaited: dict[Peer, OneShotEvent] = {}  # peers that were told to dial this worker
        self._dialing = 0
        peers.connections.indirect = self.connect
        peers.connections.on_channel(self._on_channel)
        worker.attach(self)

    # As the worker that wants to reach another.

    def connect(self, peer: Peer, timeout: float) -> Channel | None:
        """Open a channel to a worker that cannot be dialed. None: there is one now, which that worker has opened.

        Raises:
            ConnectionError: No member reaches it; ``ConnectTimeoutError``: it did not come in time.
            AuthenticationError: The two workers do not accept each other.
        """
        now, pause = self._worker.runtime.now, _FIRST_PAUSE_SECONDS
        deadline = now() + timeout
        opened = self._await_channel(peer)
        try:
            while True:
                try:
                    return self._ask_all(peer, opened, deadline)
                except _NotYetError as error:
                    if now() + pause >= deadline:
                        raise ConnectTimeoutError(f"{error}; tried for {timeout:g} s") from error
                if opened.wait(pause):
                    return None
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        finally:
            with self._lock:
                self._awaited.pop(peer, None)

    def _ask_all(self, peer: Peer, opened: OneShotEvent, deadline: float) -> Channel | None:
        """Ask the members in turn until there is a channel. Raises ``_NotYetError`` if it may help to ask again."""
        answers = []
        problem: ConnectionError | AuthenticationError | None = None
        for relay in self._helpers(peer):
            answer = None if opened.opened else self._ask(relay, peer, min(self._now() + _ASK_SECONDS, deadline))
            if answer is None:
                continue
            answers.append(answer)
            if answer.leg is not None:
                try:
                    return self._connect_through(relay, answer.leg, peer, deadline - self._now())
                except (ConnectionError, AuthenticationError) as error:
                    log.debug("worker '%s' does not relay: %s", relay.info.name, error)
                    problem = error
            elif answer.how == DIALS:
                opened.wait(min(_DIAL_SECONDS, deadline - self._now()))
        if opened.opened:
            return None
        if isinstance(problem, AuthenticationError):
            raise problem
        own = self._peers.own.record
        reasons = [answer.reason for answer in answers if answer.how == LOST]
        if own.listens and peer.lost:
            reasons.append(peer.lost)
        if reasons:
            raise ConnectionError(f"it does not listen, and its channels were lost: {reasons[0]}")
        if not answers and not own.listens:
            raise ConnectionError(
                "it does not listen, and no member can be reached that could relay a connection to it"
            )
        busy = [answer.reason for answer in answers if answer.how == BUSY]
        raise _NotYetError(str(problem or "; ".join(busy) or "it does not listen, and has not opened a channel"))

    def _helpers(self, peer: Peer) -> list[Peer]:
        """The members to ask for a worker."""

        def doubtful(record: WorkerRecord) -> bool:
            member = self._peers.with_id(record.id)
            return member is None or bool(member.lost or member.suspicion)

        asked = asked_for(peer.record, self._peers.own.record, self._peers.records, doubtful)
        return [found for record in asked if (found := self._peers.with_id(record.id)) is not None]

    def _ask(self, relay: Peer, peer: Peer, deadline: float) -> Help | None:
        """What a member answers; None if it cannot be reached."""
        asked = [(relay, (peer.record.incarnation,))]
        # In a fresh context: the question does not belong to the call, nor to the autograd context, that waits for it.
        answers = self._worker.run(self._calls.call_each, asked, reach, deadline)
        if not answers or type(answers[0][1]) is not bytes or len(answers[0][1]) > _MAX_ANSWER_BYTES:
            return None
        with contextlib.suppress(BackhaulError):
            return unpack(answers[0][1], Help)
        return None

    def _connect_through(self, relay: Peer, leg: Leg, peer: Peer, timeout: float) -> Channel:
        address = choose(relay.record, self._peers.own.record.host)
        if self._endpoint is None or address is None or timeout <= 0:
            raise ConnectionError(f"worker '{relay.info.name}' cannot be reached from this host")
        channel = self._endpoint.connect_through(address, leg, timeout=min(timeout, AWAIT_SECONDS))
        if not self._peers.connections.certificates.holds_key(channel, peer.record):
            channel.close()
            log.warning("worker '%s' relayed a connection to somebody else than '%s'", relay.info.name, peer.info.name)
            raise AuthenticationError(f"its certificate is not that of worker '{peer.info.name}'")
        log.info("worker '%s' relays the connection to worker '%s'", relay.info.name, peer.info.name)
        return channel

    def _await_channel(self, peer: Peer) -> OneShotEvent:
        with self._lock:
            opened = self._awaited[peer] = self._worker.runtime.one_shot()
        if peer.channel is not None:
            opened.open()
        return opened

    def _on_channel(self, channel: Channel) -> None:
        if self._awaited:
            peer = self._peers.of(channel)
            with self._lock:
                opened = self._awaited.get(peer) if peer is not None else None
            if opened is not None:
                opened.open()

    # As the member that helps.

    def help(self, asker: Peer, incarnation: str) -> Help:
        """A member asks for a way to the worker with that incarnation."""
        record = self._peers.table.member(incarnation)
        meant = self._peers.with_id(record.id) if record is not None else None
        if meant is None or meant.channel is None:
            gone = self._peers.table.gone(incarnation)
            why = gone[1] if gone is not None else meant.lost if meant is not None else ""
            return Help(LOST, reason=why) if why else Help(ABSENT)
        if asker.record.listens:
            return Help(DIALS) if self._tell(meant, dial, (pack(asker.record),)) else Help(ABSENT)
        if self._endpoint is None:
            return Help(ABSENT)
        legs = self._endpoint.relay.offer()
        if legs is None:
            most = self._endpoint.relay.most
            return Help(BUSY, reason=f"worker '{self._worker.name}' relays {most} connections (limits.relayed)")
        if not self._tell(meant, take_leg, (pack(legs[1]),)):
            self._endpoint.relay.withdraw(legs[1])
            return Help(ABSENT)
        return Help(RELAYED, legs[0])

    def _tell(self, peer: Peer, function: object, args: tuple[bytes, ...]) -> bool:
        """Tell a worker what to dial. Returns whether it has heard and does it."""
        deadline = self._worker.runtime.now() + _TELL_SECONDS
        answers = self._calls.call_each([(peer, args)], function, deadline)  # type: ignore[arg-type]
        return bool(answers) and answers[0][1] is True

    # As the worker that cannot be dialed.

    def dial(self, helper: Peer, record: WorkerRecord) -> bool:
        """A member says that the worker with this record wants to reach this one."""
        found = self._peers.in_life(record.id, record.incarnation)
        if isinstance(found, Peer):
            return self._begin(functools.partial(self._dial, found))
        if found is None:
            self._healing.contact(helper, record)
        return found is None

    def _dial(self, peer: Peer) -> None:
        self._peers.channel_to(peer, self._peers.connections.answer_seconds)

    def take_leg(self, relay: Peer, leg: Leg) -> bool:
        """A member relays a connection to this worker: open the leg."""
        address, endpoint = choose(relay.record, self._peers.own.record.host), self._endpoint
        if address is None or endpoint is None or (len(leg.number), len(leg.key)) != (NUMBER_BYTES, KEY_BYTES):
            return False
        return self._begin(functools.partial(endpoint.accept_through, address, leg, timeout=AWAIT_SECONDS))

    def _begin(self, task: Task) -> bool:
        """Open a connection on another thread, unless this worker opens too many."""
        with self._lock:
            if self._dialing >= _MAX_DIALED or self._worker.closed:
                return False
            self._dialing += 1
        self._worker.thread_pool.submit(functools.partial(self._carry_out, task))
        return True

    def _carry_out(self, task: Task) -> None:
        try:
            with self._worker.thread_pool.blocking():
                self._worker.run(task)
        except (BackhaulError, ConnectionError) as error:
            log.debug("could not open a connection that a member has asked for: %s", error)
        finally:
            with self._lock:
                self._dialing -= 1


@internal(str)
def reach(incarnation: str) -> bytes:
    """Called by a member that wants to reach the worker with that incarnation, which cannot be dialed."""
    asker = caller()
    return pack(Help(ABSENT) if asker is None else current_worker().part(Relaying).help(asker, incarnation))


@internal(bytes)
def dial(record: bytes) -> bool:
    """Called by a member: the worker with this record wants to reach this one. Returns whether this one dials it."""
    helper = caller()
    return helper is not None and current_worker().part(Relaying).dial(helper, unpack(record, WorkerRecord))


@internal(bytes)
def take_leg(leg: bytes) -> bool:
    """Called by a member that relays a connection to this worker. Returns whether this worker opens its leg."""
    relay = caller()
    return relay is not None and current_worker().part(Relaying).take_leg(relay, unpack(leg, Leg))
