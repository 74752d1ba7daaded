"""Profiles over all workers: what each worker did for a call or a pass, on one clock."""

from backhaul._rpc.interceptors import extensions
from backhaul._rpc.node import Node
from backhaul.profiler.model import Timeline
from backhaul.profiler.recorder import ProfileRecorder
from backhaul.profiler.session import attach, profile

__all__ = ["Timeline", "attach", "profile"]


def _extend(node: Node) -> None:
    ProfileRecorder(node)


extensions.append(_extend)
