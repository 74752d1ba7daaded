"""How a worker ends: ``leave``, ``shutdown`` and ``serve``. Each acts on the current worker."""

from __future__ import annotations

import atexit

from backhaul._rpc.node import Node
from backhaul._rpc.shutdown.lost_members import LostMembers
from backhaul._runtime.compile_marks import graph_break
from backhaul._worker.worker import current_worker, running_workers
from backhaul.errors import NotInitializedError, WorkersLostError

_SERVE_SECONDS = 1e9  # for as long as it takes


@graph_break
def leave(*, timeout: float | None = None) -> None:
    """End the current worker. The other workers continue.

    Waits until this worker has no call under way. Then announces its departure to all other workers. From then on,
    their calls to it raise ``UnknownWorkerError``. Once this returns, the worker's threads and sockets are gone. Does
    nothing if there is no worker.

    Args:
        timeout: Seconds to wait at most; default ``options.shutdown_timeout``. The worker ends in any case.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(["first", "second"]) as (first, second):
        ...     with second:
        ...         bh.leave()
        ...     [info.name for info in bh.get_worker_infos()]
        ['first']
    """
    try:
        worker = current_worker()
    except NotInitializedError as error:
        if error.worker is None and running_workers():
            raise
        return
    limit = worker.options.shutdown_timeout if timeout is None else timeout
    worker.part(Node).shutdown(graceful=False, timeout=limit, alone=True)


@graph_break
def shutdown(*, graceful: bool = True, timeout: float | None = None, ignore_rref_leak: bool = True) -> None:
    """End the current worker.

    With ``graceful`` this first waits until every worker has called ``shutdown`` and no call is under way
    anywhere; it does not wait for lost workers. Once this returns (or raises), the worker's threads and sockets are
    gone, and calls that were pending have failed. Does nothing if there is no worker.

    Args:
        graceful: Whether to wait for the other workers.
        timeout: Seconds to wait at most; default ``options.shutdown_timeout``.
        ignore_rref_leak: If False, this worker releases the references that it holds, and raises ``LeakError`` if other
            workers still refer to its values at the end. Pass the same value on all workers.

    Raises:
        LeakError: See ``ignore_rref_leak``.
        ShutdownTimeoutError: Other workers were not ready in time. This worker is closed in any case.
        WorkersLostError: The worker that was to say when all are done was lost meanwhile, so it is unknown whether the
            work was finished. Other lost workers are named in the log only; see ``serve``.

    Example:
        >>> import torch, backhaul as bh
        >>> worker = bh.init("alone", rank=0, world_size=1, store=torch.distributed.HashStore())
        >>> bh.shutdown()
        >>> worker.closed
        True
    """
    try:
        worker = current_worker()
    except NotInitializedError as error:
        if error.worker is None and running_workers():
            raise  # there are several workers, and none is current
        return
    limit = worker.options.shutdown_timeout if timeout is None else timeout
    lost = worker.part(Node).shutdown(graceful=graceful, timeout=limit, strict=not ignore_rref_leak)
    if lost.without_word:
        raise _workers_lost(worker.name, lost)


@graph_break
def serve(*, timeout: float | None = None) -> None:
    """Serve the other workers until all of them are done, and then end the current worker.

    For workers that do nothing by themselves. Returns only if the work was finished: every member has called
    ``shutdown`` or ``serve``, or has left with ``leave``. So the exit status of a process that ends with ``serve``
    tells torchrun, Slurm or Kubernetes whether to restart it. A worker that was lost and came back, or that another one
    has replaced, does not count as lost.

    Args:
        timeout: Seconds to wait at most; None: as long as it takes.

    Raises:
        NotInitializedError: There is no worker.
        WorkersLostError: Workers were lost before all were done. If the first worker is lost, this raises at once.
        ShutdownTimeoutError: The other workers were not done in time.

    Example:
        >>> import threading, backhaul as bh
        >>> with bh.cluster(["trainer", "server"]) as (trainer, server):
        ...     serving = threading.Thread(target=server.run, args=(bh.serve,))
        ...     serving.start()
        ...     bh.rpc_sync("server", abs, args=(-1,))
        ...     bh.shutdown()
        ...     serving.join()
        1
    """
    worker = current_worker()
    limit = _SERVE_SECONDS if timeout is None else timeout
    lost = worker.part(Node).shutdown(graceful=True, timeout=limit)
    if lost.reasons:
        raise _workers_lost(worker.name, lost)


def _workers_lost(name: str, lost: LostMembers) -> WorkersLostError:
    return WorkersLostError(
        f"worker '{name}' has ended before all workers were done: {lost}; look at their logs, and start them again",
        worker=next(iter(lost.reasons)),
        reasons=dict(lost.reasons),
    )


@atexit.register
def _close_at_exit() -> None:
    for worker in running_workers():
        worker.part(Node).shutdown(graceful=False, timeout=1.0)
