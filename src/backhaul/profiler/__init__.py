"""One profile over all workers: what each did for a call or a pass, on one clock."""

from backhaul.profiler.model import Timeline
from backhaul.profiler.recorder import Recorder
from backhaul.profiler.session import attach, profile
from backhaul.rpc.intercept import extensions
from backhaul.rpc.node import Node

__all__ = ["Timeline", "attach", "profile"]


def _extend(node: Node) -> None:
    Recorder(node)


extensions.append(_extend)
