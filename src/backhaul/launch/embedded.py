"""Many workers inside one process, for notebooks and tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from backhaul.cuda.placement import check
from backhaul.rpc.node import describe, shutdown_together, start_node
from backhaul.transport.base import EndpointFactory
from backhaul.transport.inproc import InprocEndpoint
from backhaul.types import Options, check_name
from backhaul.worker import Worker


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


@contextlib.contextmanager
def cluster(
    workers: int | Sequence[str],
    *,
    options: Options | None = None,
    endpoints: EndpointFactory = InprocEndpoint,
) -> Iterator[list[Worker]]:
    """Run workers inside this process; inside the ``with``, the first is the current one.

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
    """
    names = worker_names(workers)
    options = options or Options()
    ends = [endpoints() for _ in names]
    records = [
        describe(name, number, end, options, host="this process")
        for number, (name, end) in enumerate(zip(names, ends, strict=True))
    ]
    try:
        for own in records:
            check(own, records)
    except ValueError:
        for end in ends:
            end.close()
        raise
    nodes = [start_node(own, records, end, options) for own, end in zip(records, ends, strict=True)]
    graceful = False
    try:
        with nodes[0].worker:
            yield [node.worker for node in nodes]
        graceful = True
    finally:
        shutdown_together(nodes, graceful=graceful, timeout=options.shutdown_timeout)
