"""Frames of passes that arrive: gradients, reports and aborts. Turns them into tasks of local passes."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from backhaul._autograd.backward import pass_errors
from backhaul._autograd.backward.local_pass import LocalPass, RequestOrders
from backhaul._autograd.backward.messenger import PassMessenger
from backhaul._autograd.backward.outbox import GradientOutbox, Parcels
from backhaul._autograd.container import Container
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import record_recv
from backhaul._autograd.ids import PLAIN, MessageId, split
from backhaul._autograd.messages import Abort, AutogradKind, GradientsEnvelope, PassSpec, PassTally, Report
from backhaul._autograd.untrusted import check_abort, check_gradients, check_report
from backhaul._devices import seam
from backhaul._devices.seam import NO_DEVICES
from backhaul._native import core
from backhaul._rpc.cluster.peers import Peers
from backhaul._rpc.security.policy import internal
from backhaul._runtime import interrupts
from backhaul._transport.base import Channel
from backhaul._wire.call_frames import read_values
from backhaul._wire.faults import decode_fault
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import MALFORMED, unpack
from backhaul._wire.tensors.subclasses import detached
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import ProtocolError

if TYPE_CHECKING:
    from backhaul._autograd.backward.driver import PassDriver
    from backhaul._autograd.failure.peer_failure import PeerFailures

SHARE_OUT_SECONDS = 0.001
"""If gradients take longer than this, other threads get the gradients that arrived with them."""

_FIRST_GUESS_SECONDS = 1e-4  # that the gradients of one message take
_SHORTEST_SECONDS = 1e-6

_requires_grad = operator.attrgetter("requires_grad")


class GradientReceiver:
    """Of one worker. Thread-safe.

    Args:
        worker: The worker; the receiver becomes one of its parts.
        peers: The other workers.
        container: The contexts of this worker.
        drivers: The passes that this worker drives, by context and number.
        outbox: Sends gradients.
        messenger: Sends reports and errors.
        request_orders: Asks the driver of a pass for orders.
        failures: Acts on reports of lost workers.
    """

    def __init__(
        self,
        worker: Worker,
        peers: Peers,
        container: Container,
        drivers: Mapping[tuple[int, int], PassDriver],
        *,
        outbox: GradientOutbox,
        messenger: PassMessenger,
        request_orders: RequestOrders,
        failures: PeerFailures,
    ) -> None:
        self._worker = worker
        self._id = worker.info.id
        self._peers = peers
        self._container = container
        self._drivers = drivers
        self._outbox = outbox
        self._messenger = messenger
        self._request_orders = request_orders
        self._failures = failures
        self._link_of = peers.link_of
        self._source_seconds = _FIRST_GUESS_SECONDS  # about how long the gradients of one message take lately
        worker.attach(self)
        worker.on_frame(AutogradKind.GRADIENT, self._on_gradients, check=check_gradients)
        worker.on_frame(AutogradKind.REPORT, self._on_report, check=check_report)
        worker.on_frame(AutogradKind.ABORT, self._on_abort, check=check_abort)

    def local_pass_of(self, context: Context, spec: PassSpec) -> LocalPass:
        """This worker's share of a pass, made at the first use. Drops the shares of passes that are over."""
        key, runs = (spec.driver, spec.number), context.runs
        share = runs.get(key)
        if share is not None:
            return share
        made = LocalPass(
            self._worker,
            spec,
            context,
            outbox=self._outbox,
            messenger=self._messenger,
            request_orders=self._request_orders,
        )
        if context.replay is not None:
            context.replay.begin_passes(context)
        with context.lock:
            share = runs.setdefault(key, made)
            if len(runs) > 1:
                for old in [run for run in runs if run[0] == spec.driver and run[1] < spec.oldest]:
                    del runs[old]
            if context.aborted:
                share.failed = share.failed or key in context.aborted
                context.aborted -= {run for run in context.aborted if run[0] == spec.driver and run[1] < spec.oldest}
        return share

    def told(self, spec: PassSpec) -> PassTally:
        """What this worker has told the driver of a pass, or has left to other workers to pass on."""
        context = self._container.find(spec.context)
        share = context.runs.get((spec.driver, spec.number)) if context is not None else None
        return share.told() if share is not None else PassTally()

    # Gradients.

    def _on_gradients(self, channel: Channel, frame: Frame) -> Task | None:
        message = unpack(frame.body, GradientsEnvelope)
        spec = message.spec
        context = self._container.find(spec.context)
        if context is None:
            self._decline(channel, message, frame.buffers)
            if self._container.was_released(spec.context):
                return None  # the driver has given the pass up
            return functools.partial(self._complain_of_missing, spec, message.messages[0])
        share = context.runs.get((spec.driver, spec.number))
        if share is None:
            if spec.driver == self._id:
                self._decline(channel, message, frame.buffers)
                return None  # the pass is over
            share = self.local_pass_of(context, spec)
        arrived = 0
        if spec.profiles and (observer := self._worker.observer) is not None:
            arrived = observer.now()
        run = self._worker.context.copy().run
        task = functools.partial(run, self._take_gradients, share, channel, message, frame.buffers, arrived)
        if share.begin(message.tally):
            share.inbox.append(task)
            return None
        return task

    def _take_gradients(
        self, share: LocalPass, channel: Channel, message: GradientsEnvelope, buffers: Sequence[Buffer], arrived: int
    ) -> None:
        """Run the groups that gradients of one frame make ready, and send what they produce."""
        sources = message.messages
        if arrived:
            peer = self._peers.of(channel)
            sender = peer.record.id if peer is not None else -1
            with share.observed(sources[0], sender, arrived):
                self._take_gradients(share, channel, message, buffers, 0)
            return
        grads = self._decode(share, channel, message, buffers)
        if grads is None:
            share.send(sources[0], {})
        elif len(sources) == 1:
            share.take(sources, message.counts, grads)
        else:
            self._take_some(share, sources, message.counts, grads)

    def _take_some(
        self,
        share: LocalPass,
        sources: list[MessageId],
        counts: list[int],
        grads: list[torch.Tensor | None],
    ) -> None:
        """Run as many of the sources at once as most likely take no longer than ``SHARE_OUT_SECONDS``, then others. If
        they take longer, leave the rest to other threads.
        """
        try:
            share.prepare()  # its time is not that of the first gradients
        except BaseException as error:
            share.fail(sources[0], error)
            share.send(sources[0], {})
            return
        now, done, used = self._worker.runtime.now, 0, 0
        parcels: Parcels = {}
        began = now()
        while done < len(sources) and not share.failed:
            some = max(int(SHARE_OUT_SECONDS / self._source_seconds), 1)
            if not done and some >= len(sources):
                share.take(sources, counts, grads)
                self._measure(now() - began, len(sources))
                return
            piece = counts[done : done + some]
            following = used + sum(piece)
            share.enter(sources[done : done + some], piece, grads[used:following], parcels)
            done, used = done + len(piece), following
            before, began = began, now()
            self._measure(began - before, len(piece))
            if began > before + SHARE_OUT_SECONDS:
                self._share_out(share, sources[done:], counts[done:], grads[used:])
                break
        share.send(sources[0], parcels)

    def _measure(self, seconds: float, sources: int) -> None:
        """Gradients of so many messages took so long."""
        self._source_seconds += (seconds / sources - self._source_seconds) / 4
        self._source_seconds = max(self._source_seconds, _SHORTEST_SECONDS)

    def _share_out(
        self,
        share: LocalPass,
        sources: list[MessageId],
        counts: list[int],
        grads: list[torch.Tensor | None],
    ) -> None:
        """Leave gradients to other threads, one task for each source."""
        used = 0
        for source, count in zip(sources, counts, strict=True):
            own = grads[used : used + count]
            used += count
            share.begin()
            run = self._worker.context.copy().run
            self._worker.thread_pool.submit(functools.partial(run, self._take_one, share, source, own))

    @staticmethod
    def _take_one(share: LocalPass, source: MessageId, grads: list[torch.Tensor | None]) -> None:
        if share.failed:
            share.send(source, {})
        else:
            share.take([source], [len(grads)], grads)

    def _decode(
        self, share: LocalPass, channel: Channel, message: GradientsEnvelope, buffers: Sequence[Buffer]
    ) -> list[torch.Tensor | None] | None:
        """The gradients in a frame; None if the pass has failed, or fails because nobody can decode them."""
        if share.failed:
            self._decline(channel, message, buffers)
            return None
        sources, note = message.messages, message.note
        try:
            if core is not None and note is None and not seam.streams.in_use():
                read = core.read_gradients(message.payload, buffers)
                if read is not None and len(sources) == len(message.counts) and sum(message.counts) == len(read):
                    return read  # type: ignore[no-any-return]
            payload = read_values(message.payload, buffers)
            tensors = payload.tensors(self._link_of(channel).arrive(channel))
            if note is not None:
                record = share.context.sends.get(sources[0])
                replied = record is not None and not record.replied
                tensors = record_recv(share.context, split(note.message)[0], note, tensors, replied=replied)
            elif type(tensors) is not list or any(map(_requires_grad, tensors)):
                tensors = detached(tensors)
            grads = payload.values(tensors, self._worker)
            if len(sources) != len(message.counts) or sum(message.counts) != len(grads):
                raise ProtocolError(f"the counts of {len(sources)} messages do not fit {len(grads)} gradients")
            if self._worker.devices is not NO_DEVICES:
                return self._bring(share, sources, message.counts, grads)
            return grads
        except BaseException as error:  # user code may raise anything
            self._decline(channel, message, buffers)
            if isinstance(error, Exception) or interrupts.from_signal(error):
                share.fail(sources[0], error)
            else:
                peer = self._peers.of(channel)
                sender = None if peer is None else peer.info.name
                share.fail(sources[0], pass_errors.undecodable(self._worker.name, sender, sources[0], error))
            return None

    def _bring(
        self,
        share: LocalPass,
        sources: list[MessageId],
        counts: list[int],
        grads: list[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Move gradients to the devices of their tensors."""
        found: list[torch.Tensor | None] = []
        for source, count in zip(sources, counts, strict=True):
            own = grads[len(found) : len(found) + count]
            found += self._worker.devices.bring(share.context.sends.get(source), own)
        return found

    def _decline(self, channel: Channel, message: GradientsEnvelope, buffers: Sequence[Buffer]) -> None:
        """Gradients will not be used: free the slots of device memory that hold them, and their records."""
        with contextlib.suppress(*MALFORMED, ProtocolError):
            read_values(message.payload, buffers).decline(self._link_of(channel).answer(channel))
        note = message.note
        if note is not None and note.message and note.context == PLAIN:
            self._container.plain.refuse(split(note.message)[0], note.message)

    def _complain_of_missing(self, spec: PassSpec, source: MessageId) -> None:
        error = pass_errors.missing_source(self._worker.name, spec.context, source, freed=False)
        complaint = self._messenger.complaint(spec, source, error)
        if complaint is not None:
            self._messenger.post(spec.driver, complaint)

    # Reports and aborts.

    def _on_report(self, channel: Channel, frame: Frame) -> Task | None:
        report = unpack(frame.body, Report)
        peer, observer = self._peers.of(channel), self._worker.observer if report.spec.profiles else None
        if observer is not None and peer is not None:
            observer.report(report.spec.profiles, peer.record.id, out=False)
        if report.fault is None and report.lost < 0:
            driver = self._drivers.get((report.spec.context, report.spec.number))
            if driver is not None:
                driver.ledger.account(report.tally.consumed, report.tally.produced)
            return None
        return functools.partial(self._take_fault, channel, report, frame)

    def _take_fault(self, channel: Channel, report: Report, frame: Frame) -> None:
        driver = self._drivers.get((report.spec.context, report.spec.number))
        if driver is None:
            return
        if report.fault is not None:
            error = decode_fault(report.fault, frame.buffers)
            pass_errors.add_place(error, report.spec, report.message, report.fault.worker)
            driver.ledger.end(error)
        else:
            peer = self._peers.of(channel)
            self._failures.take(driver, report, peer.record.id if peer is not None else -1)

    def _on_abort(self, channel: Channel, frame: Frame) -> None:
        spec = unpack(frame.body, Abort).spec
        context = self._container.find(spec.context)
        if context is None:
            return
        key = spec.driver, spec.number
        with context.lock:
            share = context.runs.get(key)
            if share is None:
                context.aborted.add(key)  # its gradients are still to come
                return
            known = share.aborted
        share.abandon()
        if not known:
            self._messenger.abort(spec, share.sent_to)


@internal(PassSpec)
def told_by(spec: PassSpec) -> PassTally:
    """The driver of a pass calls this on another worker; see ``GradientReceiver.told``."""
    return current_worker().part(GradientReceiver).told(spec)
