"""Backward: carries passes out. The shell around ``runs`` and ``passes``: frames in and out, threads, waits."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge

from backhaul.autograd.checked import recorder_for
from backhaul.autograd.container import Container, split
from backhaul.autograd.context import Context
from backhaul.autograd.functions import ROOTS, Grads, MessageId, Recv
from backhaul.autograd.messages import Abort, AutogradKind, Gradient, Know, PassSpec, Release, Report, Tally
from backhaul.autograd.passes import Ledger, Plan, Summary
from backhaul.autograd.recording import enter, leave, record_recv, record_send
from backhaul.autograd.reports import Reports
from backhaul.autograd.runs import Orders, Outcome, Run
from backhaul.crew import Task
from backhaul.errors import (
    BackhaulError,
    BackwardTimeoutError,
    ContextError,
    GraphFreedError,
    PeerLostError,
    UnknownContextError,
)
from backhaul.observe import GradientKey
from backhaul.rpc.node import Node
from backhaul.rpc.peers import Peer
from backhaul.rpc.policy import internal
from backhaul.runtime import Gate
from backhaul.transport.base import Channel, ChannelClosedError
from backhaul.wire.codec import encode, load, tensors_of
from backhaul.wire.faults import decode_fault, encode_fault
from backhaul.wire.frames import Frame
from backhaul.wire.messages import pack, unpack
from backhaul.worker import current_worker

log = logging.getLogger("backhaul")

T = TypeVar("T")
_UNSEEN = contextlib.nullcontext()
_ASKING = 1.0  # seconds that a worker has to say what it knows of a pass that is too late


class Drive:
    """A pass, at its driver."""

    def __init__(self, spec: PassSpec, run: Run, gate: Gate) -> None:
        self.spec = spec
        self.run = run
        self.gate = gate
        self.error: BaseException | None = None
        self.lock = threading.Lock()  # guards ledger and error
        self.ledger = Ledger()
        self.lost: dict[int, str] = {}  # workers lost since the pass began, and why
        self.planning = threading.Lock()  # held while the plan is made
        self.plan: Plan | None = None
        self.attendant = 0  # the thread that reads for the pass while it waits for its end
        self.inbox: collections.deque[Task] = collections.deque()  # what it has to do


class Engine:
    """The autograd half of a worker. Thread-safe."""

    def __init__(self, node: Node) -> None:
        self.worker = node.worker
        self.id = node.worker.info.id
        self.container = Container(self.id)
        self.agent = node.agent
        self._numbers = itertools.count(1)
        self.drives: dict[tuple[int, int], Drive] = {}
        self._reports = Reports()
        node.agent.interceptors.append(recorder_for(node, self.container))
        node.worker.on_frame(AutogradKind.GRADIENT, self._on_gradient)
        node.worker.on_frame(AutogradKind.REPORT, self._on_report)
        node.worker.on_frame(AutogradKind.ABORT, self._on_abort)
        node.worker.on_frame(AutogradKind.RELEASE, self._on_release)
        node.worker.on_frame(AutogradKind.KNOW, self._on_know)
        node.peers.on_lost(self._on_lost)

    def attach(self) -> None:
        """Make this the engine of its worker."""
        self.worker.attach(self)
        self.worker.counters["num_autograd_contexts"] = lambda: len(self.container)
        self.worker.counters["num_current_backward_passes"] = lambda: len(self.drives)

    # Driving a pass.

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
    ) -> None:
        """Run one pass over all workers; return when it is over, raise if it failed."""
        number, observer = next(self._numbers), self.worker.observer
        active = [drive.spec.number for drive in list(self.drives.values()) if drive.spec.context == context.id]
        spec = PassSpec(
            context.id,
            self.id,
            number,
            retain,
            create,
            fast,
            into_grad,
            deterministic,
            restricted=inputs is not None,
            oldest=min(active, default=number),
            profiles=observer.sessions() if observer is not None else (),
        )
        edges = [get_gradient_edge(root) for root in roots]
        run = Run(spec, context, self._send_gradients, roots=edges, inputs=inputs)
        with context.lock:
            context.runs[self.id, spec.number] = run
        drive = Drive(spec, run, self.worker.runtime.gate())
        self.drives[spec.context, spec.number] = drive
        deadline = run.deadline = self.worker.runtime.now() + timeout if timeout else None
        try:
            with self._observed_pass(spec):
                self._reports.begin(spec)
                with self._observed_group(spec, ROOTS):
                    self._enter_source(run, ROOTS, seeds)
                    self._tell(spec)
                with self.worker.blocking():
                    over = self._attend(drive, deadline)
                if not over:
                    raise self._too_late(drive, timeout)
                if drive.error is not None:
                    raise drive.error
        except BaseException:  # an interrupt of the user's too
            self._abort(drive)
            raise
        finally:
            self.drives.pop((spec.context, spec.number), None)
            with context.lock:
                context.runs.pop((self.id, spec.number), None)

    def _attend(self, drive: Drive, deadline: float | None) -> bool:
        """Wait for the end of a pass; whether it came. What comes from the workers that gradients went to is read, and
        gradients for this pass are dealt with, by this very thread: that saves hand-offs.
        """
        while not drive.gate.opened:
            left = None if deadline is None else deadline - self.worker.runtime.now()
            channels = [self.agent.peers.find(worker).channel for worker in list(drive.run.sent_to)]
            held = [channel for channel in channels if channel is not None and channel.hold()]
            if not held:
                return drive.gate.wait(left)
            drive.attendant = threading.get_ident()
            try:
                in_time = self.worker.attend(held, drive.gate, left, drive.inbox)
            finally:
                drive.attendant = 0
            while drive.inbox:
                drive.inbox.popleft()()
            if not in_time:
                break
        return drive.gate.opened

    def _too_late(self, drive: Drive, timeout: float) -> BackwardTimeoutError:
        self._ask_around(drive)
        with drive.lock:
            waiting = {m: self.name_of(worker) for m, worker in drive.ledger.outstanding.items()}
        where = ", ".join(f"message {m} at worker '{name}'" if m else "the roots" for m, name in waiting.items())
        return BackwardTimeoutError(
            f"backward of context {drive.spec.context} was not done within {timeout:g} s; under way: {where}",
            worker=self.worker.name,
            context=drive.spec.context,
            outstanding=waiting,
        )

    def _ask_around(self, drive: Drive) -> None:
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

    def entrusted(self, spec: PassSpec) -> Tally:
        """What this worker left to others to pass on to the driver."""
        context = self.container.find(spec.context)
        run = context.runs.get((spec.driver, spec.number)) if context is not None else None
        return merge([tally for tallies in run.entrusted.values() for tally in tallies] if run is not None else ())

    def _call(self, worker: int, function: Callable[..., T], *args: Any, timeout: float | None = None) -> T:
        """Call one of our own functions on a worker; that is not part of any context."""
        token = enter(None)
        try:
            return self.agent.call_async(worker, function, args, None, timeout, mode="internal").wait()  # type: ignore[no-any-return]
        finally:
            leave(token)

    def name_of(self, worker: int) -> str:
        """The name of a worker; of this one for -1."""
        return self.agent.peers.find(worker).info.name if worker >= 0 else self.worker.name

    def _abort(self, drive: Drive) -> None:
        drive.run.failed = drive.run.aborted = True
        with drive.lock:
            workers = drive.ledger.workers | drive.run.sent_to
        self._send_abort(drive.spec, workers)

    def _send_abort(self, spec: PassSpec, workers: Iterable[int]) -> None:
        for worker in set(workers) - {self.id}:
            self._post(worker, Frame(AutogradKind.ABORT, 0, pack(Abort(spec))))

    # Sources and groups.

    def _enter_source(self, run: Run, source: MessageId, grads: Grads) -> None:
        """Gradients have come to a source: run what they make possible. Called between the reports' begin and end."""
        try:
            ask = run.must_ask(source)
            self._finish(run, run.arrive(source, grads))
        except BaseException as error:
            self._fail(run, source, error)
            return
        if ask:
            self._ask_for_orders(run, source)

    def _finish(self, run: Run, outcomes: Iterable[Outcome]) -> None:
        """Groups have run: send what is left to send, and note what to tell the driver."""
        for outcome in outcomes:
            if outcome.tally is not None:
                self._reports.add(run.spec, outcome.tally)
            self._reports.expect(run.spec, len(outcome.fired))
            for recv, grads in outcome.fired:
                self._send_gradients(run, recv, grads)

    def _ask_for_orders(self, run: Run, source: MessageId) -> None:
        spec = run.spec
        if spec.driver == self.id:
            self._follow(run, source, lambda: self.orders_for(spec.context, spec.number, self.id))
            return
        token = enter(None)
        try:
            arguments = spec.context, spec.number, self.id
            future = self.agent.call_async(spec.driver, orders_for, arguments, None, 0, mode="internal")
        finally:
            leave(token)
        future._when_done(lambda done: self._follow(run, source, done.value))

    def _follow(self, run: Run, source: MessageId, orders: Any) -> None:
        self._reports.begin(run.spec)
        with self._observed_group(run.spec, source):
            try:
                self._finish(run, run.follow(Orders(*orders())))
            except BaseException as error:
                self._fail(run, source, error)
            self._tell(run.spec)

    def _tell(self, spec: PassSpec) -> None:
        """A gradient has been dealt with: report to the driver if it was the last at hand."""
        tally, channels = self._reports.end(spec)
        for channel in channels:
            channel.flush()
        if tally is None:
            return
        if spec.driver == self.id:
            self._account(spec, tally)
        else:
            observer = self.worker.observer if spec.profiles else None
            if observer is not None:
                observer.report(spec.profiles, spec.driver, out=True)
            self._post(spec.driver, Frame(AutogradKind.REPORT, 0, pack(Report(spec, tally))))

    def _fail(self, run: Run, source: MessageId, error: BaseException) -> None:
        """Something went wrong here: let go of the pass and tell the driver."""
        if not run.failed:
            run.failed = True
            self._complain(run.spec, source, error)

    def _complain(self, spec: PassSpec, source: MessageId, error: BaseException) -> None:
        error.add_note(_where(spec, source, self.worker.name))
        if spec.driver == self.id:
            drive = self.drives.get((spec.context, spec.number))
            if drive is not None:
                self._end(drive, error)
            return
        options = self.worker.options
        shown = options.trusted if options.tracebacks is None else options.tracebacks
        plain = self.agent.peers.find(spec.driver).plain
        fault, encoded = encode_fault(error, self.worker.name, plain=plain, tracebacks=shown)
        report = Report(spec, message=source, fault=fault)
        buffers = encoded.buffers if encoded is not None else ()
        self._post(spec.driver, Frame(AutogradKind.REPORT, 0, pack(report), buffers, encoded))

    def _send_gradients(self, run: Run, recv: Recv, grads: Grads) -> None:
        """The gradients of a message go where it came from."""
        if run.failed:
            raise ContextError("the pass was aborted", context=run.spec.context)
        run.sent_to.add(recv.sender)
        observer, begun = self.worker.observer if run.spec.profiles else None, 0
        if observer is not None:
            observer.prepare(run.spec.profiles, recv.sender)
            begun = observer.now()
        peer = self.agent.peers.find(recv.sender)
        encoded = encode(grads, names=["a gradient"] * len(grads), plain=peer.plain)
        note = None
        if run.spec.create and any(tensor.requires_grad for tensor in encoded.tensors):
            born_in = (run.spec.driver, run.spec.number)
            note = record_send(
                self.container,
                run.context,
                recv.sender,
                encoded.tensors,
                place=(*recv.order, run.spec.number),
                born_in=born_in,
            )
        tally = self._reports.take_along(run.spec) if run.spec.driver != self.id else None
        if tally is not None and recv.sender != run.spec.driver:
            run.entrusted.setdefault(recv.sender, []).append(tally)
        message = Gradient(run.spec, recv.message, encoded.payload, note, tally)
        frame = Frame(AutogradKind.GRADIENT, 0, pack(message), encoded.buffers, encoded.keep)
        try:
            channel = self.agent.peers.channel_to(peer, self.worker.options.connect_timeout)
            left = None if run.deadline is None else max(run.deadline - self.worker.runtime.now(), 0.0)
            if observer is not None:
                observer.gradient(run.spec.profiles, _key(run.spec, recv.message), recv.sender, begun, frame.nbytes)
            if self._reports.use(run.spec, channel):
                channel.send_soon(frame, timeout=left)
            else:
                channel.send(frame, timeout=left)
        except ChannelClosedError as error:
            raise PeerLostError(
                f"lost worker '{peer.info.name}', to which gradients were due: {error}",
                worker=peer.info.name,
                reason=str(error),
            ) from None

    def _post(self, worker: int, frame: Frame) -> None:
        """Send a frame to a worker that may be gone."""
        try:
            peer = self.agent.peers.find(worker)
            self.agent.peers.channel_to(peer, self.worker.options.connect_timeout).send(frame, timeout=0)
        except (ChannelClosedError, BackhaulError) as error:
            log.debug("worker '%s' was not told: %s", self.name_of(worker), error)

    # Frames.

    def _on_gradient(self, channel: Channel, frame: Frame) -> Task | None:
        gradient = unpack(frame.body, Gradient)
        self._reports.begin(gradient.spec)
        if gradient.tally is None:
            pass
        elif gradient.spec.driver == self.id:
            self._account(gradient.spec, gradient.tally)
        else:
            self._reports.add(gradient.spec, gradient.tally)
        observer = self.worker.observer if gradient.spec.profiles else None
        if observer is not None:
            task = functools.partial(self.worker.run, self._take_observed, channel, gradient, frame, observer.now())
        else:
            task = functools.partial(self.worker.run, self._take_gradient, channel, gradient, frame)
        drive = self.drives.get((gradient.spec.context, gradient.spec.number))
        if drive is not None and drive.spec.driver == self.id and drive.attendant == threading.get_ident():
            drive.inbox.append(task)
            return None
        return task

    def _take_observed(self, channel: Channel, gradient: Gradient, frame: Frame, arrived: int) -> None:
        peer = self.agent.peers.of(channel)
        sender = peer.record.id if peer is not None else -1
        with self._observed_group(gradient.spec, MessageId(gradient.message), sender, arrived):
            self._take_gradient(channel, gradient, frame)

    def _observed_group(
        self, spec: PassSpec, source: MessageId, sender: int = -1, arrived: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        observer = self.worker.observer if spec.profiles else None
        return _UNSEEN if observer is None else observer.group(spec.profiles, _key(spec, source), sender, arrived)

    def _observed_pass(self, spec: PassSpec) -> contextlib.AbstractContextManager[None]:
        observer = self.worker.observer if spec.profiles else None
        return _UNSEEN if observer is None else observer.drive(spec.profiles, spec.context, spec.number)

    def _take_gradient(self, channel: Channel, gradient: Gradient, frame: Frame) -> None:
        try:
            context = self.container.find(gradient.spec.context)
            peer = self.agent.peers.of(channel)
            if context is None or peer is None:
                if not self.container.was_released(gradient.spec.context):
                    source = MessageId(gradient.message)
                    self._complain(gradient.spec, source, self._missing(gradient.spec.context, source))
                return  # else the driver has given the context up
            run = self._run_of(context, gradient.spec)
            if run.failed:
                return
            source = MessageId(gradient.message)
            if not run.knows(source):
                self._fail(run, source, self._missing(context.id, source))
                return
            tensors = tensors_of(gradient.payload, frame.buffers)
            if gradient.note is not None:
                tensors = record_recv(context, peer.record.id, gradient.note, tensors)
            else:
                tensors = [tensor.detach() for tensor in tensors]
            self._enter_source(run, source, load(gradient.payload, frame.buffers, tensors))
        except Exception as error:
            self._complain(gradient.spec, MessageId(gradient.message), error)
        finally:
            self._tell(gradient.spec)

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

    def _run_of(self, context: Context, spec: PassSpec) -> Run:
        """This worker's share of a pass, made at the first use. Those that are over are let go."""
        key = spec.driver, spec.number
        with context.lock:
            run = context.runs.get(key)
        if run is None:
            made = Run(spec, context, self._send_gradients)
            with context.lock:
                run = context.runs.setdefault(key, made)
                run.failed = run.failed or key in context.aborted
                for driver, number in list(context.runs):
                    if driver == spec.driver and number < spec.oldest:
                        del context.runs[driver, number]
        return run

    def _on_report(self, channel: Channel, frame: Frame) -> Task | None:
        report = unpack(frame.body, Report)
        peer, observer = self.agent.peers.of(channel), self.worker.observer if report.spec.profiles else None
        if observer is not None and peer is not None:
            observer.report(report.spec.profiles, peer.record.id, out=False)
        if report.fault is None and report.lost < 0:
            self._account(report.spec, report.tally)
            return None
        return functools.partial(self._take_fault, report, frame)

    def _take_fault(self, report: Report, frame: Frame) -> None:
        drive = self.drives.get((report.spec.context, report.spec.number))
        if drive is None:
            return
        if report.fault is not None:
            error = decode_fault(report.fault, frame.buffers)
            where = _where(report.spec, report.message, report.fault.worker)
            if where not in getattr(error, "__notes__", ()):  # it could not travel itself
                error.add_note(where)
            self._end(drive, error)
            return
        with drive.lock:
            drive.ledger.report(report.tally.consumed, report.tally.produced)
            drive.lost[report.lost] = report.reason
            missed = report.lost in drive.ledger.outstanding.values()
        if missed:
            self._end(drive, self._loss(drive.spec, self.agent.peers.find(report.lost), drive.lost[report.lost]))

    def _account(self, spec: PassSpec, tally: Tally) -> None:
        drive = self.drives.get((spec.context, spec.number))
        if drive is None:
            return
        with drive.lock:
            drive.ledger.report(tally.consumed, tally.produced)
            over = drive.ledger.over
            missed = [w for w in drive.ledger.outstanding.values() if w in drive.lost] if drive.lost else []
        if missed:  # a loss that was noticed before this report came
            self._end(drive, self._loss(drive.spec, self.agent.peers.find(missed[0]), drive.lost[missed[0]]))
        elif over:
            drive.gate.open()

    def _end(self, drive: Drive, error: BaseException) -> None:
        with drive.lock:
            if drive.error is None:
                drive.error = error
        drive.gate.open()

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

    def _on_know(self, channel: Channel, frame: Frame) -> Task | None:
        """A worker has a context of ours, and who brought it there is gone: tell it when that is over."""
        peer, number = self.agent.peers.of(channel), unpack(frame.body, Know).context
        context = self.container.find(number)
        if peer is None or (context is not None and context.know(peer.record.id)):
            return None
        return functools.partial(self._post, peer.record.id, Frame(AutogradKind.RELEASE, 0, pack(Release(number))))

    def _on_lost(self, peer: Peer, channel: Channel, reason: str) -> None:
        lost = peer.record.id
        for context in self.container.select(lambda context: lost in context.known):
            driver, _ = split(context.id)
            if driver not in (self.id, lost):
                self._post(driver, Frame(AutogradKind.KNOW, 0, pack(Know(context.id))))
        for context in self.container.select(lambda context: bool(context.runs)):
            for run in list(context.runs.values()):
                # The driver may never have spoken to that worker; it knows whether something was under way there.
                if lost in run.sent_to and run.spec.driver not in (self.id, lost):
                    report = Report(run.spec, merge(run.entrusted.get(lost, ())), lost=lost, reason=reason)
                    self._post(run.spec.driver, Frame(AutogradKind.REPORT, 0, pack(report)))
        for drive in list(self.drives.values()):
            with drive.lock:
                drive.lost[lost] = reason
                waiting = [m for m, worker in drive.ledger.outstanding.items() if worker == lost]
            if waiting:
                error = self._loss(drive.spec, peer, reason)
                self._end(drive, error)

    def _loss(self, spec: PassSpec, peer: Peer, reason: str) -> PeerLostError:
        return PeerLostError(
            f"lost worker '{peer.info.name}' in the backward pass of context {spec.context}: {reason}",
            worker=peer.info.name,
            reason=reason,
        )

    # The plan.

    def orders_for(self, context: int, number: int, worker: int) -> tuple[Any, ...]:
        """At the driver: what the plan says about ``worker``; the plan is made at the first question."""
        drive = self.drives.get((context, number))
        if drive is None:
            raise ContextError(f"pass {number} of context {context} is over", context=context)
        with drive.planning:
            if drive.plan is None:
                self._make_plan(drive)
        plan = drive.plan
        assert plan is not None
        active = frozenset(plan.active.get(worker, ()))
        circular = frozenset(plan.circular.get(worker, ()))
        return active, circular, None if plan.useful is None else frozenset(plan.useful)

    def _make_plan(self, drive: Drive) -> None:
        plan = Plan(self.id, drive.run.leads_to_inputs() if drive.spec.restricted else None)
        while missing := plan.missing():
            calls = {}
            token = enter(None)
            try:
                for worker in missing - {self.id}:
                    calls[worker] = self.agent.call_async(worker, summary_of, (drive.spec,), None, 0, mode="internal")
            finally:
                leave(token)
            if self.id in missing:
                plan.add(self.id, drive.run.summary())
            for worker, call in calls.items():
                plan.add(worker, call.wait())
        drive.plan = plan

    def summary_of(self, spec: PassSpec) -> Summary:
        """What the driver of a pass needs to know of this worker's graph."""
        return self._run_of(self.container.get(spec.context), spec).summary()

    # The end of a context.

    def release(self, context: int, known: int = -1) -> None:
        """Forget a context here, and on every worker that it reached but ``known``, which has said so."""
        released = self.container.pop(context)
        if released is None:
            return
        for drive in list(self.drives.values()):
            if drive.spec.context == context:
                self._end(
                    drive, UnknownContextError(f"context {context} was released during backward", context=context)
                )
        frame = Frame(AutogradKind.RELEASE, 0, pack(Release(context)))
        for worker in released.end() - {self.id, known}:
            self._post(worker, frame)

    def _on_release(self, channel: Channel, frame: Frame) -> Task:
        peer = self.agent.peers.of(channel)
        known = peer.record.id if peer is not None else -1
        return functools.partial(self.release, unpack(frame.body, Release).context, known)


@internal(int, int, int)
def orders_for(context: int, number: int, worker: int) -> tuple[Any, ...]:
    """Called on the driver of a pass; see ``Engine.orders_for``."""
    return current_worker().part(Engine).orders_for(context, number, worker)


@internal(PassSpec)
def entrusted_by(spec: PassSpec) -> Tally:
    """Called by the driver of a pass; see ``Engine.entrusted``."""
    return current_worker().part(Engine).entrusted(spec)


def _key(spec: PassSpec, message: int) -> GradientKey:
    return spec.context, spec.driver, spec.number, message


def _where(spec: PassSpec, source: int, worker: str) -> str:
    return f"in the backward pass of context {spec.context}, message {source}, on worker '{worker}'"


def merge(tallies: Iterable[Tally]) -> Tally:
    """All of them in one."""
    consumed: list[int] = []
    produced: dict[int, int] = {}
    for tally in tallies:
        consumed += tally.consumed
        produced |= tally.produced
    return Tally(tuple(consumed), produced)


@internal(PassSpec)
def summary_of(spec: PassSpec) -> Summary:
    """Called by the driver of a pass; see ``Engine.summary_of``."""
    return current_worker().part(Engine).summary_of(spec)
