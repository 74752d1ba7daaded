"""Watches a cluster from outside: asks each worker for its status, over connections of its own. ``ClusterView`` judges
what comes back. Nothing runs between two questions, so a monitor that is not used costs the cluster nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

import msgspec

from backhaul._monitoring.cluster_view import ClusterStatus, ClusterView
from backhaul._monitoring.connection_attempts import ConnectionAttempts
from backhaul._monitoring.status import MemberStatus, MonitoringKind, Query, Record, Refused, WorkerStatus
from backhaul._rpc.cluster.own_endpoint import SECRET_VARIABLE
from backhaul._runtime import interrupts
from backhaul._runtime.runtime import Runtime
from backhaul._transport.base import Channel, ChannelClosedError, Endpoint, Lost
from backhaul._transport.sockets.addresses import host_identity
from backhaul._transport.sockets.certificates import issue
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.tls import Credentials
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack, unpack
from backhaul.errors import AuthenticationError, BackhaulError, PeerLostError, ProtocolError
from backhaul.profiler.model import Timeline

_POLL_SECONDS = 0.05  # between checks for interrupts
_QUERY, _RECORD = 0, 1  # the numbers of frames with questions, and of those that answer them
_RECORD_SECONDS = 60.0  # for a profile to be collected and sent, beyond its own time

_decode_timeline = msgspec.msgpack.Decoder(Timeline).decode


def open_endpoint(secret: bytes, addresses: Sequence[str]) -> SocketEndpoint:
    """An endpoint that listens nowhere. With an address beyond this host it has a certificate made from the secret."""
    endpoint = SocketEndpoint(secret=secret, unix=False, shm_bytes=0, spin=0.0)
    if any(address.startswith("tcp:") for address in addresses):
        with_strong_secret = len(secret) >= 16
        endpoint.use_tcp(None, Credentials(issue(secret, "monitor")) if with_strong_secret else None)
    return endpoint


class Monitor:
    """Asks the workers of a cluster. Used by one thread at a time.

    Args:
        endpoint: Connects to the workers. The monitor closes it.
        addresses: Where at least one worker listens.
        host: The host of the monitor, to choose between the addresses of a worker.
        watch: For how many seconds after each question the workers count calls of functions.

    Example:
        >>> import backhaul as bh
        >>> from backhaul._transport.inproc import InprocEndpoint
        >>> with bh.cluster(2) as (first, second):
        ...     with Monitor(InprocEndpoint(), first.endpoint.addresses, host="this process") as monitor:
        ...         [worker.name for worker in monitor.refresh().workers]
        ['worker0', 'worker1']
    """

    def __init__(
        self, endpoint: Endpoint, addresses: Sequence[str], *, host: str | None = None, watch: float = 10.0
    ) -> None:
        self._endpoint = endpoint
        self._seeds = tuple(addresses)
        self._host = host_identity() if host is None else host
        self._query = pack(Query(watch))
        self._runtime = Runtime()
        self._began = self._runtime.now()
        self._view = ClusterView()
        self._channels: dict[Channel, str] = {}  # to the incarnation; empty: of a seed that has not answered
        self._attempts = ConnectionAttempts(endpoint)  # by incarnation, or by the address of a seed
        self._problems: dict[str, str] = {}  # by incarnation or address
        self._timeline: Timeline | str | None = None  # the answer to ``record``: a profile, or why there is none

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Waits for attempts to connect, a second at most."""
        self._attempts.close()
        for channel in list(self._channels):
            channel.close()
        self._endpoint.close()

    # One round of questions.

    def refresh(self, timeout: float = 1.0) -> ClusterStatus:
        """Ask all workers, and wait for those that are expected to answer."""
        deadline = self._runtime.now() + timeout
        while self._take_event(0.0):
            pass
        self._connect_missing()
        for channel, incarnation in list(self._channels.items()):
            if incarnation:
                self._ask(channel, incarnation)
        while (left := deadline - self._runtime.now()) > 0 and self._waits():
            self._take_connections()
            self._take_event(min(left, _POLL_SECONDS))
            interrupts.check()
            self._connect_missing()
        return self._view.status(self._now(), time.time(), dict.fromkeys(self._problems.values()))

    def attach(self, timeout: float = 10.0) -> ClusterStatus:
        """Ask until a worker has answered.

        Raises:
            AuthenticationError: The secret is not that of the cluster.
            PeerLostError: No worker answers at any of the addresses, or the workers answer no monitors.
        """
        deadline = self._runtime.now() + timeout
        while True:
            status = self.refresh(min(1.0, timeout))
            if any(worker.state == "up" for worker in status.workers):
                return status
            if self._runtime.now() >= deadline or (status.problems and not self._attempts):
                break
        why = "; ".join(status.problems) or f"no answer within {timeout:g} s"
        where = ", ".join(self._seeds)
        if "secret" in why:
            raise AuthenticationError(
                f"cannot watch the cluster at {where}: {why}; set {SECRET_VARIABLE} to the secret of the cluster"
            )
        raise PeerLostError(
            f"cannot watch the cluster at {where}: {why}; see whether it runs, and whether this host reaches it",
            worker="",
            reason=why,
        )

    def record(self, seconds: float, *, ops: bool = True, worker: str | None = None) -> Timeline:
        """Profile all workers for so long.

        Args:
            seconds: How long.
            ops: Whether to record operations of torch.
            worker: The worker that collects the records, and whose main thread the critical path is about. Default:
                the first one.

        Raises:
            BackhaulError: The worker refused, or there is no such worker.
        """
        status = self.refresh()
        names = {each.name: each for each in status.workers if each.state == "up"}
        chosen = names.get(worker) if worker else next(iter(names.values()), None)
        found = None if chosen is None or chosen.status is None else chosen.status.incarnation
        channel = next(
            (each for each, incarnation in self._channels.items() if incarnation and incarnation == found), None
        )
        if channel is None:
            what = f"no worker {worker!r}" if worker else "no worker"
            raise BackhaulError(f"cannot record a profile: {what} answers; there are: {', '.join(names) or 'none'}")
        self._timeline = None
        channel.send(Frame(MonitoringKind.RECORD, _RECORD, pack(Record(seconds, ops))))
        deadline = self._runtime.now() + seconds + _RECORD_SECONDS
        while self._timeline is None and self._runtime.now() < deadline and channel in self._channels:
            self._take_event(_POLL_SECONDS)
            interrupts.check()
        if not isinstance(self._timeline, Timeline):
            raise BackhaulError(f"cannot record a profile: {self._timeline or 'the worker did not answer in time'}")
        return self._timeline

    def _now(self) -> float:
        return self._runtime.now() - self._began

    def _waits(self) -> bool:
        return (
            bool(self._attempts)
            or "" in self._channels.values()
            or any(
                incarnation and self._view.waits_for(incarnation, self._now())
                for incarnation in self._channels.values()
            )
        )

    # Connections.

    def _connect_missing(self) -> None:
        wanted: dict[str, str] = {}
        open_to = {*self._channels.values(), *self._attempts.keys}
        for member in self._view.members:
            if member.incarnation not in open_to:
                wanted[member.incarnation] = _choose(member, self._host)
        if not self._view.members and "" not in open_to:
            wanted |= {address: address for address in self._seeds if address not in open_to}
        for key, address in wanted.items():
            if not self._attempts.is_due(key, self._now()):
                continue
            if address:
                self._attempts.begin(key, address)
            else:
                self._view.broke(key, "it listens at no address that this host can reach")

    def _take_connections(self) -> None:
        for key, found in self._attempts.take():
            if isinstance(found, Channel):
                incarnation = "" if self._view.member(key) is None else key
                self._problems.pop(key, None)
                self._channels[found] = incarnation
                self._ask(found, incarnation)
            else:
                self._fail(key, str(found))

    def _fail(self, key: str, problem: str) -> None:
        if self._view.member(key) is None:
            self._problems[key] = problem if not key or key in problem else f"{key}: {problem}"
        else:
            self._view.broke(key, problem)

    def _ask(self, channel: Channel, incarnation: str) -> None:
        if incarnation and not self._view.may_be_asked(incarnation):
            return  # it still owes an answer
        self._view.asked(incarnation, self._now())
        try:
            channel.send(Frame(MonitoringKind.QUERY, _QUERY, self._query), timeout=0)
        except ChannelClosedError as error:
            self._drop(channel, str(error))

    def _drop(self, channel: Channel, reason: str) -> None:
        incarnation = self._channels.pop(channel, None)
        if incarnation:
            self._view.broke(incarnation, reason)
        elif incarnation is not None:
            self._problems.setdefault("", reason)

    # Answers.

    def _take_event(self, timeout: float) -> bool:
        event = self._endpoint.poll(timeout)
        if event is None:
            return False
        if isinstance(event, Lost):
            self._drop(event.channel, event.reason)
            return True
        try:
            for frame in event.frames:
                self._take(event.channel, frame)
        except ProtocolError as error:
            self._drop(event.channel, f"its answer cannot be read: {error}")
            event.channel.abort("malformed")
        finally:
            event.channel.release()
        return True

    def _take(self, channel: Channel, frame: Frame) -> None:
        if frame.kind == MonitoringKind.STATUS:
            status = unpack(frame.body, WorkerStatus)
            if channel in self._channels and self._channels[channel] != status.incarnation:
                self._channels[channel] = status.incarnation
            self._problems.clear()
            self._view.answered(status, self._now())
        elif frame.kind == MonitoringKind.TIMELINE:
            self._timeline = _decode_timeline(frame.body)
        elif frame.kind == MonitoringKind.REFUSED and frame.number == _RECORD:
            self._timeline = unpack(frame.body, Refused).reason
        elif frame.kind == MonitoringKind.REFUSED:
            reason = unpack(frame.body, Refused).reason
            self._problems[self._channels.get(channel, "")] = reason
            self._drop(channel, reason)
            channel.close()
        else:
            raise ProtocolError(f"a frame of kind {frame.kind} from a worker")


def _choose(member: MemberStatus, host: str) -> str:
    """The address at which a worker can be reached from ``host``; empty if there is none."""
    return next((each for each in member.addresses if member.host == host or each.startswith("tcp:")), "")
