"""Makes each new worker answer monitors, lets monitors of the same user find it, and serves the dashboard. Records the
pass that ``backhaul graph`` has started the worker for.
"""

from __future__ import annotations

import functools
import os
import sys

from backhaul._monitoring import pass_inbox, pass_recording, runtime_files
from backhaul._monitoring.status_server import StatusServer
from backhaul._rpc.interceptors import extensions
from backhaul._rpc.node import Node
from backhaul._transport.inproc import InprocEndpoint
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._worker.worker import Worker

_WATCH_SECONDS = 60.0  # for which workers count after a request: programs that read metrics ask less often than people


def _extend(node: Node) -> None:
    StatusServer(node)
    worker, endpoint = node.worker, node.worker.endpoint
    if worker.options.security.allows_monitors and isinstance(endpoint, SocketEndpoint):
        _leave_file(worker, endpoint)
    if worker.options.dashboard is not None and worker.info.id == 0:
        _serve_dashboard(node, worker.options.dashboard)
    if setting := os.environ.get(pass_inbox.VARIABLE):
        pass_recording.begin(node, setting)


def _leave_file(worker: Worker, endpoint: SocketEndpoint) -> None:
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


def _serve_dashboard(node: Node, bind: str) -> None:
    from backhaul._monitoring.dashboard import Dashboard  # only where it is wanted: it imports a web server
    from backhaul._monitoring.monitor import Monitor, open_endpoint

    worker, endpoint, host = node.worker, node.worker.endpoint, node.peers.own.record.host

    def open_monitor() -> Monitor:
        if isinstance(endpoint, SocketEndpoint):
            own = open_endpoint(endpoint.secret, [each for record in node.peers.records for each in record.addresses])
            return Monitor(own, endpoint.addresses, host=host, watch=_WATCH_SECONDS)
        return Monitor(InprocEndpoint(), endpoint.addresses, host=host, watch=_WATCH_SECONDS)

    dashboard = Dashboard(open_monitor, bind)
    worker.on_close(dashboard.close)
    print(f"backhaul: dashboard of worker '{worker.name}': {dashboard.url}", file=sys.stderr, flush=True)


extensions.append(_extend)
