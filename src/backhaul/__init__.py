"""Backhaul: distributed autograd for PyTorch.

Workers call each other's functions with tensors; see ``init``, ``launch`` and ``cluster`` for how they start, and
``rpc_sync`` and ``rpc_async`` for calls.
"""

from backhaul import nn, optim, profiler
from backhaul.autograd.api import ContextHandle, backward, context, get_gradients
from backhaul.autograd.replay import Replay
from backhaul.errors import (
    AuthenticationError,
    BackhaulError,
    BackwardTimeoutError,
    CallTimeoutError,
    ContextError,
    FrameTooLargeError,
    FunctionNotFoundError,
    GraphFreedError,
    LeakError,
    NotInitializedError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    RemoteTraceback,
    RendezvousError,
    SerializationError,
    ShutdownTimeoutError,
    UnknownContextError,
    UnknownWorkerError,
    WorkerFailedError,
)
from backhaul.launch.embedded import cluster
from backhaul.launch.local import launch
from backhaul.ops import remote_op
from backhaul.profiler.session import profile
from backhaul.rpc.api import get_debug_info, get_worker_info, get_worker_infos, init, rpc_async, rpc_sync, shutdown
from backhaul.rpc.dispatch import async_execution
from backhaul.rpc.futures import Future, collect_all, wait_all
from backhaul.rref.handle import RRef
from backhaul.rref.remote import remote
from backhaul.types import Options, WorkerInfo
from backhaul.worker import Worker, current_worker

__all__ = [
    "AuthenticationError",
    "BackhaulError",
    "BackwardTimeoutError",
    "CallTimeoutError",
    "ContextError",
    "ContextHandle",
    "FrameTooLargeError",
    "FunctionNotFoundError",
    "Future",
    "GraphFreedError",
    "LeakError",
    "NotInitializedError",
    "Options",
    "PeerLostError",
    "ProtocolError",
    "RRef",
    "RemoteError",
    "RemoteTraceback",
    "RendezvousError",
    "Replay",
    "SerializationError",
    "ShutdownTimeoutError",
    "UnknownContextError",
    "UnknownWorkerError",
    "Worker",
    "WorkerFailedError",
    "WorkerInfo",
    "async_execution",
    "backward",
    "cluster",
    "collect_all",
    "context",
    "current_worker",
    "get_debug_info",
    "get_gradients",
    "get_worker_info",
    "get_worker_infos",
    "init",
    "launch",
    "nn",
    "optim",
    "profile",
    "profiler",
    "remote",
    "remote_op",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]
