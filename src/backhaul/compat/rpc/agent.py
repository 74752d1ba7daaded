"""The current agent. As in the reference, it holds the worker, the default timeout and the counters."""

from __future__ import annotations

import contextlib
import numbers
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from backhaul._rpc.api import init
from backhaul._rpc.calls.client import CallClient
from backhaul._rpc.ending import shutdown
from backhaul._rpc.node import Node
from backhaul._rref.registry import RRefRegistry
from backhaul._worker.worker import Worker
from backhaul.compat import errors
from backhaul.compat.rpc import devices
from backhaul.compat.rpc.info import WorkerInfo, as_reference
from backhaul.compat.rpc.options import TensorPipeRpcBackendOptions, to_options
from backhaul.errors import BackhaulError, WorkersLostError

_UNLIMITED_JOIN_SECONDS = 7 * 86400.0
_AGENT_WAIT_SECONDS = 30.0  # how long a call that arrives before there is an agent waits for one
_MAX_GIL_WAITS = 100  # how many of the latest measurements are kept

_current: Any = None
_current_is_set = threading.Event()
_gil_waits: list[float] | None = None  # seconds; None while they are not measured


class RpcAgent:
    """The base class of agents."""


class TensorPipeAgent(RpcAgent):
    """A Backhaul worker with the interface of the reference's default agent."""

    def __init__(self, worker: Worker, store: Store, options: TensorPipeRpcBackendOptions, *, static: bool) -> None:
        self.worker = worker
        self.client = worker.part(Node).client
        self.store = store
        self.is_static_group = static
        self._options = options
        self.leaks: list[str] = []  # set when the worker closes: values that other workers still refer to
        worker.on_close(self._collect_leaks)

    def _collect_leaks(self) -> None:
        self.leaks = self.worker.part(RRefRegistry).end()

    @property
    def node(self) -> Node:
        """The RPC node of the worker."""
        return self.worker.part(Node)

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Name and id of a worker. By default, of this one."""
        if worker is None:
            return as_reference(self.worker.info)
        with errors.rewording():
            return as_reference(self.node.peers.find(worker).info)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Names and ids of all workers."""
        return [as_reference(peer.info) for peer in sorted(self.node.peers, key=lambda peer: peer.record.id)]

    def get_debug_info(self) -> dict[str, str]:
        """Counters, under the reference's names."""
        counts: dict[str, float] = {
            "agent.thread_pool_size": self.worker.options.threads,
            "agent.num_pending_requests": len(self.node.client.pending),
            "agent.num_calls_served": self.node.server.served,
        }
        if _gil_waits is not None:
            waits = _gil_waits or [0.0]
            counts["agent.gil_average_wait_time_us"] = sum(waits) / len(waits) * 1e6
        return {name: str(count) for name, count in counts.items()}

    def join(self, *, timeout: float = 0.0) -> None:
        """Wait until no worker has calls in progress, then end. ``timeout=0`` means no limit.

        Lost workers are not waited for. The log names them.
        """
        with self.worker, errors.rewording(), contextlib.suppress(WorkersLostError):
            shutdown(graceful=True, timeout=timeout or _UNLIMITED_JOIN_SECONDS)

    def finish_calls(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until this worker neither makes nor serves a call."""
        if self.worker.closed:
            return
        idle = self.worker.runtime.one_shot()
        self.node.client.idleness.when_idle(idle.open)
        with self.worker.blocking():
            idle.wait(timeout)

    def shutdown(self) -> None:
        """End at once, without waiting for calls in progress."""
        with self.worker:
            if not self.worker.closed:
                shutdown(graceful=False)

    def _get_device_map(self, to: WorkerInfo) -> dict[torch.device, torch.device]:
        """The device map for a callee: device of this worker -> device of the callee."""
        return self._options.device_maps.get(to.name, {})

    def _get_backend_options(self) -> TensorPipeRpcBackendOptions:
        return self._options


def start(name: str, rank: int, world_size: int, store: Store, options: TensorPipeRpcBackendOptions) -> TensorPipeAgent:
    """Make this process a worker of a group of known size."""
    worker_options = to_options(options)
    with errors.rewording():
        own = devices.from_options(name, options)
        declarations = devices.exchange(own, rank, world_size, store, worker_options.rendezvous_timeout)
        devices.check(declarations, complete=True)
        worker = init(name, rank=rank, world_size=world_size, store=store, options=worker_options)
    _connect(worker)
    return TensorPipeAgent(worker, store, options, static=True)


def _connect(worker: Worker) -> None:
    """Open all channels now, as the reference does, so that connecting does not use up the timeout of a call."""
    peers = worker.part(Node).peers
    for peer in peers:
        with contextlib.suppress(BackhaulError):  # the first call to this peer raises it
            peers.channel_to(peer, worker.options.connect_timeout)


def current() -> Any:
    """The current agent. Raises ``RuntimeError`` if there is none."""
    if _current is None:
        raise RuntimeError(errors.NO_AGENT)
    return _current


def client() -> CallClient:
    """The client of the current agent. Raises the error of functions that need an agent if there is none."""
    if _current is None:
        raise RuntimeError(errors.NOT_INITIALIZED)
    found: CallClient = _current.client
    return found


def wait_for_current() -> None:
    """Wait until there is a current agent. A call may arrive before ``init_rpc`` has returned on this worker."""
    if _current is None:
        _current_is_set.wait(_AGENT_WAIT_SECONDS)


def is_set() -> bool:
    """Whether there is a current agent."""
    return _current is not None


def set_current(agent: Any) -> None:
    """Make ``agent`` the current one."""
    global _current
    _current = agent
    _current_is_set.set()


def reset() -> None:
    """Remove the current agent."""
    global _current
    _current_is_set.clear()
    _current = None


def get_rpc_timeout() -> float:
    """The default timeout of calls, in seconds."""
    timeout: float = current().node.client.timeout
    return timeout


def set_rpc_timeout(timeout: float) -> None:
    """Set the default timeout of calls that are made from now on, in seconds."""
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"incompatible function arguments: timeout must be a number of seconds, not {timeout!r}")
    current().node.client.timeout = float(timeout)


def enable_gil_profiling(flag: bool) -> None:
    """Start or stop measuring how long handlers wait for the global interpreter lock."""
    global _gil_waits
    _gil_waits = [] if flag else None


def before_handler(measure: Callable[[], float]) -> None:
    """Wait until there is a current agent, and record the seconds that ``measure()`` returns if
    ``enable_gil_profiling`` was called.
    """
    if _current is None:
        wait_for_current()
    if _gil_waits is not None:
        _gil_waits.append(measure())
        del _gil_waits[:-_MAX_GIL_WAITS]
