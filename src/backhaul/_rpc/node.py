"""A worker with all of RPC attached: what ``init`` and ``cluster`` make, and how it ends."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol

from backhaul._devices.cuda import process
from backhaul._devices.placement import maps_of
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.calls.server import CallServer
from backhaul._rpc.cluster.departure import seal_of, secret_of
from backhaul._rpc.cluster.membership import Membership
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.cluster.partition_healing import PartitionHealing
from backhaul._rpc.cluster.peers import Peers, main_identity
from backhaul._rpc.device_memory import DeviceMemory
from backhaul._rpc.interceptors import extensions
from backhaul._rpc.liveness.heartbeats import Heartbeats
from backhaul._rpc.security.rate_limits import RateLimits, bounds_of
from backhaul._rpc.security.untrusted import UntrustedServer, guard_frames
from backhaul._rpc.shutdown.graceful_shutdown import GracefulShutdown
from backhaul._runtime import interrupts
from backhaul._runtime.runtime import Runtime
from backhaul._transport.base import Endpoint
from backhaul._types import Options
from backhaul._wire.value_count import most_buffers
from backhaul._worker.worker import Worker, running_workers, serving
from backhaul.errors import BackhaulError, LeakError


class Audit(Protocol):
    """What a layer above has to say about leaks when its worker is shut down."""

    def begin(self) -> None:
        """The worker's program is over: let go of what it holds."""

    def end(self) -> list[str]:
        """All workers have done so: what is left, for people."""


class Node:
    """The RPC parts of one worker, attached to it."""

    def __init__(self, worker: Worker, own: WorkerRecord, records: Iterable[WorkerRecord]) -> None:
        self.worker = worker
        self.peers = Peers(worker, own, records)
        self.heartbeat = Heartbeats(worker, self.peers)
        self.client = CallClient(worker, self.peers)
        self.quotas = RateLimits.of(worker.options)
        guarded = not worker.options.trusted or self.quotas.any
        self.server = (UntrustedServer if guarded else CallServer)(worker, self.client)
        self.graceful_shutdown = GracefulShutdown(worker, self.client, self.server)
        self.membership = Membership(worker, self.client, self.graceful_shutdown)
        self.partition_healing = PartitionHealing(worker, self.client, self.graceful_shutdown, self.membership)
        self.devices = (
            None if worker.device_context is None else DeviceMemory(worker, self.peers, worker.device_context)
        )
        self.audits: list[Audit] = []
        self._ending = worker.runtime.lock()  # held by the thread that shuts down
        worker.attach(self)
        worker.counters["num_pending_calls"] = lambda: len(self.client.pending)
        worker.counters["num_calls_served"] = lambda: self.server.served
        worker.counters["num_calls_cancelled"] = lambda: self.client.cancels
        worker.counters["num_retries"] = lambda: self.client.retries
        worker.counters["num_calls_dropped"] = lambda: self.server.dropped
        worker.counters["bytes_sent"] = self._bytes_sent
        worker.counters["num_suspected_peers"] = lambda: len(self.heartbeat.suspected)
        worker.counters["shm_bytes"] = lambda: worker.endpoint.shm_bytes
        worker.counters["shm_lent"] = lambda: worker.endpoint.shm_lent

    def _bytes_sent(self) -> int:
        of_devices = 0 if self.devices is None else self.devices.bytes_sent
        return self.peers.bytes_sent - self.heartbeat.bytes_sent + of_devices

    def shutdown(self, *, graceful: bool, timeout: float, strict: bool = False, alone: bool = False) -> None:
        """End this worker; see ``backhaul.shutdown``. With ``strict`` audits are made. ``alone``: the others go on."""
        if graceful or alone:
            refuse_in_handlers(self.worker.name)
        deadline = self.worker.runtime.now() + timeout
        if not interrupts.acquire(self._ending, timeout):
            return  # another thread is at it, and has its own deadline
        try:
            if self.worker.closed:
                return
            try:
                audits = self.audits if graceful and strict else []
                for audit in audits:
                    audit.begin()
                if graceful:
                    self.graceful_shutdown.wait(timeout)
                elif alone:
                    self.membership.leave(deadline)
                problems = [problem for audit in audits for problem in audit.end()]
                if problems:
                    raise LeakError(f"worker '{self.worker.name}': {'; '.join(problems)}", worker=self.worker.name)
            finally:
                try:
                    if self.devices is not None:
                        self.devices.settle(max(deadline - self.worker.runtime.now(), 0.5))
                finally:
                    self._end(deadline - self.worker.runtime.now())
        finally:
            self._ending.release()

    @interrupts.uninterruptible
    def _end(self, left: float) -> None:
        self.graceful_shutdown.started = True  # from now on members that go are no news
        self.client.close()
        self.peers.close()
        self.worker.close(min(max(left, 0.5), 5.0))
        self.server.close()
        self.client.abandon()


def refuse_in_handlers(worker: str) -> None:
    """Raise ``BackhaulError`` where a handler runs: it is about to wait for its own end."""
    if serving.get():
        raise BackhaulError(
            "a handler cannot wait for all handlers to end: call shutdown(graceful=False) here, or shut down "
            "from the program's own thread",
            worker=worker,
        )


def describe(name: str, number: int, endpoint: Endpoint, options: Options, *, host: str) -> WorkerRecord:
    """What a new worker on ``endpoint`` tells the others about itself."""
    incarnation = secrets.token_hex(8)
    return WorkerRecord(
        id=number,
        name=name,
        incarnation=incarnation,
        host=host,
        addresses=endpoint.addresses,
        main=main_identity(),
        limit=options.max_frame_bytes,
        beat=options.heartbeat_interval,
        trusting=options.trusted,
        devices=process.identities(),
        maps=maps_of(options.device_maps, options.devices),
        bounds=bounds_of(options),
        seal=seal_of(secret_of(incarnation)),
    )


def start_node(
    own: WorkerRecord,
    records: Iterable[WorkerRecord],
    endpoint: Endpoint,
    options: Options,
    *,
    runtime: Runtime | None = None,
) -> Node:
    """Make the worker that ``own`` describes and let it listen."""
    worker = Worker(own.info, own.incarnation, endpoint, options, runtime)
    worker.device_context = process.start(own, worker.options.device_slot_bytes)
    node = Node(worker, own, records)
    for extend in extensions:
        extend(node)
    if not options.trusted:
        endpoint.share_nothing()
        endpoint.limit_buffers(most_buffers(node.quotas.tensors or 0))
        guard_frames(node.worker, node.client, node.quotas)
    node.worker.start()
    return node


def shutdown_together(nodes: Sequence[Node], *, graceful: bool, timeout: float) -> None:
    """Shut several workers of this process down; raise the first error after all have ended."""
    errors: list[BaseException] = []
    nodes = [node for node in nodes if not node.worker.closed]  # at the exit of the interpreter all are

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
        interrupts.stop_deferring()  # those were other threads
    if errors:
        raise errors[0]
