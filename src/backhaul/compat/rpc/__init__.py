"""Replaces ``torch.distributed.rpc``: calls between workers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import numbers
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, _create_store_from_options, rendezvous  # type: ignore[attr-defined]

from backhaul._rpc.cluster.rendezvous import store_at
from backhaul.compat import autograd as _autograd
from backhaul.compat import errors
from backhaul.compat.rpc import api, backend_registry, constants, functions, internal, options, rref
from backhaul.compat.rpc.agent import RpcAgent, TensorPipeAgent, enable_gil_profiling, get_rpc_timeout
from backhaul.compat.rpc.agent import current as _get_current_rpc_agent
from backhaul.compat.rpc.agent import is_set as _is_current_rpc_agent_set
from backhaul.compat.rpc.agent import set_rpc_timeout as _set_rpc_timeout  # noqa: F401 (for the reference's tests)
from backhaul.compat.rpc.api import get_worker_info, remote, rpc_async, rpc_sync, shutdown
from backhaul.compat.rpc.backend_registry import BackendType
from backhaul.compat.rpc.info import WorkerInfo
from backhaul.compat.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from backhaul.compat.rpc.profiling import _server_process_global_profile  # noqa: F401 (for the reference's tests)
from backhaul.compat.rpc.rref import RRef

__all__ = [
    "BackendType",
    "PyRRef",
    "RRef",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "api",
    "backend_registry",
    "constants",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "internal",
    "is_available",
    "options",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

PyRRef = RRef

with contextlib.suppress(ImportError):  # newer Pythons have no TorchScript
    from backhaul.compat.rpc.script import _disable_jit_rref_pickle, _enable_jit_rref_pickle  # noqa: F401

logger = logging.getLogger("backhaul")

_group_numbers = itertools.count()
_open_rendezvous: Any = None  # kept because the server of the store may end with this object


def is_available() -> bool:
    """Whether RPC is available: always."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process a worker and wait until all workers have joined.

    Args:
        name: A name that no other worker has.
        backend: A member of ``BackendType``. By default it is inferred from the options, or else Backhaul.
        rank: The number of this worker.
        world_size: How many workers there are. Without it, workers can join and leave at any time.
        rpc_backend_options: The options of the backend.
    """
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _backend_for(rpc_backend_options)
    chosen: Any = rpc_backend_options or backend_registry.construct_rpc_backend_options(backend)
    store = _open_store(chosen, rank, world_size)
    store.set_timeout(timedelta(seconds=chosen.rpc_timeout or constants.DEFAULT_RPC_TIMEOUT_SEC))
    store = PrefixStore(f"rpc_prefix_{next(_group_numbers)}", store)
    _autograd._init(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, chosen)


def _backend_for(rpc_backend_options: RpcBackendOptions | None) -> Any:
    if rpc_backend_options is None:
        return backend_registry.BackendType.TENSORPIPE
    for backend in backend_registry.BackendType:
        if isinstance(rpc_backend_options, type(backend_registry.construct_rpc_backend_options(backend))):
            return backend
    raise TypeError(f"Could not infer backend for options {rpc_backend_options}")


def _open_store(rpc_backend_options: Any, rank: int, world_size: int | None) -> Any:
    global _open_rendezvous
    if not world_size:
        return _create_store_from_options(rpc_backend_options, rank)
    init_method = rpc_backend_options.init_method
    if rank >= 0:
        with errors.rewording():
            _open_rendezvous = store_at(init_method, rank, world_size, constants.RENDEZVOUS_TIMEOUT)
        return _open_rendezvous
    _open_rendezvous = rendezvous(init_method, rank=rank, world_size=world_size)  # init_method may contain the rank
    return next(_open_rendezvous)[0]


def _init_rpc_backend(  # noqa: PLR0917 (the reference's signature)
    backend: Any = None,
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Start a backend and make its agent the current one."""
    if not isinstance(name, str) or not isinstance(rank, numbers.Integral):
        raise RuntimeError(f"Argument name must be a str and rank an int, got {name!r} and {rank!r}")
    if _is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._init_rpc_states(agent)


def _rref_context_get_debug_info() -> dict[str, str]:
    """Counters of RRefs, under the reference's names."""
    return {name: str(count) for name, count in rref.counters().items()}


@api._require_initialized
def _get_debug_info() -> dict[str, str]:
    """All counters."""
    agent = _get_current_rpc_agent()
    return {**_rref_context_get_debug_info(), **agent.get_debug_info(), **_autograd._get_debug_info()}
