"""Frames of passes that arrive: gradients, reports and aborts. Turns them into tasks of local passes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from backhaul._autograd.backward import pass_errors
from backhaul._autograd.backward.local_pass import LocalPass, RequestOrders
from backhaul._autograd.backward.messenger import PassMessenger
from backhaul._autograd.backward.outbox import GradientOutbox, Parcels
from backhaul._autograd.container import Container
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Grads, record_recv
from backhaul._autograd.ids import PLAIN, MessageId, split
from backhaul._autograd.messages import Abort, AutogradKind, Gradient, Gradients, PassSpec, PassTally, Report
from backhaul._autograd.untrusted import check_abort, check_gradients, check_report
from backhaul._rpc.cluster.peers import Peers
from backhaul._rpc.security.policy import internal
from backhaul._runtime import interrupts
from backhaul._transport.base import Channel
from backhaul._wire.codec import load
from backhaul._wire.device_link import decline
from backhaul._wire.faults import decode_fault
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import unpack
from backhaul._wire.tensors.reader import tensors_of
from backhaul._wire.tensors.subclasses import detached
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker, current_worker

if TYPE_CHECKING:
    from backhaul._autograd.backward.driver import PassDriver
    from backhaul._autograd.failure.peer_failure import PeerFailures

SHARE_OUT_SECONDS = 0.001
"""If one gradient takes longer than this, other threads get the gradients that arrived with it."""

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
        self._bring = worker.devices.bring
        worker.attach(self)
        worker.on_frame(AutogradKind.GRADIENT, self._on_gradients, check=check_gradients)
        worker.on_frame(AutogradKind.REPORT, self._on_report, check=check_report)
        worker.on_frame(AutogradKind.ABORT, self._on_abort, check=check_abort)

    def local_pass_of(self, context: Context, spec: PassSpec) -> LocalPass:
        """This worker's share of a pass, made at the first use. Drops the shares of passes that are over."""
        key = spec.driver, spec.number
        with context.lock:
            share = context.runs.get(key)
        if share is None:
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
                share = context.runs.setdefault(key, made)
                share.failed = share.failed or key in context.aborted
                for driver, number in list(context.runs):
                    if driver == spec.driver and number < spec.oldest:
                        del context.runs[driver, number]
                for driver, number in list(context.aborted):
                    if driver == spec.driver and number < spec.oldest:
                        context.aborted.discard((driver, number))
        return share

    def told(self, spec: PassSpec) -> PassTally:
        """What this worker has told the driver of a pass, or has left to other workers to pass on."""
        context = self._container.find(spec.context)
        share = context.runs.get((spec.driver, spec.number)) if context is not None else None
        return share.told() if share is not None else PassTally()

    # Gradients.

    def _on_gradients(self, channel: Channel, frame: Frame) -> Task | None:
        message = unpack(frame.body, Gradients)
        spec = message.spec
        context = self._container.find(spec.context)
        if context is None:
            self._decline(channel, message.gradients)
            if self._container.was_released(spec.context):
                return None  # the driver has given the pass up
            return functools.partial(self._complain_of_missing, spec, message.gradients[0].message)
        share = context.runs.get((spec.driver, spec.number))
        if share is None:
            if spec.driver == self._id:
                self._decline(channel, message.gradients)
                return None  # the pass is over
            share = self.local_pass_of(context, spec)
        arrived = 0
        if spec.profiles and (observer := self._worker.observer) is not None:
            arrived = observer.now()
        task = functools.partial(
            self._worker.context.copy().run,
            self._take_gradients,
            share,
            channel,
            message.gradients,
            frame.buffers,
            arrived,
        )
        if share.begin(message.tally):
            share.inbox.append(task)
            return None
        return task

    def _take_gradients(
        self,
        share: LocalPass,
        channel: Channel,
        gradients: Sequence[Gradient],
        buffers: Sequence[Buffer],
        arrived: int,
    ) -> None:
        """Run the groups that gradients of one frame make ready, and send what they produce."""
        first = gradients[0]
        if arrived:
            peer = self._peers.of(channel)
            sender = peer.record.id if peer is not None else -1
            with share.observed(first.message, sender, arrived):
                self._take_gradients(share, channel, gradients, buffers, 0)
            return
        parcels: Parcels = {}
        if len(gradients) > 1:
            self._take_each(share, channel, gradients, buffers, parcels)
        elif (grads := self._decode(share, channel, first, buffers)) is not None:
            share.run(first.message, grads)
            return
        share.send(first.message, parcels)

    def _take_each(
        self,
        share: LocalPass,
        channel: Channel,
        gradients: Sequence[Gradient],
        buffers: Sequence[Buffer],
        parcels: Parcels,
    ) -> None:
        try:
            share.groups.prepare()  # its time is not that of the first gradient
        except BaseException as error:
            self._decline(channel, gradients)
            share.fail(gradients[0].message, error)
            return
        now, used = self._worker.runtime.now, 0
        began = now()
        for number, gradient in enumerate(gradients):
            own = buffers[used : used + gradient.buffers]
            used += gradient.buffers
            grads = self._decode(share, channel, gradient, own)
            if grads is not None:
                share.enter(gradient.message, grads, parcels)
            before, began = began, now()
            if began > before + SHARE_OUT_SECONDS:
                self._share_out(share, channel, gradients[number + 1 :], buffers[used:])
                return

    def _share_out(
        self, share: LocalPass, channel: Channel, gradients: Sequence[Gradient], buffers: Sequence[Buffer]
    ) -> None:
        """Leave gradients to other threads, one task for each."""
        used = 0
        for gradient in gradients:
            own = buffers[used : used + gradient.buffers]
            used += gradient.buffers
            share.begin()
            run = self._worker.context.copy().run
            self._worker.thread_pool.submit(
                functools.partial(run, self._take_gradients, share, channel, (gradient,), own, 0)
            )

    def _decode(
        self, share: LocalPass, channel: Channel, gradient: Gradient, buffers: Sequence[Buffer]
    ) -> Grads | None:
        """The gradients of one message; None if the pass has failed, or fails because nobody can decode them."""
        if share.failed:
            self._decline(channel, (gradient,))
            return None
        source, payload, note = gradient.message, gradient.payload, gradient.note
        try:
            tensors = tensors_of(payload, buffers, self._link_of(channel).arrive(channel))
            if note is not None:
                record = share.context.sends.get(source)
                replied = record is not None and not record.replied
                tensors = record_recv(share.context, split(note.message)[0], note, tensors, replied=replied)
            elif type(tensors) is not list or any(map(_requires_grad, tensors)):
                tensors = detached(tensors)
            return self._bring(share.context.sends.get(source), load(payload, buffers, tensors))
        except BaseException as error:  # user code may raise anything
            self._decline(channel, (gradient,))
            if isinstance(error, Exception) or interrupts.from_signal(error):
                share.fail(source, error)
            else:
                peer = self._peers.of(channel)
                sender = None if peer is None else peer.info.name
                share.fail(source, pass_errors.undecodable(self._worker.name, sender, source, error))
            return None

    def _decline(self, channel: Channel, gradients: Iterable[Gradient]) -> None:
        """Gradients will not be used: free the slots of device memory that hold them, and their records."""
        link = self._link_of(channel).answer(channel)
        for gradient in gradients:
            decline(gradient.payload, link)
            note = gradient.note
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
                driver.ledger.account(report.tally)
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
