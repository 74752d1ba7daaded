"""Many workers inside one process, for notebooks and tests."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from types import TracebackType

from backhaul._devices.placement import check
from backhaul._rpc.node import Node, describe, refuse_in_handlers, shutdown_together, start_node
from backhaul._transport.base import Endpoint, EndpointFactory
from backhaul._transport.inproc import InprocEndpoint
from backhaul._types import Options, check_name
from backhaul._worker.worker import Worker, current_worker, in_handler, make_default
from backhaul.errors import NotInitializedError

log = logging.getLogger("backhaul")

_CLOSING = 1.0  # seconds that handlers get to end when another cluster is started


def worker_names(workers: int | Sequence[str]) -> list[str]:
    """``worker0`` to ``worker<n-1>``, or the given names, checked."""
    if isinstance(workers, int):
        if workers < 1:
            raise ValueError(f"a cluster has at least one worker, got {workers}")
        return [f"worker{number}" for number in range(workers)]
    names = [check_name(name) for name in workers]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"worker names must be there and differ: {names}")
    return names


class Cluster(contextlib.ContextDecorator):
    """Workers of this process that start and end together; see ``cluster``. Thread-safe."""

    def __init__(self, names: Sequence[str], options: Options, endpoints: EndpointFactory) -> None:
        self._names = names
        self._options = options
        self._endpoints = endpoints
        self._changing = threading.RLock()  # held while workers start or end; guards all below
        self._nodes: list[Node] = []  # those that were started last
        self._process = 0  # where they were
        self._inside: Worker | None = None  # the one that an open ``with`` has made current

    def __repr__(self) -> str:
        state = "running" if self.running else "not running: call start(), or use it in a `with`"
        return f"<Cluster of {', '.join(self._names)}; {state}>"

    @property
    def running(self) -> bool:
        """Whether there are workers now."""
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
        """Start the workers and return at once; the first is the current one from now on, wherever no other is.

        Does nothing if the cluster is running. Another cluster that was started in this way, and is running still, is
        closed first, with all that its workers hold: so a cell of a notebook may be run again. The workers run until
        ``shutdown`` or until the program ends, also if nothing refers to the cluster any more.

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
            if self.running and any(node.worker.closed for node in self._nodes):  # by ``bh.shutdown``, one by one
                self.shutdown(graceful=False, timeout=_CLOSING)
            if not self.running:
                if _started is not None and _started.running:
                    log.info("closing %r: another cluster is started", _started)
                    _started.shutdown(graceful=False, timeout=_CLOSING)
                self._start()
                _started = self
                make_default(self._nodes[0].worker)
        return self

    def shutdown(self, *, graceful: bool = True, timeout: float | None = None) -> None:
        """End the workers. Does nothing if the cluster is not running; it may be started again.

        Args:
            graceful: Whether to wait until no call is under way.
            timeout: At most so many seconds; default ``options.shutdown_timeout``.

        Raises:
            ShutdownTimeoutError: There were still calls under way. The workers are closed all the same.
            BackhaulError: A handler wants to wait for all handlers, itself among them.
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
        """For each call of a function that it decorates."""
        return Cluster(self._names, self._options, self._endpoints)

    def __enter__(self) -> list[Worker]:
        with self._changing:
            if self._inside is not None:
                raise RuntimeError(
                    f"the cluster of {', '.join(self._names)} is entered already; leave that `with` first, or make "
                    "another cluster"
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


_started: Cluster | None = None  # the one that was started last, without a ``with``
_starting = threading.RLock()  # guards it


def cluster(
    workers: int | Sequence[str],
    *,
    options: Options | None = None,
    endpoints: EndpointFactory = InprocEndpoint,
) -> Cluster:
    """Describe workers inside this process. They run inside a ``with``, where the first is the current one; or, in a
    notebook, from ``start()`` to ``shutdown()``, which may be called in different cells.

    Values travel by copy, exactly as between processes. ``with workers[1]:`` makes another one current. On leaving, all
    work is waited for as in ``shutdown``; if the body raised, the workers are closed at once.

    Args:
        workers: How many, or their names.
        options: For all of them.
        endpoints: Makes their ends of a transport; in-process queues by default.

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
