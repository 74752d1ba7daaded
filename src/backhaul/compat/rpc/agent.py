"""The current agent: what the reference keeps its worker, its timeout and its counters in."""

from __future__ import annotations

import contextlib
import numbers
import threading
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from backhaul._rpc.api import init, shutdown
from backhaul._rpc.node import Node
from backhaul._rref.registry import RRefRegistry
from backhaul._worker.worker import Worker
from backhaul.compat import errors
from backhaul.compat.rpc import devices
from backhaul.compat.rpc.info import WorkerInfo, as_reference
from backhaul.compat.rpc.options import TensorPipeRpcBackendOptions, to_options
from backhaul.errors import BackhaulError

_FOREVER = 7 * 86400.0
_PATIENCE = 30.0  # seconds that a call may be here before there is an agent

_current: Any = None
_there_is_one = threading.Event()
_interpreter_waits: list[float] | None = None


class RpcAgent:
    """Anything that can be the current agent."""


class TensorPipeAgent(RpcAgent):
    """A Backhaul worker as the reference's default agent."""

    def __init__(self, worker: Worker, store: Store, options: TensorPipeRpcBackendOptions, *, static: bool) -> None:
        self.worker = worker
        self.store = store
        self.is_static_group = static
        self._options = options
        self.leaks: list[str] = []  # filled in at the end: values to which others still refer
        worker.on_close(self._look_for_leaks)

    def _look_for_leaks(self) -> None:
        self.leaks = self.worker.part(RRefRegistry).end()

    @property
    def node(self) -> Node:
        """RPC's part of the worker."""
        return self.worker.part(Node)

    def get_worker_info(self, who: str | int | None = None) -> WorkerInfo:
        """Name and id of a worker; our own if not said whose."""
        if who is None:
            return as_reference(self.worker.info)
        with errors.rewording():
            return as_reference(self.node.peers.find(who).info)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers."""
        return [as_reference(peer.info) for peer in self.node.peers]

    def get_debug_info(self) -> dict[str, str]:
        """Counters by the reference's names."""
        counts: dict[str, float] = {
            "agent.thread_pool_size": self.worker.options.threads,
            "agent.num_pending_requests": len(self.node.client.pending),
            "agent.num_calls_served": self.node.server.served,
        }
        if _interpreter_waits is not None:
            waits = _interpreter_waits or [0.0]
            counts["agent.gil_average_wait_time_us"] = sum(waits) / len(waits) * 1e6
        return {name: str(count) for name, count in counts.items()}

    def join(self, *, timeout: float = 0.0) -> None:
        """Wait until nobody has anything to do, and end; 0 means as long as it takes."""
        with self.worker, errors.rewording():
            shutdown(graceful=True, timeout=timeout or _FOREVER)

    def finish_calls(self, timeout: float) -> None:
        """Wait until this worker has no call under way, made or served, for at most ``timeout`` seconds."""
        if self.worker.closed:
            return
        idle = self.worker.runtime.one_shot()
        self.node.client.idleness.when_idle(idle.open)
        with self.worker.blocking():
            idle.wait(timeout)

    def shutdown(self) -> None:
        """End at once."""
        with self.worker:
            if not self.worker.closed:
                shutdown(graceful=False)

    def _get_device_map(self, to: WorkerInfo) -> dict[torch.device, torch.device]:
        """On which device there a tensor of one here arrives."""
        return self._options.device_maps.get(to.name, {})

    def _get_backend_options(self) -> TensorPipeRpcBackendOptions:
        return self._options


def start(name: str, rank: int, world_size: int, store: Store, options: TensorPipeRpcBackendOptions) -> TensorPipeAgent:
    """Make this process a worker of a group of known size."""
    told = to_options(options)
    with errors.rewording():
        own = devices.of_options(name, options)
        everyone = devices.exchange(own, rank, world_size, store, told.rendezvous_timeout)
        devices.check(everyone, complete=True)
        worker = init(name, rank=rank, world_size=world_size, store=store, options=told)
    _connect(worker)
    return TensorPipeAgent(worker, store, options, static=True)


def _connect(worker: Worker) -> None:
    """Open all channels now, as the reference does, so that no call's time is spent on that."""
    peers = worker.part(Node).peers
    for peer in peers:
        with contextlib.suppress(BackhaulError):  # whoever calls it will see
            peers.channel_to(peer, worker.options.connect_timeout)


def current() -> Any:
    """The current agent. Raises ``RuntimeError`` if there is none."""
    if _current is None:
        raise RuntimeError(errors.NO_AGENT)
    return _current


def wait_for_current() -> None:
    """For handlers: a call may come before ``init_rpc`` has returned here."""
    if _current is None:
        _there_is_one.wait(_PATIENCE)


def is_set() -> bool:
    """Whether there is a current agent."""
    return _current is not None


def set_current(agent: Any) -> None:
    """Make ``agent`` the current one."""
    global _current
    _current = agent
    _there_is_one.set()


def reset() -> None:
    """Let there be no current agent."""
    global _current
    _there_is_one.clear()
    _current = None


def get_rpc_timeout() -> float:
    """Seconds a call may take if it says nothing else."""
    timeout: float = current().node.client.timeout
    return timeout


def set_rpc_timeout(timeout: float) -> None:
    """Set that, for calls that are made from now on."""
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"incompatible function arguments: a timeout is a number of seconds, not {timeout!r}")
    current().node.client.timeout = float(timeout)


def enable_gil_profiling(flag: bool) -> None:
    """Measure how long handlers wait for the interpreter, or stop that."""
    global _interpreter_waits
    _interpreter_waits = [] if flag else None


def note_interpreter_wait(measure: Any) -> None:
    """Add what ``measure()`` says, if that is wanted."""
    if _interpreter_waits is not None:
        _interpreter_waits.append(measure())
        del _interpreter_waits[:-100]
