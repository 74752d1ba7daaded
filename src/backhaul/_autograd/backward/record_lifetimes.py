"""Ends the send records of the plain graph: workers tell each other which received messages are gone.

See [Note: plain graph] in ``plain_graph``.
"""

from __future__ import annotations

import functools
import logging

from backhaul._autograd.backward.messenger import PassMessenger
from backhaul._autograd.forward import functions
from backhaul._autograd.ids import MessageId
from backhaul._autograd.messages import AutogradKind, Drop
from backhaul._autograd.plain_graph import PlainGraph
from backhaul._autograd.untrusted import check_drop
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._rpc.futures import Future
from backhaul._rpc.security.policy import internal
from backhaul._transport.base import Channel
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack, unpack
from backhaul._worker.cleaner import Cleaner
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import BackhaulError, PeerLostError

log = logging.getLogger("backhaul")

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
        self._asking: set[int] = set()  # workers that a thread connects to and asks
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
                self._messenger.hint(sender, frame, soon=True)

    def _on_drop(self, channel: Channel, frame: Frame) -> Task | None:
        peer = self._peers.of(channel)
        if peer is None:
            return None
        return functools.partial(self._graph.drop, unpack(frame.body, Drop).messages, peer.record.id)

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        if what in ("left", "replaced"):
            self._graph.orphan(peer.record.id, peer.info.name, reason)
        elif what == "lost" and peer.record.id not in self._asking:  # else the question itself has failed
            self._reconcile_later(peer, reason)

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        """A channel is lost. Messages in it, and notices that messages are gone, may never have arrived."""
        if peer.gone and self._peers.with_id(peer.record.id) in (None, peer):
            self._graph.orphan(peer.record.id, peer.info.name, reason)  # sent between its farewell and the loss
        self._reconcile_later(peer, reason)

    def _reconcile_later(self, peer: Peer, reason: str) -> None:
        over = peer.gone or self._peers.ending or self._worker.closed
        if peer.record.id in self._graph.known and not over:
            messages = self._graph.sent_to(peer.record.id)  # as of now: later ones may be under way
            task = functools.partial(self._worker.run, self._reconcile, peer, reason, messages)
            self._worker.thread_pool.submit(task)

    def _reconcile(self, peer: Peer, reason: str, messages: list[MessageId]) -> None:
        """Ask the other worker which of the messages it holds, and drop the records of the others. If the worker cannot
        be reached, drop all.
        """
        worker = peer.record.id
        for start in range(0, len(messages), _MAX_MESSAGES):
            self._asking.add(worker)
            try:
                asked = self._messenger.ask(worker, missing_of, messages[start : start + _MAX_MESSAGES])
            except BackhaulError as error:  # the other worker has left, or this one is closed
                log.debug("cannot ask worker '%s' which messages it holds: %s", peer.info.name, error)
                return
            finally:
                self._asking.discard(worker)
            asked._when_done(functools.partial(self._take_answer, peer, reason, not asked.done()))

    def _take_answer(self, peer: Peer, reason: str, sent: bool, answer: Future[list[MessageId]]) -> None:
        """``sent``: whether the question was sent, so that its failure says that a channel was lost since."""
        if self._peers.with_id(peer.record.id) is not peer:
            return  # see ``_on_change``
        try:
            missing = answer.value()
        except PeerLostError:
            if peer.lost or not sent:
                self._graph.orphan(peer.record.id, peer.info.name, reason)
            else:
                self._reconcile_later(peer, reason)  # only a channel was lost
        except BackhaulError as error:
            log.debug("worker '%s' did not say which messages it holds: %s", peer.info.name, error)
        else:
            self._graph.drop(missing, peer.record.id)

    def _close(self) -> None:
        self._cleaner.close()
        self._graph.end()


@internal(list)
def missing_of(messages: list[MessageId]) -> list[MessageId]:
    """A worker calls this on the receiver of its messages after the loss of a channel. Returns those that are gone. It
    will hear of the death of the others, whatever passes do.
    """
    functions.doubted.update(messages)
    missing = [message for message in messages if message not in functions.live]
    functions.doubted.difference_update(missing)
    return missing
