"""Backward: carries passes out. The shell around ``runs`` and ``passes``: frames in and out, threads, waits."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge

from backhaul._autograd.backward.driver import PassDriver
from backhaul._autograd.backward.local_pass import ForeignGraph, LocalPass, Orders, Outcome
from backhaul._autograd.backward.outbox import GradientOutbox, Parcels, key_of
from backhaul._autograd.container import Container, split
from backhaul._autograd.context import Context
from backhaul._autograd.failure.peer_failure import PeerFailures
from backhaul._autograd.failure.recovery import Recovery
from backhaul._autograd.forward.functions import NO_CONTEXT, ROOTS, Grads, MessageId
from backhaul._autograd.forward.recording import enter, leave, record_recv
from backhaul._autograd.messages import (
    Abort,
    AutogradKind,
    Gradient,
    Gradients,
    PassSpec,
    PassTally,
    Release,
    Report,
    in_parts,
)
from backhaul._autograd.plan.planner import Planner, orders_for
from backhaul._autograd.torch_engine import anomaly
from backhaul._autograd.untrusted import recorder_for
from backhaul._devices.cuda import process
from backhaul._devices.links import DeviceLink
from backhaul._rpc.calls.pending import fault_frame
from backhaul._rpc.node import Node
from backhaul._rpc.security.policy import internal
from backhaul._runtime import interrupts
from backhaul._transport.base import Channel, ChannelClosedError
from backhaul._wire.codec import load
from backhaul._wire.device_link import decline
from backhaul._wire.faults import decode_fault, encode_fault
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul._wire.messages import pack, unpack
from backhaul._wire.tensors.reader import tensors_of
from backhaul._wire.tensors.subclasses import detached
from backhaul._worker import deadlines
from backhaul._worker.deadlines import FOREVER
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import current_worker
from backhaul.errors import (
    BackhaulError,
    BackwardTimeoutError,
    ContextError,
    ForeignGraphError,
    GraphFreedError,
    SerializationError,
    UnknownContextError,
    UnknownWorkerError,
)

log = logging.getLogger("backhaul")

T = TypeVar("T")
_UNSEEN = _NOT_WOKEN = contextlib.nullcontext()
_LONG = 0.001  # seconds that one gradient takes from which on others that came with it are for other threads
_CLOSELY = 0.0002  # seconds between releases that make it worth to send them together
_ASKING = 1.0  # seconds that a worker has to say what it knows of a pass that is too late


class Engine:
    """The autograd half of a worker. Thread-safe."""

    def __init__(self, node: Node) -> None:
        self.worker = node.worker
        self.id = node.worker.info.id
        self.container = Container(self.id, node.worker.incarnation)
        self.client = node.client
        self._numbers = itertools.count(1)
        self._released_at = 0.0  # when a context was last released
        self.drives: dict[tuple[int, int], PassDriver] = {}
        self._outbox = GradientOutbox(node.worker, node.client.peers, self.container)
        recorder = recorder_for(node, self.container)
        node.client.interceptors.append(recorder)
        node.worker.on_frame(AutogradKind.GRADIENT, self._on_gradients)
        node.worker.on_frame(AutogradKind.REPORT, self._on_report)
        node.worker.on_frame(AutogradKind.ABORT, self._on_abort)
        node.worker.on_frame(AutogradKind.RELEASE, self._on_release)
        self._planner = Planner(self)
        self._losses = PeerFailures(self, node.peers)
        self.recovery = Recovery(self)
        recorder.keep_requests = self.recovery.keep_requests
        recorder.tell_over = self._tell_over

    def attach(self) -> None:
        """Make this the engine of its worker."""
        self.worker.attach(self)
        self.worker.counters["num_autograd_contexts"] = lambda: len(self.container)
        self.worker.counters["num_current_backward_passes"] = lambda: len(self.drives)

    # Driving a pass.

    def new_number(self) -> int:
        """The number of another pass of this driver's."""
        return next(self._numbers)

    def backward(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        seeds: Grads,
        *,
        inputs: Sequence[torch.Tensor] | None,
        timeout: float,
        retain: bool,
        create: bool,
        fast: bool,
        into_grad: bool,
        deterministic: bool,
        number: int = 0,
        until: float = FOREVER,
    ) -> None:
        """Run one pass over all workers; return when it is over, raise if it failed. It may have a number already, and
        have to end at some time because its ``timeout`` began before.
        """
        number, observer = number or self.new_number(), self.worker.observer
        oldest = number
        if self.drives:
            oldest = min([n for c, n in list(self.drives) if c == context.id], default=number)
        spec = PassSpec(
            context.id,
            self.id,
            number,
            retain,
            create,
            fast,
            into_grad,
            deterministic,
            inputs is not None,
            oldest,
            observer.sessions() if observer is not None else (),
            anomaly.level(),
        )
        edges = [get_gradient_edge(root) for root in roots]
        run = LocalPass(spec, context, self._outbox.send, roots=edges, inputs=inputs)
        drive = run.drive = PassDriver(spec, run, self.worker.runtime)
        try:
            with context.lock:
                context.runs[self.id, number] = run
            self.drives[context.id, number] = drive
            if until != FOREVER:
                run.deadline = until
            elif timeout:
                run.deadline = self.worker.runtime.now() + timeout
            if observer is None:
                self._start(run, seeds)
                self._wait(drive, timeout)
            else:
                with self._observed_pass(spec):
                    with self._observed_group(spec, ROOTS):
                        self._start(run, seeds)
                    self._wait(drive, timeout)
        except BaseException:  # an interrupt of the user's too
            self._abort(drive)
            if context.replay is not None:
                self.recovery.await_idle(run)
            raise
        finally:
            self.drives.pop((context.id, number), None)
            with context.lock:
                context.runs.pop((self.id, number), None)
            run.drive = None  # the two would keep each other, and the graph, until the next collection

    def _start(self, run: LocalPass, seeds: Grads) -> None:
        run.journal.begin()
        parcels: Parcels = {}
        self._enter_source(run, ROOTS, seeds, parcels)
        self._ship(run, ROOTS, parcels)

    def _wait(self, drive: PassDriver, timeout: float) -> None:
        limit, run, cut_by = deadlines.current.get(), drive.run, None
        if limit is not None and limit.until < (FOREVER if run.deadline is None else run.deadline):
            run.deadline, cut_by = limit.until, limit.label
        if not drive.one_shot.opened:
            with self.worker.blocking(), _NOT_WOKEN if limit is None else limit.waking(drive.one_shot.open):
                over = self._attend(drive, run.deadline)
            if limit is not None and limit.root.cancelled:
                raise limit.unwanted(f"backward of context {drive.spec.context} was not done")
            if not over:
                raise self._too_late(drive, timeout, cut_by)
        if self.worker.device_context is not None:
            self.worker.device_context.stream_order.arrive()
        if drive.error is not None:
            raise drive.error

    def _attend(self, drive: PassDriver, deadline: float | None) -> bool:
        """Wait for the end of a pass; whether it came. What comes from the workers that gradients went to is read, and
        gradients for this pass are dealt with, by this very thread: that saves hand-offs.
        """
        while not drive.one_shot.opened:
            left = None if deadline is None else deadline - self.worker.runtime.now()
            channels = dict.fromkeys(c for worker in list(drive.run.sent_to) for c in self._channels_of(worker))
            try:
                held = [channel for channel in channels if channel.acquire(drive)]
                if not held:
                    return drive.one_shot.wait(left)
                drive.attendant = threading.get_ident()
                in_time = self.worker.attend(held, drive.one_shot, left, drive.inbox)
                drive.attendant = 0
            except BaseException as error:
                drive.attendant = 0
                self.client.recover_after_interrupt(error, drive, *channels)
                raise
            while drive.inbox:
                drive.inbox.popleft()()
            if not in_time:
                break
        return drive.one_shot.opened

    def _too_late(self, drive: PassDriver, timeout: float, cut_by: str | None) -> BackwardTimeoutError:
        self._ask_around(drive)
        with drive.lock:
            waiting = {m: self.name_of(worker) for m, worker in drive.ledger.outstanding.items()}
        where = ", ".join(f"message {m} at worker '{name}'" if m else "the roots" for m, name in waiting.items())
        return BackwardTimeoutError(
            f"backward of context {drive.spec.context} was not done "
            + (f"within {timeout:g} s" if cut_by is None else f"when the deadline of {cut_by} was over")
            + f"; under way: {where}",
            worker=self.worker.name,
            context=drive.spec.context,
            outstanding=waiting,
            cut_by=cut_by,
        )

    def _ask_around(self, drive: PassDriver) -> None:
        """Find out where the pass is stuck: what has been done may be with a gradient somewhere on its way."""
        asked = {self.id, -1}
        while True:
            with drive.lock:
                ahead = set(drive.ledger.outstanding.values()) - asked
            if not ahead:
                return
            for worker in ahead:
                asked.add(worker)
                with contextlib.suppress(Exception):  # it may be the one that does not answer
                    tally = self._call(worker, entrusted_by, drive.spec, timeout=_ASKING)
                    with drive.lock:
                        drive.ledger.report(tally.consumed, tally.produced)

    def entrusted(self, spec: PassSpec) -> PassTally:
        """What this worker left to others to pass on to the driver."""
        context = self.container.find(spec.context)
        run = context.runs.get((spec.driver, spec.number)) if context is not None else None
        return run.told() if run is not None else PassTally()

    def _call(self, worker: int, function: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
        """Call one of our own functions on a worker; that is not part of any context."""
        token = enter(None)
        try:
            with deadlines.deadline(None):
                return self.client.call_async(worker, function, args, None, timeout, mode="internal").wait()  # type: ignore[no-any-return]
        finally:
            leave(token)

    def name_of(self, worker: int) -> str:
        """The name of a worker; of this one for -1."""
        if worker < 0:
            return self.worker.name
        try:
            return self.client.peers.find(worker).info.name
        except UnknownWorkerError:  # it is gone
            return f"{worker}"

    def _channels_of(self, worker: int) -> Sequence[Channel]:
        """What there is to a worker."""
        try:
            return self.client.peers.find(worker).channels
        except UnknownWorkerError:  # it is gone
            return ()

    def _abort(self, drive: PassDriver) -> None:
        drive.run.failed = drive.run.aborted = True
        with drive.lock:
            workers = drive.ledger.workers | drive.run.sent_to
        self._send_abort(drive.spec, workers)

    def _send_abort(self, spec: PassSpec, workers: Iterable[int]) -> None:
        for worker in set(workers) - {self.id}:
            self._hint(worker, Frame(AutogradKind.ABORT, 0, pack(Abort(spec))))

    # Sources and groups.

    def _enter_source(self, run: LocalPass, source: MessageId, grads: Grads, parcels: Parcels) -> None:
        """Gradients have come to a source: run what they make possible. Called between the journal's begin and end."""
        try:
            outcomes = run.arrive(source, grads)
            if outcomes:
                self._finish(run, outcomes, parcels)
            elif outcomes is None:
                raise self._missing(run.context.id, source)
            elif run.must_ask(source):
                self._ask_for_orders(run, source)
        except BaseException as error:
            self._fail(run, source, error)

    def _finish(self, run: LocalPass, outcomes: Iterable[Outcome], parcels: Parcels) -> None:
        """Groups have run: note what to tell the driver, and put in ``parcels`` what is left to send."""
        if self.worker.device_context is not None:
            self.worker.device_context.stream_order.depart()  # who hears of it comes after it
        for tally, fired in outcomes:
            if tally is not None:
                run.journal.add(tally)
            else:
                run.fired.update({recv.message: recv.sender for recv, _ in fired})
            if fired:
                self._outbox.put(run, fired, parcels)

    def _ship(self, run: LocalPass, source: MessageId, parcels: Parcels) -> None:
        """Send what has come together, and report if it was the last."""
        if parcels:
            try:
                self._outbox.ship(run, parcels)
            except BaseException as error:
                self._fail(run, source, error)
        tally, channels = run.journal.end()
        if tally is not None or channels:
            self._tell(run, tally, channels)

    def _ask_for_orders(self, run: LocalPass, source: MessageId) -> None:
        spec = run.spec
        if spec.driver == self.id:
            self._follow(run, source, lambda: self._planner.orders_for(spec.context, spec.number, self.id))
            return
        token = enter(None)
        try:
            arguments = spec.context, spec.number, self.id
            future = self.client.call_async(spec.driver, orders_for, arguments, None, 0, mode="internal")
        finally:
            leave(token)
        future._when_done(lambda done: self._follow(run, source, done.value))

    def _follow(self, run: LocalPass, source: MessageId, orders: Any) -> None:
        run.journal.begin()
        parcels: Parcels = {}
        with self._observed_group(run.spec, source):
            try:
                self._finish(run, run.follow(Orders(*orders())), parcels)
            except BaseException as error:
                self._fail(run, source, error)
            self._ship(run, source, parcels)

    def _tell(self, run: LocalPass, tally: PassTally | None, channels: Iterable[Channel]) -> None:
        """The last gradients at hand have been dealt with: report to the driver."""
        for channel in channels:
            channel.flush()
        if tally is None:
            return
        spec = run.spec
        if run.drive is not None:
            self._account(run.drive, tally)
        elif spec.driver != self.id:
            observer = self.worker.observer if spec.profiles else None
            if observer is not None:
                observer.report(spec.profiles, spec.driver, out=True)
            run.entrusted.setdefault(spec.driver, []).append(tally)
            self.report(Report(spec, tally))

    def _fail(self, run: LocalPass, source: MessageId, error: BaseException) -> None:
        """Something went wrong here: let go of the pass and tell the driver."""
        if isinstance(error, ForeignGraph):
            error = self._foreign(run, error)
        if not run.failed:
            run.failed = True
            run.complaint = self._complaint(run.spec, source, error)
            if run.complaint is not None:
                self.post(run.spec.driver, run.complaint)

    def _complaint(self, spec: PassSpec, source: MessageId, error: BaseException) -> Frame | None:
        """What tells the driver of a pass what went wrong here; None: that is this worker, and it knows now."""
        with contextlib.suppress(Exception):  # an exception that takes no notes
            error.add_note(_where(spec, source, self.worker.name))
        if spec.driver == self.id:
            drive = self.drives.get((spec.context, spec.number))
            if drive is not None:
                drive.end(error)
            return None
        options = self.worker.options
        shown = options.trusted if options.tracebacks is None else options.tracebacks
        plain = spec.driver in self.client.peers.plain
        process.judge(error, self.worker.name)
        fault, encoded = encode_fault(error, self.worker.name, plain=plain, tracebacks=shown)
        try:
            driver = self.client.peers.find(spec.driver)
        except UnknownWorkerError:  # it is gone
            return None
        return fault_frame(
            driver, AutogradKind.REPORT, fault, encoded, inside=lambda fault: Report(spec, message=source, fault=fault)
        )

    def _hint(self, worker: int, frame: Frame) -> None:
        """Send a frame to a worker that had a channel with this one, if it still has; never blocks. One that has lost
        it asks by itself, see ``losses``; where there are several it may have lost any of them, and asked through
        another.
        """
        for channel in self._channels_of(worker):
            self._send_hint(worker, channel, frame)

    @staticmethod
    def _send_hint(worker: int, channel: Channel, frame: Frame, *, soon: bool = False) -> bool:
        """Soon: nobody waits for it, so that it may go with others."""
        try:
            if soon:
                channel.send_soon(frame, timeout=0)
            else:
                channel.send(frame, timeout=0)
        except ChannelClosedError as error:
            log.debug("worker %d was not told: %s", worker, error)
            return False
        return True

    def post(self, worker: int, frame: Frame) -> bool:
        """Send a frame to a worker that may be gone; False if that could not be reached. May block."""
        try:
            peer = self.client.peers.find(worker)
            channel = peer.channel or self.client.peers.channel_to(peer, self.worker.options.connect_timeout)
            channel.send(frame, timeout=0)
        except (ChannelClosedError, BackhaulError) as error:
            log.debug("worker %d was not told: %s", worker, error)
            return isinstance(error, ChannelClosedError)  # there is a channel, and its loss is going to be noticed
        return True

    def report(self, report: Report) -> None:
        """Tell the driver of a pass, which may be gone."""
        driver = report.spec.driver
        for part in in_parts(report) if driver in self.client.peers.plain else (report,):
            self.post(driver, Frame(AutogradKind.REPORT, 0, pack(part)))

    # Frames.

    def _on_gradients(self, channel: Channel, frame: Frame) -> Task | None:
        message = unpack(frame.body, Gradients)
        spec = message.spec
        context = self.container.find(spec.context)
        if context is None:
            self._decline(channel, message.gradients)
            if self.container.was_released(spec.context):
                return None  # the driver has given it up
            return functools.partial(self._complain_of_missing, spec, message.gradients[0].message)
        run = context.runs.get((spec.driver, spec.number))
        if run is None:
            if spec.driver == self.id:
                self._decline(channel, message.gradients)
                return None  # the pass is over
            run = self.run_of(context, spec)
        run.journal.begin()
        drive, tally = run.drive, message.tally
        if tally is not None:
            if drive is not None:
                self._account(drive, tally)
            else:
                run.journal.add(tally)
        arrived = 0
        if spec.profiles and (observer := self.worker.observer) is not None:
            arrived = observer.now()
        task = functools.partial(
            self.worker.run, self._take_gradients, run, channel, message.gradients, frame.buffers, arrived
        )
        if drive is not None and drive.attendant == threading.get_ident():
            drive.inbox.append(task)
            return None
        return task

    def _take_gradients(
        self, run: LocalPass, channel: Channel, gradients: Sequence[Gradient], buffers: Sequence[Buffer], arrived: int
    ) -> None:
        """Deal with gradients that came together."""
        parcels: Parcels = {}
        first = gradients[0]
        if arrived:
            peer = self.client.peers.of(channel)
            sender = peer.record.id if peer is not None else -1
            with self._observed_group(run.spec, first.message, sender, arrived):
                self._take_gradients(run, channel, gradients, buffers, 0)
            return
        if len(gradients) == 1:
            self._take(run, channel, first, buffers, parcels)
        else:
            self._take_each(run, channel, gradients, buffers, parcels)
        self._ship(run, first.message, parcels)

    def _take_each(
        self,
        run: LocalPass,
        channel: Channel,
        gradients: Sequence[Gradient],
        buffers: Sequence[Buffer],
        parcels: Parcels,
    ) -> None:
        try:
            run.prepare()  # not to be counted as the first one's
        except BaseException as error:
            self._decline(channel, gradients)
            self._fail(run, gradients[0].message, error)
            return
        now, used = self.worker.runtime.now, 0
        began = now()
        for number, gradient in enumerate(gradients):
            own = buffers[used : used + gradient.buffers]
            used += gradient.buffers
            self._take(run, channel, gradient, own, parcels)
            before, began = began, now()
            if began > before + _LONG:
                self._share_out(run, channel, gradients[number + 1 :], buffers[used:])
                return

    def _share_out(
        self, run: LocalPass, channel: Channel, gradients: Sequence[Gradient], buffers: Sequence[Buffer]
    ) -> None:
        """Leave gradients to whoever has the time."""
        used = 0
        for gradient in gradients:
            own = buffers[used : used + gradient.buffers]
            used += gradient.buffers
            run.journal.begin()
            arguments = run, channel, (gradient,), own, 0
            self.worker.thread_pool.submit(functools.partial(self.worker.run, self._take_gradients, *arguments))

    def _take(
        self, run: LocalPass, channel: Channel, gradient: Gradient, buffers: Sequence[Buffer], parcels: Parcels
    ) -> None:
        if run.failed:
            self._decline(channel, (gradient,))
            return
        source, payload, note = gradient.message, gradient.payload, gradient.note
        try:
            if self.worker.device_context is None:
                tensors = tensors_of(payload, buffers)
            else:
                link = self._link_of(channel)
                tensors = tensors_of(payload, buffers, None if link is None else link.arrive(channel))
            if note is not None:
                record = run.context.sends.get(source)
                replied = record is not None and not record.replied
                tensors = record_recv(run.context, split(note.message)[0], note, tensors, replied=replied)
            else:
                tensors = detached(tensors)
            grads: Grads = load(payload, buffers, tensors)
            if self.worker.device_context is not None:
                record = run.context.sends.get(source)
                if record is not None:
                    grads = record.bring(grads)
        except BaseException as error:  # code of the user's may raise anything
            self._decline(channel, (gradient,))
            if isinstance(error, Exception) or interrupts.from_signal(error):
                self._fail(run, source, error)
            else:
                self._fail(run, source, self._undecodable(channel, source, error))
            return
        self._enter_source(run, source, grads, parcels)

    def _undecodable(self, channel: Channel, source: MessageId, error: BaseException) -> SerializationError:
        peer, name = self.client.peers.of(channel), self.worker.name
        sender = "" if peer is None else f" from worker '{peer.info.name}'"
        made = SerializationError(
            f"worker '{name}' cannot decode the gradients of message {source}{sender}: {type(error).__name__}: {error}",
            worker=name,
        )
        made.__cause__ = error
        return made

    def _link_of(self, channel: Channel) -> DeviceLink | None:
        peer = self.client.peers.of(channel)
        return None if peer is None else peer.link

    def _decline(self, channel: Channel, gradients: Iterable[Gradient]) -> None:
        """Gradients are not going to be used: if they are in slots of device memory, those are free again."""
        link = None if self.worker.device_context is None else self._link_of(channel)
        for gradient in gradients if link is not None else ():
            assert link is not None
            decline(gradient.payload, link.answer(channel))

    def _complain_of_missing(self, spec: PassSpec, source: MessageId) -> None:
        complaint = self._complaint(spec, source, self._missing(spec.context, source))
        if complaint is not None:
            self.post(spec.driver, complaint)

    def _observed_group(
        self, spec: PassSpec, source: MessageId, sender: int = -1, arrived: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        observer = self.worker.observer if spec.profiles else None
        return _UNSEEN if observer is None else observer.group(spec.profiles, key_of(spec, source), sender, arrived)

    def _observed_pass(self, spec: PassSpec) -> contextlib.AbstractContextManager[None]:
        observer = self.worker.observer if spec.profiles else None
        return _UNSEEN if observer is None else observer.drive(spec.profiles, spec.context, spec.number)

    def _missing(self, context: int, source: MessageId) -> ContextError:
        found = self.container.find(context)
        if found is not None and source in found.spent:
            return GraphFreedError(
                f"trying to run backward through the graph of context {context} a second time: what message "
                f"{source} left from was freed by the first pass, which needed retain_graph=True",
                worker=self.worker.name,
                context=context,
                message=source,
            )
        return ContextError(
            f"worker '{self.worker.name}' sent no message {source} in context {context}; were the roots computed in "
            "another context?",
            worker=self.worker.name,
            context=context,
            message=source,
        )

    def _foreign(self, run: LocalPass, found: ForeignGraph) -> ForeignGraphError:
        """The error for a gradient that would have to go through another context, or through none."""
        recv, context, source = found.recv, run.context, found.source
        sender, origin = self.name_of(recv.sender), recv.context
        if source == ROOTS:
            what = f"roots[{found.place}]"
        else:
            record = context.sends.get(source)
            to = "another worker" if record is None else f"worker '{self.name_of(record.to)}'"
            what = f"a tensor that worker '{self.worker.name}' sent to {to}"
        if origin == NO_CONTEXT:
            where = "outside any context"
        else:
            where = f"in context {origin}" + ("" if self.container.find(origin) is not None else ", which was released")
        return ForeignGraphError(
            f"{what} depends on a tensor that worker '{self.worker.name}' received from worker '{sender}' {where}, so "
            f"its gradient cannot be computed in context {context.id}; make the call inside context {context.id}, or "
            "detach() the received tensor if no gradient is meant to go back there",
            worker=self.worker.name,
            context=context.id,
            message=recv.message or None,
            origin=None if origin == NO_CONTEXT else origin,
            sender=sender,
            root=found.place if source == ROOTS else None,
        )

    def run_of(self, context: Context, spec: PassSpec) -> LocalPass:
        """This worker's share of a pass, made at the first use. Those that are over are let go."""
        key = spec.driver, spec.number
        with context.lock:
            run = context.runs.get(key)
        if run is None:
            made = LocalPass(spec, context, self._outbox.send)
            if context.replay is not None:
                context.replay.begin_passes(context)
            with context.lock:
                run = context.runs.setdefault(key, made)
                run.failed = run.failed or key in context.aborted
                for driver, number in list(context.runs):
                    if driver == spec.driver and number < spec.oldest:
                        del context.runs[driver, number]
        return run

    def _on_report(self, channel: Channel, frame: Frame) -> Task | None:
        report = unpack(frame.body, Report)
        peer, observer = self.client.peers.of(channel), self.worker.observer if report.spec.profiles else None
        if observer is not None and peer is not None:
            observer.report(report.spec.profiles, peer.record.id, out=False)
        if report.fault is None and report.lost < 0:
            drive = self.drives.get((report.spec.context, report.spec.number))
            if drive is not None:
                self._account(drive, report.tally)
            return None
        return functools.partial(self._take_fault, channel, report, frame)

    def _take_fault(self, channel: Channel, report: Report, frame: Frame) -> None:
        drive = self.drives.get((report.spec.context, report.spec.number))
        if drive is None:
            return
        if report.fault is not None:
            error = decode_fault(report.fault, frame.buffers)
            where = _where(report.spec, report.message, report.fault.worker)
            if where not in getattr(error, "__notes__", ()):  # it could not travel itself
                error.add_note(where)
            drive.end(error)
        else:
            peer = self.client.peers.of(channel)
            self._losses.take(drive, report, peer.record.id if peer is not None else -1)

    @staticmethod
    def _account(drive: PassDriver, tally: PassTally) -> None:
        loss = drive.account(tally)
        if loss is not None:
            drive.end(loss)

    def _on_abort(self, channel: Channel, frame: Frame) -> None:
        spec = unpack(frame.body, Abort).spec
        context = self.container.find(spec.context)
        if context is None:
            return
        key = spec.driver, spec.number
        with context.lock:
            run = context.runs.get(key)
            if run is None:
                context.aborted.add(key)  # its gradients are still to come
                return
            known, run.failed, run.aborted = run.aborted, True, True
        if not known:
            self._send_abort(spec, run.sent_to)

    # The end of a context.

    def release(self, context: int, known: int = -1) -> None:
        """Forget a context here, and on every worker that it reached but ``known``, which has said so."""
        released = self.container.pop(context)
        if released is None:
            return
        for drive in list(self.drives.values()) if self.drives else ():
            if drive.spec.context == context:
                drive.end(UnknownContextError(f"context {context} was released during backward", context=context))
        told = released.end()
        told.discard(self.id)
        told.discard(known)
        if told:
            now = self.worker.runtime.now()
            soon, self._released_at = now < self._released_at + _CLOSELY, now
            frame = Frame(AutogradKind.RELEASE, 0, pack(Release(context)))
            for worker in told:
                self._tell_end(worker, frame, soon, worker in released.doubtful)

    def _tell_end(self, worker: int, frame: Frame, soon: bool, doubtful: bool) -> None:
        """Send the news of a context's end where the context went: a worker that has lost that channel since asks, and
        is told through all that there are.
        """
        try:
            channel = self.client.peers.find(worker).channel
        except UnknownWorkerError:  # it is gone
            return
        if doubtful or channel is None or not self._send_hint(worker, channel, frame, soon=soon):
            self._hint(worker, frame)

    def _tell_over(self, worker: int, context: int) -> None:
        """A call of a context has ended after the context: what it brought there may have come after the news."""
        self._hint(worker, Frame(AutogradKind.RELEASE, 0, pack(Release(context))))

    def _on_release(self, channel: Channel, frame: Frame) -> Task:
        peer = self.client.peers.of(channel)
        known = peer.record.id if peer is not None else -1
        return functools.partial(self.release, unpack(frame.body, Release).context, known)


@internal(PassSpec)
def entrusted_by(spec: PassSpec) -> PassTally:
    """Called by the driver of a pass; see ``Engine.entrusted``."""
    return current_worker().part(Engine).entrusted(spec)


def _where(spec: PassSpec, source: int, worker: str) -> str:
    return f"in the backward pass of context {spec.context}, message {source}, on worker '{worker}'"
