"""Workers and channels that are lost: who has to be told what, so that a pass ends at once and contexts are released.

[Note: lost channels] A channel may be lost while both its workers live, and with it what was under way in it. Each end
learns of it and does its part. Whoever sent gradients through it tells the driver, which knows whether they have been
consumed. Whoever told the driver something through it tells all of that again: nothing happens to what is heard twice.
The driver ends the pass if it had sent gradients through it that nobody has reported as consumed.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from backhaul.autograd.container import split
from backhaul.autograd.drives import Drive
from backhaul.autograd.messages import AutogradKind, Know, Release, Report
from backhaul.autograd.outbox import loss
from backhaul.autograd.runs import Run
from backhaul.crew import Task
from backhaul.rpc.peers import Peer, Peers
from backhaul.transport.base import Channel, ChannelClosedError
from backhaul.wire.frames import Frame
from backhaul.wire.messages import pack, unpack
from backhaul.worker import Worker

if TYPE_CHECKING:
    from backhaul.autograd.engine import Engine

log = logging.getLogger("backhaul")


class Losses:
    """One worker's. Thread-safe."""

    def __init__(self, engine: Engine, worker: Worker, peers: Peers) -> None:
        self._engine = engine
        self._id = worker.info.id
        self._container = engine.container
        self._peers = peers
        worker.on_frame(AutogradKind.KNOW, self._on_know)
        peers.on_lost(self._on_lost)

    # At the driver of a pass.

    def take(self, drive: Drive, report: Report, reporter: int) -> None:
        """A worker has lost another, or this one."""
        missed = drive.account(report.tally)
        if missed is not None:
            self.end(drive, missed)
        elif report.lost == self._id:  # what it sent here may not have come; if it did, it is not due any more
            if due := drive.due_at(self._id):
                drive.end(loss(drive.spec, self._peers.find(reporter), report.reason, due))
        elif report.lost >= 0:
            drive.lose(report.lost, report.reason)
            self._end_if_due(drive, report.lost)

    def end(self, drive: Drive, lost: int) -> None:
        """The pass cannot end: something is due at a worker that is lost."""
        drive.end(loss(drive.spec, self._peers.find(lost), drive.lost[lost], drive.due_at(lost)))

    def _end_if_due(self, drive: Drive, lost: int) -> None:
        if drive.due_at(lost):
            self.end(drive, lost)

    # A channel is gone.

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        lost = peer.record.id
        for context in self._container.select(lambda context: lost in context.known or split(context.id)[0] == lost):
            maker, _ = split(context.id)
            if maker == self._id:
                continue
            # If it is the lost one, perhaps only the channel is, and with it that all is over. If it cannot be reached,
            # nobody is left who could use the context. One of its name that has come back knows nothing of it.
            if not self._engine.post(maker, Frame(AutogradKind.KNOW, 0, pack(Know(context.id)))):
                self._engine.release(context.id)
        for context in self._container.select(lambda context: bool(context.runs)):
            for run in list(context.runs.values()):
                if run.spec.driver != self._id:
                    self._tell(run, lost, reason)
        for drive in list(self._engine.drives.values()):
            drive.account(drive.run.told(lost))
            drive.lose(lost, reason)
            self._end_if_due(drive, lost)

    def _tell(self, run: Run, lost: int, reason: str) -> None:
        """Tell the driver of a pass; see [Note: lost channels]."""
        spec = run.spec
        if lost == spec.driver:
            if run.complaint is not None:
                self._engine.post(lost, run.complaint)
            reports = [Report(spec, run.told(), lost=lost if lost in run.sent_to else -1, reason=reason)]
            reports += [Report(spec, lost=other, reason=why) for other, why in run.lost.items()]
        elif lost in run.sent_to:
            run.lost[lost] = reason
            reports = [Report(spec, run.told(lost), lost=lost, reason=reason)]
        else:
            return
        for report in reports:
            self._engine.post(spec.driver, Frame(AutogradKind.REPORT, 0, pack(report)))

    # Contexts whose end somebody may not have heard of.

    def _on_know(self, channel: Channel, frame: Frame) -> Task | None:
        """A worker has a context of ours, and who brought it there is gone: tell it when that is over."""
        peer, number = self._peers.of(channel), unpack(frame.body, Know).context
        context = self._container.find(number)
        if peer is None or (context is not None and context.know(peer.record.id)):
            return None
        return functools.partial(_answer, channel, Frame(AutogradKind.RELEASE, 0, pack(Release(number))))


def _answer(channel: Channel, frame: Frame) -> None:
    """Send a frame where another came from; if that is gone, whoever asked knows it."""
    try:
        channel.send(frame, timeout=0)
    except ChannelClosedError as error:
        log.debug("%s was not answered: %s", channel.peer, error)
