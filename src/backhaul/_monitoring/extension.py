"""Makes each new worker answer monitors, and lets monitors of the same user find it."""

from __future__ import annotations

import functools
import os

from backhaul._monitoring import runtime_files
from backhaul._monitoring.status_server import StatusServer
from backhaul._rpc.interceptors import extensions
from backhaul._rpc.node import Node
from backhaul._transport.sockets.endpoint import SocketEndpoint


def _extend(node: Node) -> None:
    server = StatusServer(node)
    worker, endpoint = node.worker, node.worker.endpoint
    if server.allows_monitors and isinstance(endpoint, SocketEndpoint):
        pid = os.getpid()
        made = runtime_files.WorkerFile(
            worker.name,
            worker.info.id,
            worker.incarnation,
            pid,
            runtime_files.started(pid),
            endpoint.addresses,
            endpoint.secret.hex(),
        )
        path = runtime_files.write(made)
        if path is not None:
            worker.on_close(functools.partial(runtime_files.remove, path))


extensions.append(_extend)
