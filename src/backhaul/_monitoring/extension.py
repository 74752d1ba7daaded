"""Makes each new worker answer monitors."""

from __future__ import annotations

from backhaul._monitoring.status_server import StatusServer
from backhaul._rpc.interceptors import extensions
from backhaul._rpc.node import Node


def _extend(node: Node) -> None:
    StatusServer(node)


extensions.append(_extend)
