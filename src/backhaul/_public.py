"""The public names of Backhaul: what ``backhaul`` offers. Importing this module imports torch and all parts."""

from backhaul import _torch_support  # noqa: F401  (first, since it checks the torch that all others use)

# isort: split
from backhaul import __version__, errors, nn, optim, profiler, ray
from backhaul._autograd.api import ContextHandle, backward, context, get_gradients
from backhaul._autograd.failure.replay import Replay
from backhaul._groups.group import WorkerGroup, group
from backhaul._groups.group_calls import GroupCalls
from backhaul._launch.embedded import cluster
from backhaul._launch.processes import launch
from backhaul._monitoring import extension as _extension  # noqa: F401  (lets each worker answer monitors)
from backhaul._ops.api import remote_op
from backhaul._options import Codec, Devices, Limits, Liveness, Options, Security, Tls
from backhaul._recovery.api import retry_step
from backhaul._rpc.api import (
    get_address,
    get_debug_info,
    get_worker_info,
    get_worker_infos,
    init,
    on_membership,
    rpc_async,
    rpc_sync,
)
from backhaul._rpc.calls.async_results import async_execution
from backhaul._rpc.calls.retry import Retry
from backhaul._rpc.cluster.membership_events import MembershipEvent
from backhaul._rpc.compression import compression
from backhaul._rpc.ending import leave, serve, shutdown
from backhaul._rpc.futures import Future
from backhaul._rpc.security.policy import expose
from backhaul._rpc.several_futures import as_completed, collect_all, wait_all
from backhaul._rref.handle import RRef
from backhaul._rref.remote import remote
from backhaul._streams.stream import RemoteIterator, stream
from backhaul._types import WorkerInfo
from backhaul._worker.deadlines import cancelled, deadline, time_left
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import BackhaulError, CallCancelledError, CallTimeoutError, PeerLostError, RemoteError
from backhaul.profiler.session import profile

__all__ = [
    "BackhaulError",
    "CallCancelledError",
    "CallTimeoutError",
    "Codec",
    "ContextHandle",
    "Devices",
    "Future",
    "GroupCalls",
    "Limits",
    "Liveness",
    "MembershipEvent",
    "Options",
    "PeerLostError",
    "RRef",
    "RemoteError",
    "RemoteIterator",
    "Replay",
    "Retry",
    "Security",
    "Tls",
    "Worker",
    "WorkerGroup",
    "WorkerInfo",
    "__version__",
    "as_completed",
    "async_execution",
    "backward",
    "cancelled",
    "cluster",
    "collect_all",
    "compression",
    "context",
    "current_worker",
    "deadline",
    "errors",
    "expose",
    "get_address",
    "get_debug_info",
    "get_gradients",
    "get_worker_info",
    "get_worker_infos",
    "group",
    "init",
    "launch",
    "leave",
    "nn",
    "on_membership",
    "optim",
    "profile",
    "profiler",
    "ray",
    "remote",
    "remote_op",
    "retry_step",
    "rpc_async",
    "rpc_sync",
    "serve",
    "shutdown",
    "stream",
    "time_left",
    "wait_all",
]
