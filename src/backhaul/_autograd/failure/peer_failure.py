"""Workers and channels that are lost: who has to be told what, so that a pass ends at once and contexts are released.

[Note: lost channels] A channel may be lost while both its workers live, and with it what was under way in it. Each end
learns of it and does its part. Whoever took part in a pass with the lost one tells the driver, which may never have
spoken to it. Whoever told the driver something through the channel tells all of that again: nothing happens to what is
heard twice. The driver ends the pass if the lost one took part in it, as far as it knows then or hears later.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from backhaul._autograd.container import split
from backhaul._autograd.messages import AutogradKind, Know, Release, Report
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
    """One worker's. Thread-safe."""

    def __init__(self, engine: Engine, peers: Peers) -> None:
        self._engine = engine
        self._worker = engine.worker
        self._container = engine.container
        self._peers = peers
        engine.worker.on_frame(AutogradKind.KNOW, self._on_know)
        peers.on_lost(self._on_lost)
        peers.on_change(self._on_change)

    def take(self, drive: PassDriver, report: Report, reporter: int) -> None:
        """At the driver of a pass: a worker has lost another, or its channel to this one, perhaps long after this one
        did; what it sent meanwhile has not come.
        """
        lost = reporter if report.lost == self._engine.id else report.lost
        drive.lose(lost, self._engine.name_of(lost), report.reason, report.tally)

    def _on_change(self, what: str, peer: Peer, reason: str) -> None:
        """A worker that is gone for good takes its part of the graph with it, though another may get its id."""
        if what not in ("left", "replaced"):
            return
        for context in self._container.select(lambda context: peer.record.id in context.known):
            context.orphan(peer.record.id, peer.info.name, reason)
        self._lose(peer, reason)
        self._worker.thread_pool.submit(functools.partial(self._spread, peer.record.id, reason))

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        if not peer.gone:
            self._lose(peer, reason)
            self._spread(peer.record.id, reason)
        elif not self._worker.closed:  # that has been dealt with, but for what it has brought since
            self._ask_makers(peer.record.id)

    def _lose(self, peer: Peer, reason: str) -> None:
        lost = peer.record.id
        for drive in list(self._engine.drivers.values()):
            drive.lose(lost, peer.info.name, reason)

    def _spread(self, lost: int, reason: str) -> None:
        """Let others know who may not have noticed."""
        for context in self._container.select(lambda context: bool(context.runs)):
            for run in list(context.runs.values()):
                if run.spec.driver == lost:
                    self._tell_again(run, reason)
                elif run.spec.driver != self._engine.id and (lost in run.sent_to or lost in context.known):
                    run.lost[lost] = reason
                    self._engine.report(Report(run.spec, run.told(lost), lost=lost, reason=reason))
        if not self._worker.closed:
            self._ask_makers(lost)

    def _tell_again(self, run: LocalPass, reason: str) -> None:
        """What the driver was told may be lost with the channel to it."""
        if run.complaint is not None:
            self._engine.post(run.spec.driver, run.complaint)
        self._engine.report(Report(run.spec, run.told(), lost=run.spec.driver, reason=reason))
        for other, why in list(run.lost.items()):
            self._engine.report(Report(run.spec, lost=other, reason=why))

    # Contexts whose end somebody may not have heard of.

    def _ask_makers(self, lost: int) -> None:
        """Whoever would have told this worker of a context's end may be gone, or only the channel is, and with it that
        all is over. The maker is asked to tell; if that cannot be reached, nobody is left who could use the context.
        """
        for context in self._container.select(lambda context: lost in context.known or split(context.id)[0] == lost):
            maker, _ = split(context.id)
            if maker == self._engine.id:
                continue
            known = Frame(AutogradKind.KNOW, 0, pack(Know(context.id)))
            if not self._engine.post(maker, known) and not self._worker.closed:
                self._engine.release(context.id)

    def _on_know(self, channel: Channel, frame: Frame) -> Task | None:
        """A worker has a context of ours, and who brought it there is gone: tell it when that is over."""
        peer, number = self._peers.of(channel), unpack(frame.body, Know).context
        context = self._container.find(number)
        if peer is None or (context is not None and context.doubt(peer.record.id)):
            return None
        return functools.partial(_answer, channel, Frame(AutogradKind.RELEASE, 0, pack(Release(number))))


def _answer(channel: Channel, frame: Frame) -> None:
    """Send a frame where another came from; if that is gone, whoever asked knows it."""
    try:
        channel.send(frame, timeout=0)
    except ChannelClosedError as error:
        log.debug("%s was not answered: %s", channel.peer, error)
