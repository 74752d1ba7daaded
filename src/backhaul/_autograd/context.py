"""One worker's share of a context: both ends of the messages that it sent and received, and its gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import TYPE_CHECKING, Any

from backhaul._autograd.forward.functions import Recv, SendRecord
from backhaul._autograd.gradient_table import GradientTable
from backhaul._autograd.ids import ContextId, MessageId
from backhaul._native import core

if TYPE_CHECKING:
    from backhaul._autograd.backward.local_pass import LocalPass
    from backhaul._autograd.failure.replay import ReplayLog


# Over the limit because each attribute is what one part of autograd keeps for a context, under one lock.
class Context(GradientTable):
    """One worker's share of a context. Thread-safe. It is its own gradient table, so that a pass reaches gradients in
    one step.

    Attributes:
        id: The id, the same on every worker.
        mark: What the receiving ends of messages carry, to tell the messages of different contexts apart.
        index: The native core's index of ``sends``; None without the core.
        known: Ids of the workers with which this one exchanged messages of the context.
        sends: Send records by message.
        pending: See ``PlainGraph``.
        recvs: Recv ends by message.
        spent: Messages whose graph a pass without ``retain_graph`` has freed.
        runs: Passes on this worker that may not be over, by driver and number.
        aborted: Passes that were over before they reached this worker, by driver and number.
        orphans: Messages from workers that are gone for good, with the worker's name and the reason. Nobody takes their
            gradients.
        losses: Empty if no worker is lost that ``orphaned`` could name.
        released: Whether the context is over; nothing is recorded any more.
        replay: What is kept to rebuild a lost worker's share, if anything.
        doubtful: Known workers that have lost a channel to some worker, and asked to be told when the context is over.
    """

    replay: ReplayLog | None = None
    doubtful: frozenset[int] = frozenset()
    pending: dict[MessageId, bool] | None = None

    def __init__(self, number: ContextId) -> None:
        super().__init__()
        self.id = self.mark = number
        self.index: Any = None if core is None else core.SourceIndex(number)
        self.released = False
        self.known: set[int] = set()
        self.sends: dict[MessageId, SendRecord] = {}
        self.recvs: dict[MessageId, Recv] = {}
        self.spent: set[MessageId] = set()
        self.runs: dict[tuple[int, int], LocalPass] = {}
        self.aborted: set[tuple[int, int]] = set()
        self.orphans: dict[MessageId, tuple[str, str]] = {}
        self.losses: Sized = self.orphans

    def add_send(self, record: SendRecord) -> bool:
        """Record an outgoing message; False if the context was released."""
        with self.lock:
            if self.released:
                return False
            self.sends[record.message] = record
            self.known.add(record.to)
            return True

    def drop_send(self, message: MessageId) -> None:
        """Forget an outgoing message that was not sent."""
        with self.lock:
            self.sends.pop(message, None)

    def doubt_send(self, message: MessageId) -> None:
        """Mark an outgoing message whose call has failed."""
        with self.lock:
            record = self.sends.get(message)
            if record is not None:
                record.failed = True

    def receive(self, message: MessageId, sender: int, order: tuple[int, ...], replied: bool) -> Recv:
        """Record an incoming message, and return its receiving end. Its sender has this context too."""
        recv = Recv(message, sender, order, replied, self.mark)
        with self.lock:
            self.recvs[message] = recv
            self.known.add(sender)
        return recv

    def spend(self, sources: Iterable[MessageId]) -> None:
        """A pass that frees the graph has used these sources: no pass can use them again."""
        with self.lock:
            for source in sources:
                if self.sends.pop(source, None) is not None:
                    self.spent.add(source)

    def rest(self) -> None:
        """A task of a pass is done on this worker: free what it has dropped."""

    def orphaned(self, recv: Recv) -> tuple[str, str] | None:
        """The name of the worker and the reason, if the sender of a message is gone for good."""
        return self.orphans.get(recv.message)

    def lost_send(self, message: MessageId) -> tuple[int, str, str] | None:
        """The worker that a message was sent to, its name and a reason, if the record was dropped because that worker
        was lost.
        """
        return None

    def know(self, worker: int) -> bool:
        """Note that a worker has this context; False if the context was released."""
        with self.lock:
            if self.released:
                return False
            self.known.add(worker)
            return True

    def doubt(self, worker: int) -> bool:
        """As ``know``, for a worker that has lost a channel and may miss the release."""
        with self.lock:
            if self.released:
                return False
            self.known.add(worker)
            self.doubtful |= {worker}
            return True

    def orphan(self, worker: int, name: str, reason: str) -> None:
        """A worker is gone for good, and with it the graph behind the messages that it sent."""
        with self.lock:
            for message, recv in self.recvs.items():
                if recv.sender == worker and message not in self.orphans:
                    self.orphans[message] = name, reason

    def renew(self, sent: MessageId, received: MessageId) -> None:
        """A call that had lost its worker was made again, so its messages have both ends again."""
        with self.lock:
            self.orphans.pop(received, None)
            record = self.sends.get(sent)
            if record is not None:
                record.failed = False

    def end(self) -> set[int]:
        """Release this worker's share, with the graph that it holds. Returns the workers to tell."""
        with self.lock:
            self.released = True
            for run in self.runs.values():
                run.failed = True
            self.runs.clear()
            self.sends.clear()
            self.recvs.clear()
            self.replay = None
            return set(self.known)
