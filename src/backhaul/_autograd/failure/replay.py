"""What is kept of a context so that a lost worker's share of it can be rebuilt. Pure: no I/O, no threads of its own.

[Note: replay] Every worker keeps the requests that it sent in a context with replay, as they were sent, with the ids of
the replies. When a worker is lost and another one of its name has joined, the requests that the lost worker had
answered are sent to the new one: in program order, under the same message ids, and with the ids under which it has to
record its replies. So the ends of these messages on the new worker match the ends on all other workers. The values of
the repeated replies are dropped, since they are known. Calls that functions of the lost worker made are made again by
the functions themselves, as new messages. The old ones, and what they led to, get no gradients any more and are not
sent again.
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
"""The arguments of one pass."""

NOTE = "autograd"
_RREF_NOTE = "rref"  # the note on requests that carry references
_RREF_FUNCTIONS = "backhaul._rref."  # prefix of the functions that make and fetch values


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a context survives the loss of a worker; see ``context``.

    Attributes:
        restore: Called without arguments on the worker that takes a lost worker's place, before any function runs there
            again. It must bring that worker's state (modules, tables) to what it was when the context was entered.
        timeout: Seconds to wait for that worker after the loss is noticed. A call or a pass that waits for the worker
            still gives up when its own timeout, or the deadline around it, has passed.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(2), bh.context(replay=bh.Replay(timeout=30)) as ctx:
        ...     w = torch.ones(2, requires_grad=True)
        ...     ctx.backward(bh.rpc_sync("worker1", torch.mul, args=(w, 3)).sum())
        ...     ctx.grads[w]
        tensor([3., 3.])
    """

    restore: Callable[[], Any] | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.restore is not None and not callable(self.restore):
            raise TypeError(f"restore must be callable, not a {type(self.restore).__name__}")
        if not self.timeout >= 0:
            raise ValueError(f"timeout must not be negative, got {self.timeout}")


class ReplayEntry:
    """One request that was sent in a context with replay."""

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
        self.incarnation = peer.record.incarnation  # of the worker that it was sent to
        self.trusting = not peer.plain
        self.frame: Frame | None = None
        self.label = ""
        self.timeout = 0.0
        self.answered = False
        self.reply: MessageId = ROOTS  # the id of the reply; ROOTS: the reply was not recorded

    def answer(self, note: AutogradNote | None) -> None:
        """The reply has arrived."""
        self.reply = ROOTS if note is None else note.message
        self.answered = True

    @property
    def obstacle(self) -> str | None:
        """Why the request cannot be sent to another worker; None if it can."""
        assert self.frame is not None
        if not self.trusting:
            return f"{self.label} ran on an untrusting worker (trusted=False), which takes no part in replay"
        request = unpack(self.frame.body, Request)
        if _RREF_NOTE in request.notes or request.function.startswith(_RREF_FUNCTIONS):
            return f"{self.label} uses references to values on workers, which replay cannot rebuild"
        return None

    def again(self) -> Frame:
        """The request as it is sent to the worker that took the lost worker's place."""
        assert self.frame is not None
        request = unpack(self.frame.body, Request)
        note = msgspec.structs.replace(unpack(request.notes[NOTE], AutogradNote), replay=self.reply)
        body = pack(msgspec.structs.replace(request, notes={**request.notes, NOTE: pack(note)}))
        return Frame(self.frame.kind, 0, body, self.frame.buffers)


class ReplayLog:
    """What one worker keeps of a context for replay. Thread-safe."""

    def __init__(self, epoch: int, replay: Replay | None = None, members: Iterable[str] = ()) -> None:
        self.epoch = epoch  # of the membership when the context was entered
        self.replay = replay  # on the worker that made the context
        self.members = frozenset(members)  # at the maker: names of the members at that time
        self.restored: set[str] = set()  # incarnations that joined later and got the lost state
        self.turns: dict[int, Lock] = {}  # at the maker: by worker, held while its share is rebuilt
        self.passes: list[Pass] = []  # at the maker: all passes that were run
        self.outdated = False  # at the maker: whether a worker has lost their gradients
        self._before: Snapshot | None = None  # the gradients before the first pass reached this worker
        self._lock = threading.Lock()  # guards _entries
        self._entries: list[ReplayEntry] = []

    def begin(self, context: Context, note: AutogradNote, peer: Peer) -> ReplayEntry:
        """Keep a request that is about to be sent."""
        entry = ReplayEntry(context, note, peer)
        with self._lock:
            self._entries.append(entry)
        return entry

    def begin_passes(self, context: Context) -> None:
        """A pass reaches this worker. If it is the first, keep the gradients from before it."""
        snapshot = context.snapshot()
        with self._lock:
            self._before = self._before or snapshot

    def undo_passes(self, context: Context) -> None:
        """Restore the gradients from before the first pass."""
        if self._before is not None:
            context.restore(self._before)

    def answered(self, to: int | None = None) -> list[ReplayEntry]:
        """The requests that a worker has answered; None: any worker."""
        with self._lock:
            return [entry for entry in self._entries if entry.answered and to in (None, entry.to)]

    def find(self, place: Place, to: int) -> ReplayEntry | None:
        """The request at a place that a worker has answered."""
        return next((entry for entry in self.answered(to) if entry.place == place), None)

    def forget_below(self, places: Iterable[Place]) -> None:
        """Forget requests that handlers of the requests at these places made: the handlers run and make them again."""
        above = set(places)
        with self._lock:
            self._entries = [entry for entry in self._entries if not _is_below(entry.place, above)]


def _is_below(place: Place, above: set[Place]) -> bool:
    return any(place[:length] in above for length in range(1, len(place)))


def order(requests: Iterable[tuple[Place, int]]) -> list[tuple[Place, int]]:
    """Which requests to one worker are sent again, and in what order. Each has its place and its sender.

    >>> order([((1,), 0), ((0,), 0), ((0, 2), 3)])  # the handler of the request at (0,) sent the last
    [((0,), 0), ((1,), 0)]
    """
    found = sorted(set(requests))
    places = {place for place, _ in found}
    return [(place, sender) for place, sender in found if not _is_below(place, places)]
