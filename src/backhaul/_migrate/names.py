"""Which name of torch becomes which name of Backhaul. Plain data; ``docs/migration.md`` says the same in a table."""

from __future__ import annotations

RPC = "torch.distributed.rpc"
AUTOGRAD = "torch.distributed.autograd"
OPTIMIZER = "torch.distributed.optim.DistributedOptimizer"
REMOTE_MODULE = "torch.distributed.nn.RemoteModule"

MODULES = (RPC, AUTOGRAD)
"""Every name of these modules is migrated or reported. Of other modules only the names in ``REPLACED`` are."""

_HOMES = {
    f"{RPC}.api": RPC,
    f"{RPC}.functions": RPC,
    f"{RPC}.options": RPC,
    f"{RPC}.constants": RPC,
    f"{RPC}.backend_registry": RPC,
    "torch.distributed.optim.optimizer": "torch.distributed.optim",
    "torch.distributed.nn.api.remote_module": "torch.distributed.nn",
}

SUBMODULES = frozenset(_HOMES)

REPLACED = {
    f"{RPC}.RRef": "RRef",
    f"{RPC}.PyRRef": "RRef",
    f"{RPC}.WorkerInfo": "WorkerInfo",
    f"{RPC}.get_worker_info": "get_worker_info",
    f"{RPC}.rpc_sync": "rpc_sync",
    f"{RPC}.rpc_async": "rpc_async",
    f"{RPC}.remote": "remote",
    f"{RPC}.async_execution": "async_execution",
    f"{RPC}.init_rpc": "init",
    f"{RPC}.shutdown": "serve",
    f"{RPC}.TensorPipeRpcBackendOptions": "Options",
    f"{RPC}.RpcBackendOptions": "Options",
    f"{AUTOGRAD}.context": "context",
    f"{AUTOGRAD}.backward": "backward",
    f"{AUTOGRAD}.get_gradients": "get_gradients",
    OPTIMIZER: "optim.DistributedOptimizer",
    REMOTE_MODULE: "nn.RemoteModule",
}
"""The name of torch -> the name below ``backhaul``."""

INIT = f"{RPC}.init_rpc"
SHUTDOWN = f"{RPC}.shutdown"
OPTIONS = (f"{RPC}.TensorPipeRpcBackendOptions", f"{RPC}.RpcBackendOptions")
CALLS = (f"{RPC}.rpc_sync", f"{RPC}.rpc_async", f"{RPC}.remote")

RENAMED = (INIT, SHUTDOWN, *OPTIONS)
"""Calls of these change, so they are written with the module's name and not imported from it."""

EXPRESSIONS = {
    f"{RPC}.UNSET_RPC_TIMEOUT": "None",
    f"{RPC}.DEFAULT_RPC_TIMEOUT_SEC": "{bh}.Options().timeout",
    f"{RPC}.DEFAULT_NUM_WORKER_THREADS": "{bh}.Options().threads",
}
"""Constants, and the expressions that take their place."""

QUERIES = {
    f"{RPC}.get_rpc_timeout": "{bh}.current_worker().options.timeout",
    f"{RPC}.is_available": "True",
    f"{AUTOGRAD}.is_available": "True",
}
"""Functions without arguments, and the expressions that take the place of their calls."""

OPTION_NAMES = {"num_worker_threads": "threads", "rpc_timeout": "timeout", "init_method": "init_method"}
"""The options that have another name. ``device_maps`` belongs to a group and is handled apart."""

_ONE_BACKEND = "Backhaul has one backend and no registry of backends"
_INTERNAL = "it is internal to torch.distributed.rpc"

LEFT = {
    f"{RPC}.BackendType": _ONE_BACKEND,
    f"{RPC}.backend_registry": _ONE_BACKEND,
    f"{RPC}.backend_registered": _ONE_BACKEND,
    f"{RPC}.register_backend": _ONE_BACKEND,
    f"{RPC}.construct_rpc_backend_options": _ONE_BACKEND,
    f"{RPC}.init_backend": _ONE_BACKEND,
    f"{RPC}.BackendValue": _ONE_BACKEND,
    f"{RPC}.RpcAgent": _INTERNAL,
    f"{RPC}.TensorPipeAgent": _INTERNAL,
    f"{RPC}.AllGatherStates": _INTERNAL,
    f"{RPC}.method_factory": _INTERNAL,
    f"{RPC}.new_method": _INTERNAL,
    f"{RPC}.internal": _INTERNAL,
    f"{RPC}.enable_gil_profiling": "use bh.profile, which shows where time goes",
    f"{RPC}.RemoteProfilerManager": "use bh.profile, which records all workers",
    f"{RPC}.server_process_global_profiler": "use bh.profile, which records all workers",
    f"{AUTOGRAD}.DistAutogradContext": "use what `with bh.context() as ctx` gives",
}
"""Names without a replacement that the codemod could write, and why."""


def canonical(name: str) -> str:
    """The name under which this module knows a dotted name of torch: ``rpc.api.rpc_sync`` is ``rpc.rpc_sync``."""
    home, _, last = name.rpartition(".")
    return f"{_HOMES[home]}.{last}" if home in _HOMES else name


def is_tracked(name: str) -> bool:
    """Whether a dotted name is one that the codemod has to migrate or to report."""
    name = canonical(name)
    return name in REPLACED or any(name == module or name.startswith(f"{module}.") for module in MODULES)


def reason_for(name: str) -> str:
    """Why a tracked name stays as it is."""
    name = canonical(name)
    if name in MODULES or name in SUBMODULES:
        return "the module is used as a value; write out the names that are used"
    return LEFT.get(name, "Backhaul has no such name")
