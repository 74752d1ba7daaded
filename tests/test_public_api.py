"""The public API, frozen: adding or removing a name is a decision, so it changes this file too."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import backhaul as bh

NAMES = [
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

SIGNATURES = {
    "init": "(name, *, rank, world_size, store, join, options)",
    "shutdown": "(*, graceful, timeout, ignore_rref_leak)",
    "serve": "(*, timeout)",
    "leave": "(*, timeout)",
    "on_membership": "(callback)",
    "launch": "(function, workers, *, args, kwargs, options, timeout, start_method, torchrun_variables)",
    "expose": "(function, *, name, to)",
    "cluster": "(workers, *, options, endpoints)",
    "rpc_sync": "(to, func, args, kwargs, timeout, *, retry)",
    "rpc_async": "(to, func, args, kwargs, timeout, *, retry)",
    "remote": "(to, func, args, kwargs, timeout, *, retry)",
    "remote_op": "(fn, to, *, fake, timeout)",
    "retry_step": "(step, state, args, kwargs, *, attempts, wait, restore, snapshot_every)",
    "get_worker_info": "(name)",
    "context": "(*, replay)",
    "Replay": "(*, restore, timeout)",
    "backward": "(context, roots, *, grad_tensors, retain_graph, create_graph, inputs, mode, accumulate, "
    "deterministic, timeout)",
    "get_gradients": "(context)",
}


def shape(function: object) -> str:
    parts, starred = [], False
    for parameter in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        parts.append(parameter.name)
    return f"({', '.join(parts)})"


def test_names() -> None:
    assert sorted(bh.__all__) == NAMES


def test_signatures() -> None:
    assert {name: shape(getattr(bh, name)) for name in SIGNATURES} == SIGNATURES


def test_modules_on_other_workers() -> None:
    assert bh.nn.__all__ == ["RemoteModule", "gather", "split"]
    assert shape(bh.nn.split) == "(model, places, *, timeout)"
    assert shape(bh.nn.gather) == "(model, *, timeout)"


def test_optimizers_that_their_owners_keep() -> None:
    assert shape(bh.optim.expose) == "(optimizer, name, *, to)"
    assert shape(bh.optim.JointOptimizer) == "(exposed, own)"


def test_clusters_on_ray() -> None:
    assert bh.ray.__all__ == ["RayCluster", "join", "start"]
    assert shape(bh.ray.start) == (
        "(workers, *, resources, placement, driver, max_restarts, name, runtime_env, options)"
    )
    assert shape(bh.ray.join) == "(cluster, name, *, namespace)"


def run_program(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_import_loads_no_parts() -> None:
    """So it adds a millisecond to the import of torch; see ``benchmarks/import_time.py``."""
    loaded = run_program("import sys, backhaul\nprint(*sorted(name for name in sys.modules if 'backhaul' in name))")
    expected = "backhaul backhaul._rpc backhaul._rpc.before_nodes backhaul._torch_support backhaul.errors"
    assert loaded == [expected]


def test_names_are_there_when_they_are_asked_for() -> None:
    program = """
import backhaul as bh
print("init" in vars(bh), "init" in dir(bh), bh.nn.split.__name__, "init" in vars(bh))
from backhaul import *
from backhaul import optim
print(launch is bh.launch, optim is bh.optim, hasattr(bh, "no_such_name"), hasattr(bh, "_no_such_name"))
"""
    assert run_program(program) == ["False True split True", "True True False False"]


def test_threads_that_ask_first_at_the_same_time() -> None:
    program = """
import threading, backhaul as bh
barrier, found = threading.Barrier(8), []
def ask(name):
    barrier.wait(60)
    found.append(getattr(bh, name))
threads = [threading.Thread(target=ask, args=(name,)) for name in ("init", "nn", "RRef", "errors") * 2]
[thread.start() for thread in threads]
[thread.join(60) for thread in threads]
print(len(found), len(set(map(id, found))))
"""
    assert run_program(program) == ["8 4"]


def test_a_worker_has_all_parts_though_its_program_used_no_public_name() -> None:
    program = """
import torch
from torch.distributed import HashStore
from backhaul._rpc.api import init, rpc_sync
from backhaul._rpc.ending import shutdown
init("alone", rank=0, world_size=1, store=HashStore())
x = torch.ones(2, requires_grad=True)
rpc_sync("alone", torch.mul, args=(x, 3)).sum().backward()
import backhaul
print(x.grad.tolist(), "profile" in vars(backhaul))
shutdown()
"""
    assert run_program(program) == ["[3.0, 3.0] True"]


def test_every_public_thing_is_documented() -> None:
    for name in bh.__all__:
        assert name == "__version__" or inspect.getdoc(getattr(bh, name)), name


def test_the_version_is_that_of_the_distribution() -> None:
    assert bh.__version__ == importlib.metadata.version("backhaul")


def test_no_name_hides_a_module() -> None:
    """``backhaul.launch`` is a function, so there is no package of that name."""
    folder = Path(bh.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    hidden = {name for name in modules & set(bh.__all__) if not inspect.ismodule(getattr(bh, name))}
    assert not hidden
    public = {name for name in modules if not name.startswith("_")}
    assert public == {"compat", "errors", "jit", "nn", "optim", "otel", "profiler", "ray", "testing"}
