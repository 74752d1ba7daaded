"""What a monitor knows of a cluster. Pure: answers and losses in, one status of all workers out; no I/O and no clock.

A worker is *up* while it answers. It is *silent* if it has not answered for ``SILENT_SECONDS``, or if another worker
suspects it. It is *lost* if its channel broke, or no worker answers that does not take it for lost. A worker that has
left the cluster is forgotten: the others do not name it any more.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import msgspec

from backhaul._monitoring.status import MemberStatus, WorkerStatus

SILENT_SECONDS = 2.5
"""A worker that has not answered for so long is silent."""

_MAX_EVENTS = 200  # that are remembered
_RATE_SECONDS = 0.2  # answers that are closer to each other give no rate


class ClusterEvent(msgspec.Struct, frozen=True):
    """Something that happened to a worker. ``at``: seconds of the monitor's clock since it began."""

    at: float
    worker: str
    kind: str  # "joined", "silent", "lost", "up" (again) or "left"
    reason: str = ""


class ChannelRate(msgspec.Struct, frozen=True):
    """The bytes that one worker sends to another, per second and in all."""

    source: str
    target: str
    rate: float
    total: int
    waiting: int


class Rates(msgspec.Struct, frozen=True):
    """What a worker does per second: calls, bytes, and backward passes that it drives."""

    served: float = 0.0
    called: float = 0.0
    sent: float = 0.0
    received: float = 0.0
    passes: float = 0.0


class Doubt(msgspec.Struct, frozen=True):
    """What one worker thinks of another. ``state``: "suspected" or "lost"."""

    by: str
    worker: str
    state: str
    reason: str


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the monitor sees it.

    Attributes:
        state: "new" (has not answered yet), "up", "silent" or "lost".
        reason: Why it is silent or lost.
        age: Seconds since its last answer; -1 if there was none.
        status: Its last answer.
    """

    id: int
    name: str
    host: str
    state: str
    reason: str = ""
    age: float = -1.0
    rates: Rates = Rates()
    status: WorkerStatus | None = None


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All workers at one time. ``at``: seconds since the monitor began; ``time``: seconds since 1970."""

    at: float
    time: float
    workers: tuple[WorkerView, ...] = ()
    channels: tuple[ChannelRate, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    events: tuple[ClusterEvent, ...] = ()
    problems: tuple[str, ...] = ()


class _Known:
    """One worker. ``asked``: when it was asked and has not answered since; None: it was not."""

    def __init__(self, member: MemberStatus) -> None:
        self.member = member
        self.state = "new"
        self.reason = ""
        self.answered = -1.0
        self.asked: float | None = None
        self.broken = ""  # why its channel is gone; empty: it is not
        self.status: WorkerStatus | None = None
        self.base: WorkerStatus | None = None  # the answer from which the next rates are counted
        self.rates = Rates()
        self.channel_rates: dict[str, float] = {}


class ClusterView:
    """The workers of one cluster, by incarnation. Used by one thread."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._doubts: dict[str, dict[str, MemberStatus]] = {}  # by the incarnation of who doubts, and of the other
        self._events: collections.deque[ClusterEvent] = collections.deque(maxlen=_MAX_EVENTS)
        self._shown = False  # the status was asked for: workers that come from now on have joined

    def member(self, incarnation: str) -> MemberStatus | None:
        """A worker that is known."""
        found = self._known.get(incarnation)
        return None if found is None else found.member

    @property
    def members(self) -> list[MemberStatus]:
        """All workers that are known."""
        return [known.member for known in self._known.values()]

    # What happens.

    def answered(self, status: WorkerStatus, now: float) -> None:
        """A worker has answered. Its answer names all members: learn those that are new."""
        for member in status.members:
            if member.incarnation not in self._known:
                self._known[member.incarnation] = _Known(member)
        known = self._known.get(status.incarnation)
        if known is None:  # not a member of itself any more: it ends
            return
        if known.base is None:
            known.base = status
        elif status.at - known.base.at >= _RATE_SECONDS:
            known.rates, known.channel_rates = _rates(known.base, status)
            known.base = status
        known.status, known.answered, known.asked, known.broken = status, now, None, ""
        self._doubts[status.incarnation] = {each.incarnation: each for each in status.members if each.state != "ok"}
        self._forget_those_that_left(status, now)

    def _forget_those_that_left(self, status: WorkerStatus, now: float) -> None:
        present = {member.incarnation for member in status.members}
        names = {member.name for member in status.members}
        for incarnation, known in list(self._known.items()):
            if incarnation in present:
                continue
            replaced = known.member.name in names
            if known.broken or replaced:
                self._note(now, known, "left", "another worker has its place" if replaced else "")
                self._known.pop(incarnation, None)
                self._doubts.pop(incarnation, None)

    def asked(self, incarnation: str, now: float) -> None:
        """A worker was asked."""
        known = self._known.get(incarnation)
        if known is not None and known.asked is None:
            known.asked = now

    def may_be_asked(self, incarnation: str) -> bool:
        """Whether a worker owes no answer."""
        known = self._known.get(incarnation)
        return known is None or known.asked is None

    def broke(self, incarnation: str, reason: str) -> None:
        """The channel to a worker broke, or none can be opened."""
        known = self._known.get(incarnation)
        if known is not None and not known.broken:
            known.broken, known.asked = reason or "the connection closed", None

    # What follows from it.

    def waits_for(self, incarnation: str, now: float) -> bool:
        """Whether an answer of a worker is worth waiting for: it was asked, and is not silent."""
        known = self._known.get(incarnation)
        return known is not None and known.asked is not None and not known.broken and now - known.asked < SILENT_SECONDS

    def status(self, now: float, time: float, problems: Iterable[str] = ()) -> ClusterStatus:
        """All workers now."""
        doubts = tuple(self._all_doubts())
        by_worker: dict[str, dict[str, Doubt]] = collections.defaultdict(dict)
        for doubt in doubts:
            by_worker[doubt.worker][doubt.state] = doubt
        for known in self._known.values():
            state, reason = _judge(known, by_worker[known.member.name], now)
            if state != known.state and (known.state, state) != ("new", "up"):
                self._note(now, known, state, reason)
            elif state != known.state and self._shown:
                self._note(now, known, "joined", "")
            known.state, known.reason = state, reason
        self._shown = self._shown or any(known.state == "up" for known in self._known.values())
        ordered = sorted(self._known.values(), key=lambda known: (known.member.id, known.answered))
        channels = tuple(channel for known in ordered for channel in _channels(known))
        machines = {known.member.host: known.status.machine for known in ordered if known.status is not None}
        received: dict[str, float] = collections.defaultdict(
            float
        )  # as the senders count: memory that is shared has no bytes to receive
        for channel in channels:
            received[channel.target] += channel.rate
        return ClusterStatus(
            at=now,
            time=time,
            workers=tuple(
                _view(known, now, received[known.member.name], machines.get(known.member.host, known.member.host))
                for known in ordered
            ),
            channels=channels,
            doubts=doubts,
            events=tuple(self._events),
            problems=tuple(problems),
        )

    def _all_doubts(self) -> Iterable[Doubt]:
        for incarnation, doubts in self._doubts.items():
            by = self._known.get(incarnation)
            if by is None or by.broken:
                continue
            for each in doubts.values():
                if each.incarnation in self._known:
                    yield Doubt(by.member.name, each.name, each.state, each.reason)

    def _note(self, now: float, known: _Known, kind: str, reason: str) -> None:
        self._events.append(ClusterEvent(now, known.member.name, kind, reason))


def _judge(known: _Known, doubts: dict[str, Doubt], now: float) -> tuple[str, str]:
    """The state of a worker, and the reason. ``doubts``: what others say of it, by state."""
    silence = 0.0 if known.asked is None else now - known.asked
    quiet = silence > SILENT_SECONDS or (bool(known.broken) and known.answered < 0)
    if known.broken and known.answered >= 0:
        return "lost", known.broken
    if quiet and "lost" in doubts:
        return "lost", f"{doubts['lost'].reason} (seen by {doubts['lost'].by})"
    if quiet:
        return "silent", known.broken or f"has not answered for {silence:.0f} s"
    if known.answered < 0:
        return "new", ""
    if "suspected" in doubts:
        return "silent", f"{doubts['suspected'].by} suspects it: {doubts['suspected'].reason}"
    return "up", ""


def _rates(before: WorkerStatus, after: WorkerStatus) -> tuple[Rates, dict[str, float]]:
    """What a worker did per second between two answers, and the bytes that it sent by worker."""
    seconds = after.at - before.at
    sent, earlier = _sent(after), _sent(before)
    by_worker = {name: max(total - earlier.get(name, 0), 0) / seconds for name, total in sent.items()}
    rates = Rates(
        served=max(after.served - before.served, 0) / seconds,
        called=max(after.called - before.called, 0) / seconds,
        sent=sum(by_worker.values()),
        passes=max(after.graphs.passes_ended - before.graphs.passes_ended, 0) / seconds,
    )
    return rates, by_worker


def _sent(status: WorkerStatus) -> collections.Counter[str]:
    """By worker at the other end: the bytes that went there, over all channels."""
    found = collections.Counter[str]()
    for channel in status.channels:
        found[channel.worker] += channel.sent
    return found


def _channels(known: _Known) -> Iterable[ChannelRate]:
    if known.status is None or known.state == "lost":
        return
    waiting = collections.Counter[str]()
    for channel in known.status.channels:
        waiting[channel.worker] += channel.waiting
    for name, sent in _sent(known.status).items():
        yield ChannelRate(known.member.name, name, known.channel_rates.get(name, 0.0), sent, waiting[name])


def _view(known: _Known, now: float, received: float, machine: str) -> WorkerView:
    rates = msgspec.structs.replace(known.rates, received=received) if known.state in ("up", "silent") else Rates()
    return WorkerView(
        id=known.member.id,
        name=known.member.name,
        host=machine,
        state=known.state,
        reason=known.reason,
        age=-1.0 if known.answered < 0 else now - known.answered,
        rates=rates,
        status=known.status,
    )
