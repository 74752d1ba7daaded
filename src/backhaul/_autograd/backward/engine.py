"""The autograd part of a worker: puts its pieces together, and starts passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import GradientEdge

from backhaul._autograd.backward.context_release import ContextRelease
from backhaul._autograd.backward.driver import PassDriver
from backhaul._autograd.backward.local_pass import LocalPass
from backhaul._autograd.backward.messenger import PassMessenger
from backhaul._autograd.backward.outbox import GradientOutbox
from backhaul._autograd.backward.pass_ledger import PassLedger
from backhaul._autograd.backward.pass_numbers import PassNumbers
from backhaul._autograd.backward.plain_backward import engines
from backhaul._autograd.backward.receiver import GradientReceiver
from backhaul._autograd.backward.record_lifetimes import RecordLifetimes
from backhaul._autograd.backward.source_index import PlainSources
from backhaul._autograd.container import Container
from backhaul._autograd.context import Context
from backhaul._autograd.failure.peer_failure import PeerFailures
from backhaul._autograd.failure.recovery import Recovery
from backhaul._autograd.forward.functions import Grads
from backhaul._autograd.gradient_table import GradientTable
from backhaul._autograd.messages import PassSpec
from backhaul._autograd.plan.planner import Planner
from backhaul._autograd.torch_engine import anomaly, entry, patches
from backhaul._autograd.untrusted import recorder_for
from backhaul._rpc.node import Node
from backhaul._runtime.worker_patches import while_workers_run
from backhaul._worker.deadlines import FOREVER
from backhaul._worker.worker import Worker

while_workers_run(patches.install, patches.uninstall)

before_pass: list[Callable[[Worker], None]] = []
"""Called with the worker before it starts a pass. Higher layers add what other workers must know by then."""


# Over the limit because it puts the pieces together; it has little to do itself.
class Engine:
    """Thread-safe.

    Attributes:
        worker: The worker.
        id: Its id.
        client: Makes calls.
        container: The contexts of this worker.
        drivers: The passes that this worker drives, by context and number.
        recovery: Replays what a lost worker had computed.
        new_number: Returns the number of another pass of this driver.
        latest_pass: The number of the pass that this worker started last.
        passes_ended: How many passes of this worker have ended.
        undoing: How many blocks of this worker restore ``.grad`` after a failed pass: no task may add to it then.
        release: Ends a context, see ``ContextRelease.release``.
        name_of, post, report: See ``PassMessenger``.
    """

    def __init__(self, node: Node) -> None:
        self.worker = worker = node.worker
        if worker.options.autograd == "plain":
            entry.require()
        self.id = worker.info.id
        self.client = node.client
        self.container = Container(self.id, worker.incarnation)
        self.drivers: dict[tuple[int, int], PassDriver] = {}
        self._numbers = PassNumbers()
        self.new_number = self._numbers.new
        self.latest_pass = 0
        self.passes_ended = 0
        self.undoing = 0
        self._count_ended: Callable[[], int] = itertools.count(1).__next__
        self._messenger = PassMessenger(worker, node.client, self.container)
        self.name_of, self.post, self.report = self._messenger.name_of, self._messenger.post, self._messenger.report
        self._outbox = GradientOutbox(worker, node.client.peers, self.container)
        recorder = recorder_for(node, self.container)
        node.client.interceptors.add(recorder, from_untrusted=True)
        self._planner = Planner(worker, node.client, self.drivers.get, self._share_of)
        release = ContextRelease(worker, node.client.peers, self.container, self.drivers, self._messenger)
        self.release = release.release
        self._receiver = GradientReceiver(
            worker,
            node.client.peers,
            self.container,
            self.drivers,
            outbox=self._outbox,
            messenger=self._messenger,
            request_orders=self._planner.request_orders,
            failures=PeerFailures(self, node.peers),
        )
        self.container.plain.sources = PlainSources(self.container.plain)
        RecordLifetimes(worker, node.client.peers, self.container.plain, self._messenger)
        self.recovery = Recovery(self)
        recorder.keep_requests = self.recovery.keep_requests
        recorder.tell_over = release.tell_again
        node.heartbeat.waits.append(self._awaited)

    def attach(self) -> None:
        """Make this the engine of its worker."""
        self.worker.attach(self)
        engines[self.container.plain.mark] = self
        self.worker.counters["num_autograd_contexts"] = lambda: len(self.container)
        self.worker.counters["num_current_backward_passes"] = lambda: len(self.drivers)

    def _awaited(self) -> set[int]:
        """The ids of the workers whose gradients or reports the passes of this worker wait for."""
        return {worker for driver in list(self.drivers.values()) for worker in driver.ledger.outstanding.values()}

    def _share_of(self, spec: PassSpec) -> LocalPass:
        return self._receiver.local_pass_of(self.container.get(spec.context), spec)

    def backward(
        self,
        context: Context,
        roots: Sequence[torch.Tensor | GradientEdge],
        seeds: Grads,
        *,
        inputs: Sequence[torch.Tensor | GradientEdge] | None,
        timeout: float,
        retain: bool,
        create: bool,
        fast: bool,
        into_grad: bool,
        deterministic: bool,
        results: GradientTable | None = None,
        number: int = 0,
        until: float = FOREVER,
    ) -> None:
        """Run one pass over all workers; return when it is over, raise if it failed.

        Args:
            context: The context.
            roots: Where the pass starts.
            seeds: The gradients of the roots.
            inputs: Compute only what leads to these tensors.
            timeout: The time that the pass has, in seconds; 0: no limit.
            retain: Keep the graph.
            create: Record the pass itself.
            fast: Assume that all messages of the context take part.
            into_grad: Add gradients to ``.grad``, not to the context.
            deterministic: Sum gradients in program order.
            results: Takes the gradients of ``inputs``, if they are neither for ``.grad`` nor the context.
            number: The number of the pass, if the caller has one already.
            until: When the pass must be over, if its ``timeout`` began before this call.
        """
        for prepare in before_pass:
            prepare(self.worker)
        observer = self.worker.observer
        number, oldest = self._numbers.begin(context.id, number)
        self.latest_pass = number
        try:
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
            ledger = PassLedger(spec, self.worker.runtime)
            share = LocalPass(
                self.worker,
                spec,
                context,
                outbox=self._outbox,
                messenger=self._messenger,
                request_orders=self._planner.request_orders,
                ledger=ledger,
                roots=roots,
                inputs=inputs,
                results=results,
            )
            driver = PassDriver(self.worker, self.client, self._messenger, share, ledger)
            try:
                with context.lock:
                    context.runs[self.id, number] = share
                self.drivers[context.id, number] = driver
                if until != FOREVER:
                    share.deadline = until
                elif timeout:
                    share.deadline = self.worker.runtime.now() + timeout
                driver.run(seeds, timeout)
            except BaseException:  # also an interrupt of the user
                driver.abort()
                if context.replay is not None or self.undoing:
                    self.recovery.await_idle(share)
                raise
            finally:
                self.drivers.pop((context.id, number), None)
                with context.lock:
                    context.runs.pop((self.id, number), None)
        finally:
            self._numbers.end(number)
            self.passes_ended = self._count_ended()
