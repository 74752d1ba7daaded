"""Ends the send records of the plain graph: workers tell each other which received messages are gone.

See [Note: plain graph] in ``plain_graph``.
"""

from __future__ import annotations

import functools

from backhaul._autograd.backward.messenger import PassMessenger
from backhaul._autograd.forward import functions
from backhaul._autograd.ids import MessageId
from backhaul._autograd.messages import AutogradKind, Drop
from backhaul._autograd.plain_graph import PlainGraph
from backhaul._autograd.untrusted import check_drop
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.security.policy import internal
from backhaul._transport.base import Channel
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack, unpack
from backhaul._worker.cleaner import Cleaner
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError

_MAX_MESSAGES = 1024  # in one frame or call; every worker accepts a frame of that size


class RecordLifetimes:
    """Of one worker. Thread-safe.

    Args:
        worker: The worker.
        peers: The other workers.
        graph: The plain graph of the worker.
        messenger: Sends frames to workers that may be gone.
    """

    def __init__(self, worker: Worker, peers: Peers, graph: PlainGraph, messenger: PassMessenger) -> None:
        self._worker = worker
        self._id = worker.info.id
        self._peers = peers
        self._graph = graph
        self._messenger = messenger
        self._cleaner = Cleaner(worker, "autograd", self._tell_senders)
        graph.watch(self._cleaner.start, self._cleaner.put)
        worker.on_frame(AutogradKind.DROP, self._on_drop, check=check_drop)
        worker.on_close(self._close)
        worker.counters["num_plain_records"] = lambda: len(graph.sends)
        peers.on_lost(self._on_lost)
        peers.on_change(self._on_change)

    def _tell_senders(self, deaths: list[tuple[int, MessageId]]) -> None:
        """Receiving ends are gone: tell the workers that sent the messages."""
        by_sender: dict[int, list[MessageId]] = {}
        for sender, message in deaths:
            by_sender.setdefault(sender, []).append(message)
        deaths.clear()
        for sender, messages in by_sender.items():
            if sender == self._id:
                self._graph.drop(messages)
                continue
            for start in range(0, len(messages), _MAX_MESSAGES):
                frame = Frame(AutogradKind.DROP, 0, pack(Drop(messages[start : start + _MAX_MESSAGES])))
                self._messenger.tell(sender, frame)

    def _on_drop(self, channel: Channel, frame: Frame) -> Task | None:
        peer = self._peers.of(channel)
        if peer is None:
            return None
        return functools.partial(self._graph.drop, unpack(frame.body, Drop).messages, peer.record.id)

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        if what in ("lost", "left", "replaced") and peer.record.id in self._graph.known:
            self._graph.orphan(peer.record.id, peer.info.name, reason)

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        """A channel is lost. Messages in it, and notices that messages are gone, may never have arrived."""
        messages = self._graph.sent_to(peer.record.id)
        if messages and not (peer.gone or self._worker.closed):
            self._worker.thread_pool.submit(functools.partial(self._ask, peer.record.id, messages))

    def _ask(self, worker: int, messages: list[MessageId]) -> None:
        """Drop the records of messages that the other worker does not hold."""
        for start in range(0, len(messages), _MAX_MESSAGES):
            try:
                missing = self._messenger.call(worker, missing_of, messages[start : start + _MAX_MESSAGES])
            except BackhaulError:
                return  # if the worker is lost, ``_on_change`` frees the records
            self._graph.drop(missing, worker)

    def _close(self) -> None:
        self._cleaner.close()
        self._graph.end()


@internal(list)
def missing_of(messages: list[MessageId]) -> list[MessageId]:
    """A worker calls this on the receiver of its messages after the loss of a channel. Returns those that are gone."""
    return [message for message in messages if message not in functions.live]
