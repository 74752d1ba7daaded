"""One worker's share of one pass, from the gradients that arrive to the report: run ready groups, send, report."""

# Over the limit because gradients arrive, run, leave and are reported under one count of tasks.
from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from backhaul._autograd.backward import pass_errors
from backhaul._autograd.backward.messenger import PassMessenger
from backhaul._autograd.backward.outbox import GradientOutbox, Parcels, answers_of, key_of
from backhaul._autograd.backward.pass_graph import Ran
from backhaul._autograd.backward.pass_ledger import PassLedger
from backhaul._autograd.backward.ready_groups import Outcome, ReadyGroups
from backhaul._autograd.backward.report_buffer import ReportBuffer
from backhaul._autograd.backward.simple_runs import Answers, run_simple, suits
from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import Grads, Recv, Spent, claim
from backhaul._autograd.gradient_table import GradientTable
from backhaul._autograd.ids import ROOTS, TOGETHER, MessageId
from backhaul._autograd.messages import PassSpec, PassTally, Report
from backhaul._autograd.plain_graph import PlainGraph
from backhaul._autograd.plan.plan import Orders, Summary
from backhaul._autograd.plan.planner import OrdersSource
from backhaul._autograd.torch_engine.graph_task import new_task_number
from backhaul._devices import seam
from backhaul._native import core
from backhaul._transport.base import Channel
from backhaul._wire.frames import Frame
from backhaul._worker.thread_pool import Task
from backhaul._worker.worker import Worker
from backhaul.errors import ContextError, PeerLostError

RequestOrders = Callable[[PassSpec, Callable[[OrdersSource], None]], None]
"""See ``Planner.request_orders``."""

_NONE: frozenset[int] = frozenset()
_UNOBSERVED = contextlib.nullcontext()


# Over the limit because it also keeps the tallies that it must report again after the loss of a channel.
class LocalPass:
    """Thread-safe. For every task: ``begin``, then ``enter`` for the sources whose gradients arrived, then ``send``.

    Args:
        worker: This worker.
        spec: The pass.
        context: Its context on this worker.
        outbox: Sends gradients.
        messenger: Sends reports and errors.
        request_orders: Asks the driver for orders.
        ledger: At the driver: where the pass is accounted for.
        roots: At the driver: where the pass starts.
        inputs: At the driver: the tensors that the pass is restricted to.
        results: At the driver: takes the gradients of the inputs, if they are neither for ``.grad`` nor the context.

    Attributes:
        deadline: When the pass must be over; known at the driver only.
        failed: Whether the pass has failed on any worker; this worker computes nothing more for it.
        aborted: Whether other workers know that it has failed.
        complaint: The frame that reported a failure of this worker to the driver.
        sent_to: Workers to which this worker sent gradients.
        lost: Those of them that are lost, and why.
        attendant: At the driver: the thread that reads channels for the pass while it waits; 0: no thread does.
        inbox: Tasks for that thread.
        busy: Whether tasks of the pass run or wait here.
    """

    _groups: ReadyGroups | None = None
    deadline: float | None = None
    failed = False
    aborted = False
    complaint: Frame | None = None
    attendant = 0

    def __init__(
        self,
        worker: Worker,
        spec: PassSpec,
        context: Context,
        *,
        outbox: GradientOutbox,
        messenger: PassMessenger,
        request_orders: RequestOrders,
        ledger: PassLedger | None = None,
        roots: Sequence[torch.Tensor | GradientEdge] | None = None,
        inputs: Sequence[torch.Tensor | GradientEdge] | None = None,
        results: GradientTable | None = None,
    ) -> None:
        self.spec = spec
        self.context = context
        self.sent_to: set[int] = set()
        self.lost: dict[int, str] = {}
        self.inbox: collections.deque[Task] = collections.deque()
        self._worker = worker
        self._outbox = outbox
        self._messenger = messenger
        self._request_orders = request_orders
        self._ledger = ledger
        self._starts = roots, inputs, results
        self._simple = suits(spec, context)  # whether the native core may run sources
        # The number of the ``GraphTask`` of this pass. A method would be a cycle, which keeps the graph alive.
        self._task_number = itertools.repeat(new_task_number()).__next__
        self._ran: Ran = {}
        self._reports = ReportBuffer()
        self._told: dict[int, list[PassTally]] = {}  # tallies by receiver: the driver, or a worker that passes them on
        self._lock = threading.Lock()  # guards _groups, and _spent together with failed
        self._spent: list[Spent] = []
        self._fired: dict[int, int] = {}  # messages that unfinished groups answered -> worker that the answer went to

    @property
    def groups(self) -> ReadyGroups:
        """The groups of this worker, and which of them may run. Made at the first use: most passes need none."""
        if self._groups is None:
            with self._lock:
                if self._groups is None:
                    roots, inputs, results = self._starts
                    edges = None
                    if roots is not None:
                        edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
                    self._groups = ReadyGroups(
                        self.spec,
                        self.context,
                        edges,
                        inputs,
                        results,
                        ran=self._ran,
                        task_number=self._task_number,
                    )
        return self._groups

    @property
    def holding(self) -> bool:
        """Whether gradients wait here, or a part of the graph outside contexts is kept."""
        return self._groups is not None and self._groups.holding

    @property
    def waiting(self) -> list[MessageId]:
        """Sources that have arrived and whose group has not run."""
        return [] if self._groups is None else self._groups.waiting

    def prepare(self) -> None:
        """Find the groups of this worker if the pass most likely needs them. It takes as long as the graph is large."""
        if not self._simple:
            self.groups.prepare()

    def start(self, seeds: Grads) -> None:
        """At the driver: run the groups that the roots make ready, and send what they produce."""
        self._reports.begin()
        parcels: Parcels = {}
        try:
            if not (self._simple and self._run_roots(list(seeds))):
                self._enter_one(ROOTS, seeds, parcels)
        except BaseException as error:
            self.fail(ROOTS, error)
        self.send(ROOTS, parcels)

    def _run_roots(self, seeds: list[torch.Tensor | None]) -> bool:
        """Run the roots in the native core, and send what they produce. False if the core does not run them."""
        roots = self._starts[0]
        assert roots is not None
        if not all([isinstance(root, torch.Tensor) for root in roots]):
            return False
        found = core.record_sent(self.context.index, roots, _NONE)
        if not found or len(found[0]) < len(seeds):  # a root that requires no grad: the slower way raises the error
            return False
        source = [found[1]]
        ran = run_simple(
            self.spec,
            self.context,
            source,
            [len(seeds)],
            seeds,
            task_number=self._task_number,
            send_early=self._send_early,
            send_all=self._send_all,
            roots=True,
        )
        if ran is None:
            return False
        self._account_simple((ROOTS,), ran[1])
        self._send_all(ran[0])
        return True

    def take(self, sources: list[MessageId], counts: list[int], grads: list[torch.Tensor | None]) -> None:
        """The whole task for gradients of sources that have arrived: ``enter`` and ``send``."""
        parcels: Parcels = {}
        try:
            ran = self._run_simple(sources, counts, grads)
            if ran is not None:
                self._send_all(ran)
        except BaseException as error:
            self.fail(sources[0] if len(sources) == 1 else TOGETHER, error)
        else:
            if ran is None:
                self._enter_each(sources, counts, grads, parcels)
        self.send(sources[0], parcels)

    def begin(self, tally: PassTally | None = None) -> bool:
        """Gradients of the pass have arrived, and a task will run for them: ``run`` or ``send`` must follow. ``tally``
        came with the gradients: it names groups that have run on other workers, and must reach the driver. Returns
        whether the calling thread is the ``attendant``. If so, it must leave the task in the ``inbox``.
        """
        self._reports.begin()
        if tally is not None:
            if self._ledger is not None:
                self._ledger.account(tally.consumed, tally.produced)
            else:
                self._reports.add(tally.consumed, tally.produced)
        return self.attendant == threading.get_ident()

    @property
    def busy(self) -> bool:
        """See the class."""
        return self._reports.busy

    def enter(
        self, sources: list[MessageId], counts: list[int], grads: list[torch.Tensor | None], parcels: Parcels
    ) -> None:
        """Gradients of sources have arrived: run the groups that are ready now, and pack what they produce.

        Args:
            sources: The sources.
            counts: How many of the gradients belong to each.
            grads: The gradients.
            parcels: Takes what the groups produce.
        """
        try:
            ran = self._run_simple(sources, counts, grads)
            if ran is not None:
                self._outbox.put(self, ran, parcels)
                return
        except BaseException as error:
            self.fail(sources[0] if len(sources) == 1 else TOGETHER, error)
            return
        self._enter_each(sources, counts, grads, parcels)

    def _enter_each(self, sources: Iterable[MessageId], counts: Iterable[int], grads: Grads, parcels: Parcels) -> None:
        used = 0
        for source, count in zip(sources, counts, strict=True):
            if self.failed:
                return
            try:
                self._enter_one(source, grads[used : used + count], parcels)
            except BaseException as error:
                self.fail(source, error)
            used += count

    def _run_simple(
        self, sources: list[MessageId], counts: list[int], grads: list[torch.Tensor | None]
    ) -> list[Answers] | None:
        """Run all of these at once in the native core; None if it does not run them."""
        if not self._simple or (self._groups is not None and self._groups.joins(sources)):
            return None
        ran = run_simple(
            self.spec,
            self.context,
            sources,
            counts,
            grads,
            task_number=self._task_number,
            send_early=self._send_early,
            send_all=self._send_all,
        )
        if ran is None:
            return None
        self._account_simple(sources, ran[1])
        return ran[0]

    def _account_simple(self, sources: Sequence[MessageId], produced: dict[int, int]) -> None:
        """The native core has run sources. ``produced``: the messages that they reach, with the senders of these."""
        self._ran.update(dict.fromkeys(sources, produced))
        if not self.spec.retain:
            self.context.spend(sources)
        if self._ledger is None:
            self._reports.add(sources, produced)
        else:
            self._ledger.account(sources, produced)

    def _enter_one(self, source: MessageId, grads: Grads, parcels: Parcels) -> None:
        outcomes = self.groups.arrive(source, grads, self._send_early)
        if outcomes:
            self._pack(outcomes, parcels)
        elif outcomes is None:
            raise self._missing(source)
        elif self.groups.must_ask(source):
            self._request_orders(self.spec, functools.partial(self._follow, source))

    def summary(self, sources: Collection[int] = (), calls: Collection[int] = ()) -> Summary:
        """This worker's graph, for the plan of the pass; see ``PassGraph.summary``.

        Raises if a source is gone and the pass is restricted to inputs: nobody knows then whether it leads to them. In
        other passes its gradients raise when they arrive.
        """
        if self.spec.restricted:
            for source in map(MessageId, sources):
                if source != ROOTS and source not in self._ran and source not in self.context.sends:
                    raise self._missing(source)
        return self.groups.graph.summary(sources, calls)

    def _missing(self, source: MessageId) -> ContextError | PeerLostError:
        """The error for a source whose graph this worker does not have."""
        if (lost := self.context.lost_send(source)) is not None:
            return pass_errors.graph_lost(self.spec, self._worker.name, source, *lost)
        freed = source in self.context.spent
        return pass_errors.missing_source(self._worker.name, self.context.id, source, freed=freed)

    def _pack(self, outcomes: Iterable[Outcome], parcels: Parcels) -> None:
        """Groups have run: add their tallies to the report, and put their gradients into parcels."""
        seam.streams.depart()  # receivers of the gradients continue after the groups
        for tally, fired in outcomes:
            if tally is not None:
                self._reports.add(tally.consumed, tally.produced)
            else:
                self._fired.update({recv.message: recv.sender for recv, _ in fired})
            if fired:
                self._outbox.put(self, map(answers_of, fired), parcels)

    def spend(self, recvs: list[Recv]) -> None:
        """The gradients of messages are about to be sent. Raises if the pass has failed, or if an earlier pass has
        freed the graph of a sender.
        """
        with self._lock:
            if self.failed:
                raise pass_errors.aborted(self.spec)
            used = claim(recvs, self.spec.retain, self._spent)
        if used is not None:
            raise pass_errors.graph_freed(used.message, self._messenger.name_of(used.sender))

    def abandon(self) -> None:
        """The pass has failed on some worker. Nobody knows which senders have freed their records, so the receiving
        ends report their death again.
        """
        with self._lock:
            self.failed = self.aborted = True
            spent, self._spent = self._spent, []
        for reference, sender, message in spent:
            recv = reference()
            if recv is not None:
                recv.spent = False
            elif isinstance(self.context, PlainGraph):
                self.context.refuse(sender, message)
        if self._groups is not None:
            self._groups.release()

    def finish(self) -> None:
        """At the driver: the pass is over."""
        if self._groups is not None:
            self._groups.finish()

    def _send_early(self, recv: Recv, grads: Grads) -> None:
        self._outbox.send(self, recv, grads)

    def _send_all(self, found: list[Answers]) -> None:
        self._outbox.send_all(self, found)

    def send(self, source: MessageId, parcels: Parcels) -> None:
        """A task is done: send what it has packed. The last task of the pass also reports to the driver."""
        if parcels:
            try:
                self._outbox.ship(self, parcels)
            except BaseException as error:
                self.fail(source, error)
        self.context.rest()
        if self.aborted and self._groups is not None:
            self._groups.release()  # the task may have put gradients there since ``abandon``
        tally, channels = self._reports.end()
        for channel in channels:
            channel.flush()
        if tally is not None:
            self._report(tally)

    def _follow(self, source: MessageId, orders: OrdersSource) -> None:
        """Orders have arrived: run what waited for them, and send."""
        self.begin()
        parcels: Parcels = {}
        with self.observed(source):
            try:
                self._pack(self.groups.follow(Orders(*orders()), self._send_early), parcels)
            except BaseException as error:
                self.fail(source, error)
            self.send(source, parcels)

    def depart(self, to: int, *, few: bool) -> tuple[PassTally | None, bool]:
        """Gradients are about to go to worker ``to``. Returns the tally that they take with them, and whether they are
        sent at once; if not, ``flush_later`` must follow. See ``ReportBuffer``.
        """
        self.sent_to.add(to)
        if self._ledger is not None:
            return None, self._reports.last
        last, tally = self._reports.last, self._reports.take_along(to == self.spec.driver, few=few)
        if tally is not None:
            self._told.setdefault(to, []).append(tally)
        return tally, last

    def flush_later(self, channel: Channel) -> None:
        """See ``ReportBuffer``."""
        self._reports.flush_later(channel)

    def _report(self, tally: PassTally) -> None:
        spec = self.spec
        if self._ledger is not None:
            self._ledger.account(tally.consumed, tally.produced)
            return
        observer = self._worker.observer if spec.profiles else None
        if observer is not None:
            observer.report(spec.profiles, spec.driver, out=True)
        self._told.setdefault(spec.driver, []).append(tally)
        self._messenger.report(Report(spec, tally))

    def told(self, to: int | None = None) -> PassTally:
        """The tallies that this worker has sent to the driver, directly or through other workers, and the messages that
        it has answered but not reported yet. With ``to``: only those that went to or through that worker.
        """
        tallies = self._told.get(to, ()) if to is not None else itertools.chain(*list(self._told.values()))
        consumed: list[int] = []
        produced = {message: worker for message, worker in list(self._fired.items()) if to in (None, worker)}
        for tally in list(tallies):
            consumed += tally.consumed
            produced |= tally.produced
        return PassTally(tuple(consumed), produced)

    def fail(self, source: MessageId, error: BaseException) -> None:
        """The pass has failed on this worker: compute nothing more for it, and report the error to the driver."""
        if isinstance(error, pass_errors.ForeignGraph):
            error = self._messenger.foreign_graph(self.context, error)
        if self.failed:
            return
        self.failed = True
        if self._ledger is not None:
            pass_errors.add_place(error, self.spec, source, self._worker.name)
            self._ledger.end(error)
            return
        self.complaint = self._messenger.complaint(self.spec, source, error)
        if self.complaint is not None:
            self._messenger.post(self.spec.driver, self.complaint)

    def observed(
        self, source: MessageId, sender: int = -1, arrived: int = 0
    ) -> contextlib.AbstractContextManager[None]:
        """A span in a profile, if the pass belongs to one: a task that runs groups and sends."""
        spec = self.spec
        observer = self._worker.observer if spec.profiles else None
        return _UNOBSERVED if observer is None else observer.group(spec.profiles, key_of(spec, source), sender, arrived)
