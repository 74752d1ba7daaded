"""The channels to the other members. A channel opens at its first use; a lost channel is replaced at the next use.

Decides nothing about who may be a member (``admission``) and keeps no table of members (``peers``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from backhaul._devices.seam import NO_LINK, PeerLink
from backhaul._rpc.cluster.certificate_names import CertificateNames
from backhaul._rpc.cluster.membership_table import WorkerRecord, choose
from backhaul._rpc.cluster.reconnecting import Reconnecting
from backhaul._runtime import interrupts
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Departure, Hello, Kind, Refuse, pack, unpack
from backhaul._worker.frame_receiver import before_hello
from backhaul._worker.listeners import Listeners
from backhaul._worker.worker import Worker
from backhaul.errors import AuthenticationError, PeerLostError

if TYPE_CHECKING:
    from backhaul._rpc.cluster.peers import Peer

log = logging.getLogger("backhaul")


Indirect = Callable[["Peer", float], Channel | None]


def _no_way(peer: Peer, timeout: float) -> Channel | None:
    raise ConnectionError("it cannot be dialed, and this worker uses no relays")


class Members(Protocol):
    """What connections tell the table of members, and what they need of it."""

    def lose(self, peer: Peer, reason: str) -> None:
        """No channel leads to a member any more."""

    def regain(self, peer: Peer) -> None:
        """A channel leads to a member again."""

    @property
    def predecessors(self) -> tuple[Departure, ...]:
        """Workers that have left and had the name or the id of this worker."""


class _Links(dict[Channel, PeerLink]):
    """The device link of each channel's peer; the null link for a channel whose peer is not known."""

    def __missing__(self, channel: Channel) -> PeerLink:
        return NO_LINK


# Over the limit because channels are opened, lost and counted in one table under one lock.
class Connections:
    """The channels of one worker to all members. Thread-safe.

    Attributes:
        certificates: Which names the peer of a channel may have.
        of: ``of(channel)`` is the member at the other end, or None if it has not said hello. The bound C function of
            a dictionary, because every request asks.
        links: The device link of the member at the other end of each channel. Others only read it.
        indirect: Opens a channel to a member that cannot be dialed, within some seconds; None: that member has opened
            one. Raises ``ConnectionError`` or ``AuthenticationError``. ``Relaying`` sets it.
    """

    of: Callable[[Channel], Peer | None]

    def __init__(self, worker: Worker, own: WorkerRecord, members: Members) -> None:
        self._worker = worker
        self._own = own
        self._members = members
        self.certificates = CertificateNames(worker)
        # Guards _by_channel, links, _refusals, _closed_bytes and the channels of all peers.
        self._lock = threading.Lock()
        self._by_channel: dict[Channel, Peer] = {}
        self.links = _Links()
        self._refusals: dict[Channel, str] = {}  # the reason that a peer gave before it closed the channel
        self._closed_bytes = 0  # bytes sent over channels that are gone
        self._closed = False  # this worker ends: it opens no more channels
        self.on_lost: Listeners[[Peer, Channel, str], None] = Listeners()  # of a channel to a known worker, and why
        self.on_channel: Listeners[[Channel], None] = Listeners()  # a new channel to a worker; must not block
        self.on_silent: Listeners[[Peer], None] = Listeners()  # no channel is left to a silent peer; must not block
        self.indirect: Indirect = _no_way
        self._reconnecting = Reconnecting(worker, self._connect, lambda: self.answer_seconds)
        self.of = self._by_channel.get
        worker.on_frame(Kind.REFUSE, self._on_refuse, check=before_hello)
        worker.receiver.on_lost(self._on_lost)

    # Opening.

    @property
    def answer_seconds(self) -> float:
        """How long to wait for a worker that does not answer before it counts as unreachable."""
        options = self._worker.options
        watched = (
            options.liveness.lost_after
            if options.liveness.heartbeat_interval and options.liveness.lost_after
            else options.connect_timeout
        )
        return min(options.connect_timeout, watched)

    def channel_to(self, peer: Peer, timeout: float) -> Channel:
        """The channel to ``peer``, opened if there is none. Raises ``PeerLostError`` or ``AuthenticationError``."""
        channel = peer.channel
        if channel is not None:
            return channel
        now = self._worker.runtime.now
        begun = now()
        try:
            with self._worker.thread_pool.blocking():
                return self._connect(peer, self._reconnecting.seconds(peer, min(timeout, self.answer_seconds)))
        except PeerLostError:
            self._reconnecting.failed(peer, now() - begun)
            raise

    def _connect(self, peer: Peer, timeout: float) -> Channel:
        """Open a channel, one thread at a time. A thread that waits for another thread's attempt shares its failure."""
        attempts = peer.attempts
        now, failures = self._worker.runtime.now, attempts.failures
        deadline = now() + timeout
        if not interrupts.acquire(attempts.lock, timeout):
            raise _unreachable(peer, f"no answer within {timeout:g} s")
        try:
            if peer.channel is not None:
                return peer.channel
            if attempts.failures > failures:
                raise _unreachable(peer, peer.lost or peer.gone or "another attempt failed")
            try:
                return self._open(peer, max(deadline - now(), 0.001))
            except PeerLostError:
                attempts.failures += 1
                raise
        finally:
            attempts.lock.release()

    def _open(self, peer: Peer, timeout: float) -> Channel:
        name = peer.info.name
        address = self._address_of(peer.record)
        if peer.gone:
            raise PeerLostError(f"lost worker '{name}': it {peer.gone}", worker=name, reason=peer.gone)
        if self._closed:
            raise _unreachable(peer, "this worker is closed")
        try:
            channel = self._dial(peer, address, timeout)
            if channel is None:
                return self._opened_by(peer)
            if not self.certificates.allow(channel, name):
                channel.close()
                raise AuthenticationError(self.certificates.mismatch(channel, name))
            self.adopt(channel, peer)
            channel.send(self.hello_to(peer.record))
        except AuthenticationError as error:
            where = address or "the other end of a relay"
            raise AuthenticationError(f"cannot talk to worker '{name}' at {where}: {error}", worker=name) from None
        except (ConnectionError, ChannelClosedError) as error:
            self._members.lose(peer, str(error))
            raise _unreachable(peer, str(error)) from error
        with self._lock:
            kept = channel in self._by_channel
            if kept:
                peer.channel = channel
        # If the channel is not kept, its loss (for example a refusal) was reported already. The next use opens another.
        if kept:
            self._announce(channel, peer)
        return channel

    def _dial(self, peer: Peer, address: str | None, timeout: float) -> Channel | None:
        """None: the peer has opened a channel itself."""
        if address is None:
            return self.indirect(peer, timeout)
        return self._worker.endpoint.connect(address, timeout=timeout)

    @staticmethod
    def _opened_by(peer: Peer) -> Channel:
        channel = peer.channel
        if channel is None:
            raise ConnectionError("the channel that it has opened was lost at once")
        return channel

    def reaches(self, record: WorkerRecord) -> bool:
        """Whether there is a way to a worker, if it is alive."""
        return not record.listens or choose(record, self._own.host) is not None

    def _address_of(self, record: WorkerRecord) -> str | None:
        """Where to connect to a worker; None: it is reached through others."""
        address = choose(record, self._own.host)
        if address is not None or not record.listens:
            return address
        raise PeerLostError(
            f"worker '{record.name}' is on another host but listens only on its own; start it with Options(bind=...)",
            worker=record.name,
            reason="not reachable from this host",
        )

    def hello_to(self, record: WorkerRecord, *, answer: bool = False) -> Frame:
        """The frame that tells a worker who this worker is. ``answer``: it is asked to say hello in turn."""
        hello = Hello(record.name, record.incarnation, pack(self._own), self._members.predecessors, answer)
        return Frame(Kind.HELLO, 0, pack(hello))

    # The channels there are.

    def adopt(self, channel: Channel, peer: Peer) -> None:
        """From now on this channel is one of the peer's."""
        with self._lock:
            self._by_channel[channel] = peer
            self.links[channel] = peer.link
            peer.add_channel(channel)
        peer.link.opened(channel)
        if channel not in self._by_channel:  # lost meanwhile; nobody reports that again
            peer.link.lost(channel)

    def adopt_incoming(self, channel: Channel, peer: Peer) -> None:
        """A peer has opened this channel and has been admitted."""
        self.adopt(channel, peer)
        peer.use_incoming(channel)
        self._announce(channel, peer)

    def _announce(self, channel: Channel, peer: Peer) -> None:
        self._reconnecting.reached(peer)
        self._members.regain(peer)
        self.on_channel.notify(channel)

    def channels(self) -> list[tuple[Channel, Peer]]:
        """All channels to other workers whose peer is known, with the peer."""
        with self._lock:
            return [(channel, peer) for channel, peer in self._by_channel.items() if peer.record is not self._own]

    @property
    def bytes_sent(self) -> int:
        """How many bytes went to other workers, over all channels that ever existed."""
        with self._lock:
            return self._closed_bytes + sum(channel.bytes_sent for channel in self._by_channel)

    def give_up(self, channel: Channel, reason: str) -> None:
        """Close a channel because its peer is silent."""
        peer = self._by_channel.get(channel)
        if peer is not None and len(peer.channels) <= 1:
            self._reconnecting.went_silent(peer)
        channel.abort(reason)

    def close(self) -> None:
        """Close all channels, and open no more. That wakes the threads that read or write them.

        A listener that hears of a loss must not connect again: two workers that end would wait for each other.
        """
        self._closed = True
        for channel in list(self._by_channel):
            channel.close()

    # Refusals and losses.

    @staticmethod
    def refuse(channel: Channel, name: str, problem: str) -> None:
        """Tell a worker why it is not accepted, and close its channel."""
        log.warning("refused %.130r at %s: %s", name, channel.peer, problem, extra={"peer": name})
        try:
            channel.send(Frame(Kind.REFUSE, 0, pack(Refuse(problem))), timeout=0)
        except ChannelClosedError:
            pass
        channel.close()

    def _on_refuse(self, channel: Channel, frame: Frame) -> None:
        reason = unpack(frame.body, Refuse).reason
        fields = {"worker": self._own.name, "peer": channel.peer}
        log.warning("%s refused this worker: %s", channel.peer, reason, extra=fields)
        with self._lock:
            if channel in self._by_channel:
                self._refusals[channel] = f"refused: {reason}"
        channel.abort(f"refused: {reason}")  # the other end may have closed it already

    def _on_lost(self, channel: Channel, reason: str) -> None:
        with self._lock:
            peer = self._by_channel.pop(channel, None)
            self.links.pop(channel, None)
            reason = self._refusals.pop(channel, reason)
            if peer is not None:
                peer.remove_channel(channel)
            self._closed_bytes += channel.bytes_sent
        if peer is None:
            return
        if not peer.channels:
            peer.suspicion = ""
            self._members.lose(peer, reason)
            if peer.attempts.silence.silent:
                self.on_silent.notify(peer)
        if peer.gone:
            reason = f"worker '{peer.info.name}' {peer.gone}"
        self.on_lost.notify(peer, channel, reason)
        peer.link.lost(channel)


def _unreachable(peer: Peer, why: str) -> PeerLostError:
    name = peer.info.name
    return PeerLostError(f"cannot reach worker '{name}': {why}", worker=name, reason=why)
