"""Reacts to lost workers and channels: ends passes at once, and makes sure that contexts are released.

[Note: lost channels] A channel may be lost while both its workers live on, and with it the messages under way in it.
Both workers notice the loss. A worker that took part in a pass with the lost worker tells the driver, which may never
have talked to the lost worker. A worker that sent reports to the driver through the channel sends all of them again;
the driver ignores reports that it has already. The driver ends the pass if the lost worker took part in it, as far as
the driver knows then or learns later.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from backhaul._autograd.ids import PLAIN, split
from backhaul._autograd.messages import AutogradKind, Know, Release, Report
from backhaul._autograd.untrusted import check_know
from backhaul._rpc.cluster.peers import Peer, Peers
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.frames import Frame
from backhaul._wire.messages import pack, unpack
from backhaul._worker.thread_pool import Task

if TYPE_CHECKING:
    from backhaul._autograd.backward.driver import PassDriver
    from backhaul._autograd.backward.engine import Engine
    from backhaul._autograd.backward.local_pass import LocalPass

log = logging.getLogger("backhaul")


class PeerFailures:
    """Handles the losses that one worker notices or hears of. Thread-safe."""

    def __init__(self, engine: Engine, peers: Peers) -> None:
        self._engine = engine
        self._worker = engine.worker
        self._container = engine.container
        self._peers = peers
        engine.worker.on_frame(AutogradKind.KNOW, self._on_know, check=check_know)
        peers.on_lost(self._on_lost)
        peers.on_change(self._on_change)

    def take(self, driver: PassDriver, report: Report, reporter: int) -> None:
        """On the driver of a pass: a worker reports that it has lost another worker, or its channel to this one. It may
        have noticed long after this worker did; then what it sent meanwhile has not arrived.
        """
        lost = reporter if report.lost == self._engine.id else report.lost
        driver.lose(lost, self._engine.name_of(lost), report.reason, report.tally)

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        """A member has changed. A worker that is gone for good takes its share of the graph with it, even if another
        worker gets its id.
        """
        if what not in ("left", "replaced"):
            return
        for context in self._container.select(lambda context: peer.record.id in context.known):
            if context.id == PLAIN:
                continue  # see ``RecordLifetimes``
            context.orphan(peer.record.id, peer.info.name, reason)
        self._lose(peer, reason)
        self._worker.thread_pool.submit(functools.partial(self._spread, peer.record.id, reason))

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        if not peer.gone:
            self._lose(peer, reason)
            self._spread(peer.record.id, reason)
        elif not self._worker.closed:  # ``_on_change`` has handled it, except for contexts that came since
            self._ask_makers(peer.record.id)

    def _lose(self, peer: Peer, reason: str) -> None:
        lost = peer.record.id
        for driver in list(self._engine.drivers.values()):
            driver.lose(lost, peer.info.name, reason)

    def _spread(self, lost: int, reason: str) -> None:
        """Tell the workers that may not have noticed."""
        for context in self._container.select(lambda context: bool(context.runs)):
            for run in list(context.runs.values()):
                if run.spec.driver == lost:
                    if context.id == PLAIN:
                        run.abandon()  # what it told its senders may be lost with the channel; see ``RecordLifetimes``
                    self._tell_again(run, reason)
                elif run.spec.driver != self._engine.id and (lost in run.sent_to or lost in context.known):
                    run.lost[lost] = reason
                    self._engine.report(Report(run.spec, run.told(lost), lost=lost, reason=reason))
        if not self._worker.closed:
            self._ask_makers(lost)

    def _tell_again(self, run: LocalPass, reason: str) -> None:
        """Repeat all reports to the driver of a pass: they may have been lost with the channel to it."""
        if run.complaint is not None:
            self._engine.post(run.spec.driver, run.complaint)
        self._engine.report(Report(run.spec, run.told(), lost=run.spec.driver, reason=reason))
        for other, why in list(run.lost.items()):
            self._engine.report(Report(run.spec, lost=other, reason=why))

    # Contexts whose release a worker may miss.

    def _ask_makers(self, lost: int) -> None:
        """The worker that would have told this one of the release of a context may be gone, or the message was lost
        with the channel. Ask the maker of each such context to tell this worker. If the maker cannot be reached, nobody
        can use the context any more: release it.
        """
        for context in self._container.select(lambda context: lost in context.known or split(context.id)[0] == lost):
            maker, _ = split(context.id)
            if maker == self._engine.id or context.id == PLAIN:
                continue
            known = Frame(AutogradKind.KNOW, 0, pack(Know(context.id)))
            if not self._engine.post(maker, known) and not self._worker.closed:
                self._engine.release(context.id)

    def _on_know(self, channel: Channel, frame: Frame) -> Task | None:
        """A worker has a context that this worker made, and may miss its release: tell it when the context is over."""
        peer, number = self._peers.of(channel), unpack(frame.body, Know).context
        context = self._container.find(number)
        if peer is None or (context is not None and context.doubt(peer.record.id)):
            return None
        return functools.partial(_answer, channel, Frame(AutogradKind.RELEASE, 0, pack(Release(number))))


def _answer(channel: Channel, frame: Frame) -> None:
    """Send a frame through the channel of the question. If the channel is lost, the other worker notices too."""
    try:
        channel.send(frame, timeout=0)
    except ChannelClosedError as error:
        log.debug("could not tell %s that a context is released: %s", channel.peer, error)
