"""Workers of one process that behave differently, for tests of those that trust each other and those that do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import backhaul as bh
from backhaul._rpc.node import describe, shutdown_together, start_node
from backhaul._transport.base import EndpointFactory
from backhaul._transport.inproc import InprocEndpoint


@contextlib.contextmanager
def mixed_cluster(
    workers: Mapping[str, bh.Options], endpoints: EndpointFactory = InprocEndpoint, hosts: Sequence[str] = ()
) -> Iterator[list[bh.Worker]]:
    """As ``bh.cluster``, with options for each. ``hosts``: the host that each says it is on; default: all on one."""
    ends = [endpoints() for _ in workers]
    each = list(zip(workers.items(), ends, strict=True))
    records = [
        describe(name, number, end, options, host=hosts[number] if hosts else "this process")
        for number, ((name, options), end) in enumerate(each)
    ]
    nodes = [start_node(own, records, end, options) for own, ((_, options), end) in zip(records, each, strict=True)]
    graceful = False
    try:
        with nodes[0].worker:
            yield [node.worker for node in nodes]
        graceful = True
    finally:
        shutdown_together(nodes, graceful=graceful, timeout=10)
