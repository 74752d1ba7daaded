"""A worker with all parts of RPC attached. ``init`` and ``cluster`` make nodes; this module also ends them in order."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

from backhaul._devices.cuda import process
from backhaul._devices.placement import check, maps_of
from backhaul._options import Options
from backhaul._rpc.before_nodes import prepare
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.served_call import never_dropped
from backhaul._rpc.calls.server import CallServer
from backhaul._rpc.cluster.admission import Admission
from backhaul._rpc.cluster.anchoring import Anchoring
from backhaul._rpc.cluster.departure import seal_of, secret_of
from backhaul._rpc.cluster.enrollment import Enrollment
from backhaul._rpc.cluster.internal_calls import InternalCalls
from backhaul._rpc.cluster.joining import ask_to_join
from backhaul._rpc.cluster.leaving import Leaving, forget
from backhaul._rpc.cluster.loss_news import LossNews
from backhaul._rpc.cluster.main_identity import main_identity
from backhaul._rpc.cluster.membership import Membership
from backhaul._rpc.cluster.membership_events import MembershipEvents
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.cluster.partition_healing import PartitionHealing
from backhaul._rpc.cluster.peers import Peers
from backhaul._rpc.cluster.relaying import Relaying
from backhaul._rpc.compression import check_codecs
from backhaul._rpc.device_memory import start_devices
from backhaul._rpc.interceptors import extensions
from backhaul._rpc.liveness.heartbeats import Heartbeats
from backhaul._rpc.random_states import RandomStates
from backhaul._rpc.security.rate_limits import RateLimits, bounds_of
from backhaul._rpc.security.untrusted import UntrustedServer, guard_frames
from backhaul._rpc.shutdown.graceful_shutdown import GracefulShutdown
from backhaul._rpc.shutdown.lost_members import LostMembers
from backhaul._runtime import interrupts
from backhaul._runtime.runtime import Runtime
from backhaul._transport.base import Endpoint
from backhaul._wire.tensors.buffer_forms import readable_forms
from backhaul._wire.value_count import most_buffers
from backhaul._worker import log_fields  # noqa: F401  (adds fields to the records of the logger)
from backhaul._worker.worker import Worker, in_handler, running_workers
from backhaul.errors import BackhaulError, LeakError

never_dropped(forget)  # here, because ``cluster`` does not know ``calls``


class Audit(Protocol):
    """Finds leaks in a layer above when its worker is shut down."""

    def begin(self) -> None:
        """The program of the worker has ended: release everything that it holds."""

    def end(self) -> list[str]:
        """All workers have called ``begin``. Returns a text for each thing that is left, for an error message."""


# Over the limit because it holds one object of each part. It only makes the parts and ends them in order.
class Node:
    """The RPC parts of one worker, attached to it."""

    def __init__(self, worker: Worker, own: WorkerRecord, records: Iterable[WorkerRecord]) -> None:
        check_codecs(worker.options)
        self.worker = worker
        self.peers = Peers(worker, own, records)
        self.admission = Admission(worker, self.peers)
        self.heartbeat = Heartbeats(worker, self.peers)
        self.client = CallClient(worker, self.peers)
        RandomStates(worker, self.peers, self.client.interceptors)  # the first interceptor: it may refuse a call
        self.rate_limits = RateLimits.of(worker.options)
        guarded = not worker.options.security.trusted or self.rate_limits.any
        self.server = (UntrustedServer if guarded else CallServer)(worker, self.client)
        self.graceful_shutdown = GracefulShutdown(worker, self.client, self.server)
        calls = InternalCalls(self.client, worker.runtime.now)
        MembershipEvents(worker, self.peers)
        self.membership = Membership(worker, self.peers, self.admission, calls)
        Enrollment(worker, self.peers, self.admission, self.membership, calls)
        self.heartbeat.waits += (self.client.pending.workers, self.server.callers)
        self.leaving = Leaving(worker, self.peers, calls, self.client.idleness.when_idle)
        self.partition_healing = PartitionHealing(worker, self.peers, self.admission, self.membership, calls)
        LossNews(worker, self.peers, calls)
        Relaying(worker, self.peers, calls, self.partition_healing)
        self.anchoring = Anchoring(worker, self.peers)
        worker.devices.start(self.peers)
        self.audits: list[Audit] = []
        self._ending = worker.runtime.lock()  # held by the thread that shuts down
        worker.attach(self)
        worker.counters["num_pending_calls"] = lambda: len(self.client.pending)
        worker.counters["num_calls_served"] = lambda: self.server.served
        worker.counters["num_calls_cancelled"] = lambda: self.client.cancellation.count
        worker.counters["num_retries"] = lambda: self.client.paused.retries
        worker.counters["num_calls_dropped"] = lambda: self.server.dropped
        worker.counters["bytes_sent"] = self._bytes_sent
        worker.counters["num_suspected_peers"] = lambda: len(self.heartbeat.suspected)
        worker.counters["num_relayed"] = lambda: worker.endpoint.relayed
        worker.counters["shm_bytes"] = lambda: worker.endpoint.shm_bytes
        worker.counters["shm_lent"] = lambda: worker.endpoint.shm_lent

    def _bytes_sent(self) -> int:
        return self.peers.connections.bytes_sent - self.heartbeat.bytes_sent + self.worker.devices.bytes_sent

    def shutdown(self, *, graceful: bool, timeout: float, strict: bool = False, alone: bool = False) -> LostMembers:
        """End this worker; see ``backhaul.shutdown``. ``strict``: run the audits. ``alone``: other workers continue.

        Returns the members that were lost before all were done, if this call has waited for them.
        """
        if graceful or alone:
            refuse_in_handlers(self.worker.name)
        deadline = self.worker.runtime.now() + timeout
        if not interrupts.acquire(self._ending, timeout):
            return LostMembers()  # another thread shuts down, and has its own deadline
        try:
            if self.worker.closed:
                return LostMembers()
            try:
                audits = self.audits if graceful and strict else []
                for audit in audits:
                    audit.begin()
                if graceful:
                    self.graceful_shutdown.wait(timeout)
                elif alone:
                    self.leaving.leave(deadline)
                problems = [problem for audit in audits for problem in audit.end()]
                if problems:
                    raise LeakError(f"worker '{self.worker.name}': {'; '.join(problems)}", worker=self.worker.name)
            finally:
                try:
                    self.worker.devices.settle(max(deadline - self.worker.runtime.now(), 0.5))
                finally:
                    self._end(deadline - self.worker.runtime.now())
            return self.graceful_shutdown.lost
        finally:
            self._ending.release()

    @interrupts.uninterruptible
    def _end(self, left: float) -> None:
        self.peers.shutting_down = self.peers.ending = True
        self.client.close()
        self.peers.connections.close()
        self.worker.close(min(max(left, 0.5), 5.0))
        self.server.close()
        self.client.abandon()


def refuse_in_handlers(worker: str) -> None:
    """Raise ``BackhaulError`` if the caller is a handler: the handler would wait for its own end."""
    if in_handler.get():
        raise BackhaulError(
            "a handler cannot wait for all handlers to end: call shutdown(graceful=False) here, or shut down "
            "from the program's own thread",
            worker=worker,
        )


def describe(name: str, number: int, endpoint: Endpoint, options: Options, *, host: str) -> WorkerRecord:
    """The record with which a new worker on ``endpoint`` introduces itself to other workers."""
    incarnation = secrets.token_hex(8)
    return WorkerRecord(
        id=number,
        name=name,
        incarnation=incarnation,
        host=host,
        addresses=endpoint.addresses,
        main=main_identity(),
        limit=options.limits.frame_bytes,
        beat=options.liveness.heartbeat_interval,
        trusting=options.security.trusted,
        devices=process.identities(),
        maps=maps_of(options.devices.maps, options.devices.placement),
        bounds=bounds_of(options),
        seal=seal_of(secret_of(incarnation)),
        forms=readable_forms(),
        listens=options.listen,
        key=endpoint.key,
    )


def start_node(
    own: WorkerRecord,
    records: Iterable[WorkerRecord],
    endpoint: Endpoint,
    options: Options,
    *,
    runtime: Runtime | None = None,
) -> Node:
    """Make the worker that ``own`` describes, and start it. If this raises, it has closed the endpoint."""
    prepare()
    worker = Worker(own.info, own.incarnation, endpoint, options, runtime)
    try:
        start_devices(worker, own)
        node = Node(worker, own, records)
        for extend in extensions:
            extend(node)
    except BaseException:
        worker.close()
        raise
    if not options.security.trusted:
        endpoint.share_nothing()
        endpoint.limit_buffers(most_buffers(node.rate_limits.tensors or 0))
        guard_frames(node.worker, node.client)
    node.worker.start()
    node.anchoring.look()
    return node


def join(
    endpoint: Endpoint,
    own: WorkerRecord,
    addresses: Sequence[str],
    options: Options,
    *,
    runtime: Runtime | None = None,
    timeout: float | None = None,
) -> Node:
    """Join a running cluster that has members at these addresses. Once this returns, all members know the worker. If
    it raises (``RendezvousError``, ``AuthenticationError``), it has closed the endpoint and ended the worker.
    ``timeout``: seconds to join; default ``options.rendezvous_timeout``.
    """
    runtime = runtime or Runtime()
    timeout = options.rendezvous_timeout if timeout is None else timeout
    try:
        enrolled = ask_to_join(endpoint, own, addresses, timeout, runtime)
        check(enrolled.own, enrolled.others)
    except BaseException:
        endpoint.close()
        raise
    node = start_node(enrolled.own, enrolled.others, endpoint, options, runtime=runtime)
    try:
        node.admission.enter(enrolled.leader, enrolled.left)
        node.worker.run(node.membership.introduce, options.connect_timeout, enrolled)
    except BaseException:
        node.shutdown(graceful=False, timeout=1.0)
        raise
    return node


def shutdown_together(nodes: Sequence[Node], *, graceful: bool, timeout: float) -> None:
    """Shut several workers of this process down; raise the first error after all have ended."""
    errors: list[BaseException] = []
    nodes = [node for node in nodes if not node.worker.closed]  # when the interpreter exits, all are closed

    def end(node: Node) -> None:
        try:
            node.shutdown(graceful=graceful, timeout=timeout)
        except BaseException as error:
            errors.append(error)

    threads = [
        node.worker.runtime.spawn(functools.partial(end, node), name=f"shutdown-{node.worker.name}") for node in nodes
    ]
    for node, thread in zip(nodes, threads, strict=True):
        node.worker.runtime.join(thread)
    if not running_workers():
        interrupts.stop_deferring()  # the threads above cannot do this for the calling thread
    if errors:
        raise errors[0]
