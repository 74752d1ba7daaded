"""Several workers inside one process, for notebooks and tests."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from types import TracebackType

from backhaul._devices.placement import check
from backhaul._options import Options
from backhaul._rpc.node import Node, describe, refuse_in_handlers, shutdown_together, start_node
from backhaul._transport.base import Endpoint, EndpointFactory
from backhaul._transport.inproc import InprocEndpoint
from backhaul._types import check_name
from backhaul._worker.worker import Worker, current_worker, in_handler, make_default
from backhaul.errors import NotInitializedError

log = logging.getLogger("backhaul")

_CLOSE_SECONDS = 1.0  # for handlers to end when another cluster is started


def worker_names(workers: int | Sequence[str]) -> list[str]:
    """``worker0`` to ``worker<n-1>``, or the given names, checked."""
    if isinstance(workers, int):
        if workers < 1:
            raise ValueError(f"a cluster has at least one worker, got {workers}")
        return [f"worker{number}" for number in range(workers)]
    names = [check_name(name) for name in workers]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"a cluster needs at least one worker, and worker names must differ: {names}")
    return names


class Cluster(contextlib.ContextDecorator):
    """Workers of this process that start and end together; see ``cluster``. Thread-safe."""

    def __init__(self, names: Sequence[str], options: Options, endpoints: EndpointFactory) -> None:
        self._names = names
        self._options = options
        self._endpoints = endpoints
        self._changing = threading.RLock()  # held while workers start or end; guards the attributes below
        self._nodes: list[Node] = []  # the workers that were started last
        self._process = 0  # the id of the process that started them
        self._inside: Worker | None = None  # the worker that an open ``with`` has made current

    def __repr__(self) -> str:
        state = "running" if self.running else "not running: call start(), or use it in a `with`"
        return f"<Cluster of {', '.join(self._names)}; {state}>"

    @property
    def running(self) -> bool:
        """Whether workers of this cluster run in this process."""
        return self._process == os.getpid() and any(not node.worker.closed for node in self._nodes)

    @property
    def workers(self) -> list[Worker]:
        """The workers, by id.

        Raises:
            NotInitializedError: The cluster is not running.
        """
        if not self.running:
            raise NotInitializedError(f"{self!r}"[1:-1])
        return [node.worker for node in self._nodes]

    def start(self) -> Cluster:
        """Start the workers and return at once. From now on the first worker is current wherever no other one is.

        Does nothing if the cluster is running. If another cluster was started in this way and still runs, it is closed
        first, with all that its workers hold: so a cell of a notebook may be run again. The workers run until
        ``shutdown`` or until the program ends, even if nothing refers to the cluster any more.

        Returns:
            The cluster itself.

        Example:
            >>> import torch, backhaul as bh
            >>> cluster = bh.cluster(2).start()
            >>> bh.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
            tensor([2., 2.])
            >>> cluster.shutdown()
        """
        global _started
        with _starting, self._changing:
            if self.running and any(node.worker.closed for node in self._nodes):  # ``bh.shutdown`` has closed some
                self.shutdown(graceful=False, timeout=_CLOSE_SECONDS)
            if not self.running:
                if _started is not None and _started.running:
                    log.info("closing %r: another cluster is started", _started)
                    _started.shutdown(graceful=False, timeout=_CLOSE_SECONDS)
                self._start()
                _started = self
                make_default(self._nodes[0].worker)
        return self

    def shutdown(self, *, graceful: bool = True, timeout: float | None = None) -> None:
        """End the workers. Does nothing if the cluster is not running; it may be started again.

        Args:
            graceful: Whether to wait until no call is under way.
            timeout: Seconds to wait at most; default ``options.shutdown_timeout``.

        Raises:
            ShutdownTimeoutError: Calls were still under way. The workers are closed nevertheless.
            BackhaulError: A handler called this, and would wait for its own end.
        """
        if graceful and in_handler.get() and self.running and current_worker() in self.workers:
            refuse_in_handlers(current_worker().name)
        with self._changing:
            nodes, self._nodes = self._nodes if self.running else [], []
            limit = self._options.shutdown_timeout if timeout is None else timeout
            shutdown_together(nodes, graceful=graceful, timeout=limit)

    def _start(self) -> None:
        names, options, ends = self._names, self._options, list[Endpoint]()
        try:
            for _ in names:
                ends.append(self._endpoints())
            records = [
                describe(name, number, end, options, host="this process")
                for number, (name, end) in enumerate(zip(names, ends, strict=True))
            ]
            for own in records:
                check(own, records)
        except BaseException:
            for end in ends:
                end.close()
            raise
        self._nodes = [start_node(own, records, end, options) for own, end in zip(records, ends, strict=True)]
        self._process = os.getpid()

    def _recreate_cm(self) -> Cluster:
        """Each call of a decorated function gets a cluster of its own."""
        return Cluster(self._names, self._options, self._endpoints)

    def __enter__(self) -> list[Worker]:
        with self._changing:
            if self._inside is not None:
                raise RuntimeError(
                    f"the cluster of {', '.join(self._names)} is entered already; leave that `with` block first, or "
                    "make another cluster"
                )
            if not self.running:
                self._start()
            workers = self.workers
            self._inside = workers[0].__enter__()
            return workers

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        inside, self._inside = self._inside, None
        try:
            if inside is not None:
                inside.__exit__(kind, error, trace)
        finally:
            self.shutdown(graceful=kind is None)


_started: Cluster | None = None  # the cluster that was started last without a ``with``
_starting = threading.RLock()  # guards _started


def cluster(
    workers: int | Sequence[str],
    *,
    options: Options | None = None,
    endpoints: EndpointFactory = InprocEndpoint,
) -> Cluster:
    """Describe workers inside this process. They run inside a ``with`` block, where the first is the current one. In a
    notebook they run from ``start()`` to ``shutdown()``, which may be called in different cells.

    Values are copied, exactly as between processes. ``with workers[1]:`` makes another worker current. The end of the
    block waits for all work, as ``shutdown`` does; if the block raised, the workers are closed at once.

    Args:
        workers: The number of workers, or their names.
        options: The options of all workers.
        endpoints: Makes the transport endpoint of a worker; in-process queues by default.

    Example:
        >>> import torch, backhaul as bh
        >>> with bh.cluster(["trainer", "embedding"]) as (trainer, embedding):
        ...     print(bh.get_worker_info().name, bh.rpc_sync("embedding", torch.zeros, args=(2,)))
        ...     with embedding:
        ...         print(bh.get_worker_info().name)
        trainer tensor([0., 0.])
        embedding

        In the cells of a notebook:

        >>> pair = bh.cluster(["trainer", "embedding"])
        >>> pair.start()
        <Cluster of trainer, embedding; running>
        >>> bh.rpc_sync("embedding", torch.zeros, args=(2,))
        tensor([0., 0.])
        >>> pair.shutdown()
    """
    return Cluster(worker_names(workers), options or Options(), endpoints)
