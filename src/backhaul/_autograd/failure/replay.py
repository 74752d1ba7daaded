"""What is kept of a context so that a lost worker's share in it can be made again. Pure: no I/O, no threads of its own.

[Note: replay] Every worker keeps the requests that it sent in such a context, as they went out, with the id of the
reply that came. When a worker is lost and another of its name has come, the requests it had answered are sent to that
one again, in program order, under the same message ids, and it is told under which ids to record its replies. So both
ends of every message fit again: those on the new worker to those on all others. Values of these replies are dropped;
they are known. Calls that the lost worker's functions made are made again by the functions themselves and are new
messages; what the old ones led to gets no gradients any more, and is not sent again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from backhaul._autograd.ids import ROOTS, MessageId
from backhaul._autograd.messages import AutogradNote
from backhaul._runtime.runtime import Lock
from backhaul._wire.frames import Frame
from backhaul._wire.messages import Request, pack, unpack

if TYPE_CHECKING:
    from backhaul._autograd.context import Context
    from backhaul._autograd.gradient_table import Snapshot
    from backhaul._rpc.cluster.peers import Peer

Place = tuple[int, ...]
"""Where a request stands in program order; see [Note: order] in ``recording``."""

Pass = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one."""

NOTE = "autograd"
_REFERENCES = "rref"  # the note of requests that carry references
_REFERRING = "backhaul._rref."  # functions that make values, or look for them


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a context survives the loss of a worker; see ``context``.

    Attributes:
        restore: Called without arguments on the worker that takes a lost one's place, before any function is run there
            again: has to bring that worker's state (modules, tables) to what it was when the context was entered.
        timeout: Seconds to wait for that worker, counted from when its loss is noticed. It gives no call or pass more
            time than that has: who waits for the worker gives up when its own timeout, or the deadline around it, is
            over.
    """

    restore: Callable[[], Any] | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.restore is not None and not callable(self.restore):
            raise TypeError(f"restore must be callable, not a {type(self.restore).__name__}")
        if not self.timeout >= 0:
            raise ValueError(f"timeout must not be negative, got {self.timeout}")


class ReplayEntry:
    """One request."""

    __slots__ = (
        "answered",
        "context",
        "frame",
        "incarnation",
        "label",
        "message",
        "place",
        "reply",
        "timeout",
        "to",
        "trusting",
    )

    def __init__(self, context: Context, note: AutogradNote, peer: Peer) -> None:
        self.context = context
        self.message = note.message
        self.place: Place = note.order
        self.to = peer.record.id
        self.incarnation = peer.record.incarnation  # of the worker that it went to
        self.trusting = not peer.plain
        self.frame: Frame | None = None
        self.label = ""
        self.timeout = 0.0
        self.answered = False
        self.reply: MessageId = ROOTS  # under which id the reply came; none: it was not recorded

    def answer(self, note: AutogradNote | None) -> None:
        """The reply has come."""
        self.reply = ROOTS if note is None else note.message
        self.answered = True

    @property
    def obstacle(self) -> str | None:
        """Why it cannot be sent to another worker."""
        assert self.frame is not None
        if not self.trusting:
            return f"{self.label} ran on a worker that does not trust others (trusted=False)"
        request = unpack(self.frame.body, Request)
        if _REFERENCES in request.notes or request.function.startswith(_REFERRING):
            return f"{self.label} has to do with references to values of workers"
        return None

    def again(self) -> Frame:
        """The request as it is sent to a worker that takes the place of the first."""
        assert self.frame is not None
        request = unpack(self.frame.body, Request)
        note = msgspec.structs.replace(unpack(request.notes[NOTE], AutogradNote), replay=self.reply)
        body = pack(msgspec.structs.replace(request, notes={**request.notes, NOTE: pack(note)}))
        return Frame(self.frame.kind, 0, body, self.frame.buffers)


class ReplayLog:
    """One worker's share in the replay of a context. Thread-safe."""

    def __init__(self, epoch: int, replay: Replay | None = None, members: Iterable[str] = ()) -> None:
        self.epoch = epoch  # of the cluster when the context was entered
        self.replay = replay  # on the worker that made the context
        self.members = frozenset(members)  # there: the names of those who were there then
        self.restored: set[str] = set()  # incarnations that joined later and have the state that was lost
        self.turns: dict[int, Lock] = {}  # there: by worker, held while its share is being made again
        self.passes: list[Pass] = []  # there: all that have been run
        self.outdated = False  # there: whether a worker has none of their gradients
        self._before: Snapshot | None = None  # the gradients before the first pass came here
        self._lock = threading.Lock()  # guards _entries
        self._entries: list[ReplayEntry] = []

    def begin(self, context: Context, note: AutogradNote, peer: Peer) -> ReplayEntry:
        """A request goes out."""
        entry = ReplayEntry(context, note, peer)
        with self._lock:
            self._entries.append(entry)
        return entry

    def begin_passes(self, context: Context) -> None:
        """A pass comes here; if it is the first, note what gradients there are."""
        snapshot = context.snapshot()
        with self._lock:
            self._before = self._before or snapshot

    def undo_passes(self, context: Context) -> None:
        """Put the gradients back to what they were before the first pass."""
        if self._before is not None:
            context.restore(self._before)

    def answered(self, to: int | None = None) -> list[ReplayEntry]:
        """The requests that a worker, or any, has answered."""
        with self._lock:
            return [entry for entry in self._entries if entry.answered and to in (None, entry.to)]

    def find(self, place: Place, to: int) -> ReplayEntry | None:
        """The request of a place that a worker has answered."""
        return next((entry for entry in self.answered(to) if entry.place == place), None)

    def forget_below(self, places: Iterable[Place]) -> None:
        """Requests that were made on behalf of these are going to be made again."""
        above = set(places)
        with self._lock:
            self._entries = [entry for entry in self._entries if not _is_below(entry.place, above)]


def _is_below(place: Place, above: set[Place]) -> bool:
    return any(place[:length] in above for length in range(1, len(place)))


def order(requests: Iterable[tuple[Place, int]]) -> list[tuple[Place, int]]:
    """Which of the requests to one worker, each with its place and who sent it, are sent again, and in what order.

    >>> order([((1,), 0), ((0,), 0), ((0, 2), 3)])  # worker 3 was called on behalf of the first
    [((0,), 0), ((1,), 0)]
    """
    found = sorted(set(requests))
    places = {place for place, _ in found}
    return [(place, sender) for place, sender in found if not _is_below(place, places)]
