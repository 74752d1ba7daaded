"""One worker's share of the graph of messages outside contexts: what ``loss.backward()`` goes back through.

[Note: plain graph] Every worker has one plain graph, from its start to its end. No block ends it, so each message ends
by itself. The recv nodes of a message refer to its ``PlainRecv``, which dies with the local graph behind which it lies.
The send record on the other worker lives as long as that object:

- A pass that frees the graph frees the send records that it uses, and marks the ``PlainRecv`` as spent. An ordinary
  training step therefore needs no message besides those of the pass.
- When a ``PlainRecv`` dies that is not spent, its worker tells the sender, which drops the record (``Drop``).
- When a channel is lost, notices may be lost in it, also that a pass has failed. Each worker then asks the other which
  messages it still holds, and drops the other records. The death of those that it holds is told even if they are spent.
- When the other worker cannot be reached, all records of messages to it are dropped.

A record keeps a graph, and that graph may hold other ``PlainRecv`` objects. Each of these was received before the
record was made. So ownership goes back in time only, has no cycles, and needs no garbage collection.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import PlainRecv, Recv, SendRecord, live
from backhaul._autograd.ids import PLAIN, ContextId, MessageId
from backhaul._autograd.torch_engine import patches
from backhaul._native import core

if TYPE_CHECKING:
    from backhaul._autograd.backward.source_index import PlainSources


_marks = itertools.count(1)


def _new_mark() -> ContextId:
    """What no other plain graph of this process has as its mark. Workers of several clusters may have equal ids."""
    return ContextId(PLAIN - next(_marks))


class PlainGraph(Context):
    """Thread-safe. It is a context that is never released, and that holds no gradients: they go into ``.grad``.

    Attributes:
        sources: Knows which records share a part of the graph. The engine sets it.
        pending: The messages of new records. ``sources`` takes them out when it has walked their graphs.
    """

    sources: PlainSources
    pending: dict[MessageId, bool]

    def __init__(self) -> None:
        super().__init__(PLAIN)
        self.mark = _new_mark()
        self.index = None if core is None else core.SourceIndex(self.mark)
        self.pending = {}
        self._losses: dict[int, tuple[int, str, str]] = {}  # worker -> how often it was lost, its name, the last reason
        self.losses = self._losses
        self._lost_sends: dict[int, frozenset[MessageId]] = {}  # worker -> what was dropped last with it
        self._on_death: Callable[[tuple[int, MessageId]], None] = lambda death: None
        self._watch: Callable[[], None] = lambda: None

    def watch(self, start: Callable[[], None], on_death: Callable[[tuple[int, MessageId]], None]) -> None:
        """Say who hears of the death of receiving ends.

        Args:
            start: Called before a receiving end is made.
            on_death: Called from destructors, with the sender and the message. Must not block.
        """
        self._watch, self._on_death = start, on_death

    def receive(self, message: MessageId, sender: int, order: tuple[int, ...], replied: bool) -> Recv:
        self._watch()
        patches.guard_backward()
        self.known.add(sender)
        generation = self._losses[sender][0] if sender in self._losses else 0
        live.add(message)
        return PlainRecv(message, sender, order, replied, self.mark, 0, generation, self._on_death)

    def received(self, recv: PlainRecv) -> bool:
        """Whether a message was received by this worker."""
        return recv.on_death == self._on_death

    def add_send(self, record: SendRecord) -> bool:
        self.known.add(record.to)
        self.sends[record.message] = record
        self.pending[record.message] = True
        return True

    def drop_send(self, message: MessageId) -> None:
        self.drop((message,))

    def know(self, worker: int) -> bool:
        self.known.add(worker)
        return True

    def refuse(self, sender: int, message: MessageId) -> None:
        """A message that came is not used here: tell its sender."""
        self._watch()
        self._on_death((sender, message))

    def drop(self, messages: Iterable[MessageId], to: int | None = None) -> None:
        """Forget send records: the receiving ends are gone. ``to``: only those of messages to that worker."""
        if to is not None:
            sends = self.sends
            messages = [m for m in messages if (record := sends.get(m)) is not None and record.to == to]
        self.spend(messages)
        self.sources.tidy()

    def spend(self, sources: Iterable[MessageId]) -> None:
        """As ``drop``. The graph of the records is kept until ``sources.tidy`` is called."""
        sends, pending = self.sends, self.pending
        for message in sources:
            if sends.pop(message, None) is not None and pending.pop(message, None) is None:
                self.sources.forget((message,))

    def rest(self) -> None:
        self.sources.tidy()

    def sent_to(self, worker: int) -> list[MessageId]:
        """The messages to a worker whose records are here."""
        return [message for message, record in list(self.sends.items()) if record.to == worker]

    def orphan(self, worker: int, name: str, reason: str) -> None:
        """A worker is lost: free what was kept for it. Messages from it take no gradients any more, and its passes are
        over.
        """
        with self.lock:
            self._losses[worker] = self._losses.get(worker, (0,))[0] + 1, name, reason
            passes = [self.runs.pop(key) for key in list(self.runs) if key[0] == worker]
            self.aborted = {key for key in self.aborted if key[0] != worker}
        for each in passes:
            each.abandon()
        messages = self.sent_to(worker)
        if messages:
            self._lost_sends[worker] = frozenset(messages)
        self.drop(messages)

    def orphaned(self, recv: Recv) -> tuple[str, str] | None:
        loss = self._losses.get(recv.sender)
        if loss is None or not isinstance(recv, PlainRecv) or recv.generation == loss[0]:
            return None
        return loss[1:]

    def lost_send(self, message: MessageId) -> tuple[int, str, str] | None:
        lost = next((worker for worker, messages in list(self._lost_sends.items()) if message in messages), None)
        return None if lost is None else (lost, *self._losses[lost][1:])

    def end(self) -> set[int]:
        """The worker is closed: free everything."""
        super().end()
        return set()
