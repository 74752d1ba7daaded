"""What one forward and backward of one user step owns on one worker: its messages' ends and its gradients."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from backhaul._autograd.forward.functions import ContextId, MessageId, Recv, SendRecord, add
from backhaul._devices.cuda import process
from backhaul._devices.stream_order import Mark

if TYPE_CHECKING:
    from backhaul._autograd.backward.local_pass import LocalPass
    from backhaul._autograd.failure.replay import ReplayLog

Snapshot = tuple[dict[torch.Tensor, torch.Tensor], dict[torch.Tensor, list[tuple[tuple[int, ...], torch.Tensor]]]]


class Context:
    """One worker's share of a context. Thread-safe.

    Attributes:
        id: The same on every worker.
        known: Ids of the workers this one exchanged messages of the context with.
        sends: Send records by message.
        recvs: Recv ends by message.
        spent: Messages whose graph was freed by a pass without ``retain_graph``.
        runs: Passes here that are not known to be over, by driver and number.
        aborted: Passes that were over before they came here, likewise.
        orphans: Messages from workers that are gone for good, with the worker and why; nobody takes their gradients.
        released: Whether it is over; nothing is recorded any more.
        replay: What is kept to make a lost worker's share again, if anything.
        doubtful: Workers of those known that have lost a channel, to whatever worker, and asked to be told of the end.
    """

    replay: ReplayLog | None = None
    doubtful: frozenset[int] = frozenset()

    def __init__(self, number: ContextId) -> None:
        self.id = number
        self.lock = threading.Lock()  # guards all below
        self.released = False
        self.known: set[int] = set()
        self.sends: dict[MessageId, SendRecord] = {}
        self.recvs: dict[MessageId, Recv] = {}
        self.spent: set[MessageId] = set()
        self.runs: dict[tuple[int, int], LocalPass] = {}
        self.aborted: set[tuple[int, int]] = set()
        self.orphans: dict[MessageId, tuple[str, str]] = {}
        self._mark: Mark | None = None  # what gradients come of that is still to be done on devices
        self._grads: dict[torch.Tensor, torch.Tensor] = {}
        self._loose: dict[torch.Tensor, list[tuple[tuple[int, ...], torch.Tensor]]] = {}

    def add_send(self, record: SendRecord) -> bool:
        """Note a message that goes out; False if the context has been released."""
        with self.lock:
            if self.released:
                return False
            self.sends[record.message] = record
            self.known.add(record.to)
            return True

    def drop_send(self, message: MessageId) -> None:
        """A message was not sent after all."""
        with self.lock:
            self.sends.pop(message, None)

    def doubt_send(self, message: MessageId) -> None:
        """The call that a message was part of has failed."""
        with self.lock:
            record = self.sends.get(message)
            if record is not None:
                record.failed = True

    def add_recv(self, recv: Recv) -> None:
        """Note a message that came in, and that its sender has this context."""
        with self.lock:
            self.recvs[recv.message] = recv
            self.known.add(recv.sender)

    def know(self, worker: int) -> bool:
        """Note a worker that has this context; False if it has been released."""
        with self.lock:
            if self.released:
                return False
            self.known.add(worker)
            return True

    def doubt(self, worker: int) -> bool:
        """As ``know``, of one that may not hear of the end through each of its channels."""
        with self.lock:
            if self.released:
                return False
            self.known.add(worker)
            self.doubtful |= {worker}
            return True

    def orphan(self, worker: int, name: str, reason: str) -> None:
        """A worker is gone for good, and with it the graph behind what it sent."""
        with self.lock:
            for message, recv in self.recvs.items():
                if recv.sender == worker and message not in self.orphans:
                    self.orphans[message] = name, reason

    def renew(self, sent: MessageId, received: MessageId) -> None:
        """A call that had lost its worker was made again: its messages have both their ends."""
        with self.lock:
            self.orphans.pop(received, None)
            record = self.sends.get(sent)
            if record is not None:
                record.failed = False

    def end(self) -> set[int]:
        """Release this worker's share; return the workers to tell. What holds the graph is let go."""
        with self.lock:
            self.released = True
            for run in self.runs.values():
                run.failed = True
            self.runs.clear()
            self.sends.clear()
            self.recvs.clear()
            self.replay = None
            return set(self.known)

    def accumulate(self, leaf: torch.Tensor, grad: torch.Tensor, order: tuple[int, ...] | None) -> None:
        """Add to a leaf's gradient. With ``order`` contributions are summed in that order, whenever they came."""
        with self.lock:
            if process.stream_order is not None:
                self._follow(self._grads.get(leaf))
            if order is not None:
                self._loose.setdefault(leaf, []).append((order, grad))
            else:
                total = add(self._grads.get(leaf), grad)
                assert total is not None
                self._grads[leaf] = total
            if process.stream_order is not None:
                self._note()

    def accumulate_first(self, leaf: torch.Tensor, grad: torch.Tensor) -> bool:
        """Make ``grad`` a leaf's gradient; False if there is something to add it to."""
        with self.lock:
            if process.stream_order is not None:
                self._note()
            return not self._loose and self._grads.setdefault(leaf, grad) is grad

    def replace(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Put another gradient, or none, in the place of a leaf's."""
        with self.lock:
            self._settle()
            self._grads.pop(leaf, None)
            if grad is not None:
                self._grads[leaf] = grad
            if process.stream_order is not None:
                self._note()

    def gradient(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """A leaf's gradient so far."""
        with self.lock:
            self._settle()
            found = self._grads.get(leaf)
            if process.stream_order is not None:
                self._follow(found)
            return found

    @property
    def gradients(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """Leaf -> gradient, a copy of the table."""
        with self.lock:
            self._settle()
            if process.stream_order is not None:
                self._follow(self._grads)
            return dict(self._grads)

    def snapshot(self) -> Snapshot:
        """All gradients as they are now, for ``restore``."""
        with self.lock:
            return dict(self._grads), {leaf: list(parts) for leaf, parts in self._loose.items()}

    def restore(self, snapshot: Snapshot) -> None:
        """Undo all that was added since; sums are made out of place."""
        with self.lock:
            self._grads, self._loose = dict(snapshot[0]), {leaf: list(parts) for leaf, parts in snapshot[1].items()}

    def _note(self) -> None:
        """Gradients here come after what this thread's streams have to do."""
        if process.stream_order is not None:
            self._mark = process.stream_order.mark(self._mark)

    def _follow(self, grads: object = None) -> None:
        """This thread goes on with gradients."""
        if process.stream_order is not None and self._mark is not None:
            process.stream_order.join(self._mark, grads)

    @torch.enable_grad()  # contributions of a pass that records itself stay recorded, whoever asks
    def _settle(self) -> None:
        if self._loose and process.stream_order is not None:
            self._follow((self._loose, [self._grads.get(leaf) for leaf in self._loose]))
        for leaf, contributions in self._loose.items():
            total = self._grads.get(leaf)
            for _, grad in sorted(contributions, key=lambda item: item[0]):
                total = add(total, grad)
            assert total is not None
            self._grads[leaf] = total
        self._loose.clear()
