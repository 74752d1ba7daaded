"""The reference's test classes, each with the fixture that its tests expect, made to run against Backhaul.

Imported by the process that runs a test and, through the fork server, by the workers that the test starts; so Backhaul
is in place in all of them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import unittest
from collections.abc import Callable, Iterable
from typing import Any

import torch

from backhaul.compat import _conform
from tests.reference import substitute

substitute.install()
_conform.before_suites()

from torch.testing._internal import common_distributed  # noqa: E402

_HOME = "torch.testing._internal.distributed."
_RPC = _HOME + "rpc."

SUITES = {
    "RpcTest": _RPC + "rpc_test",
    "TensorPipeAgentRpcTest": _RPC + "rpc_test",
    "DistAutogradTest": _RPC + "dist_autograd_test",
    "TensorPipeAgentDistAutogradTest": _RPC + "dist_autograd_test",
    "DistOptimizerTest": _RPC + "dist_optimizer_test",
    "ParameterServerTest": _RPC + "examples.parameter_server_test",
    "ReinforcementLearningRpcTest": _RPC + "examples.reinforcement_learning_rpc_test",
    "RemoteModuleTest": _HOME + "nn.api.remote_module_test",
    "ThreeWorkersRemoteModuleTest": _HOME + "nn.api.remote_module_test",
    "DdpUnderDistAutogradTest": _HOME + "ddp_under_dist_autograd_test",
    "DdpComparisonTest": _HOME + "ddp_under_dist_autograd_test",
    "JitRpcTest": _RPC + "jit.rpc_test",
    "JitDistAutogradTest": _RPC + "jit.dist_autograd_test",
    "FaultyAgentRpcTest": _RPC + "faulty_agent_rpc_test",
    "FaultyAgentDistAutogradTest": _RPC + "dist_autograd_test",
    "JitFaultyAgentRpcTest": _RPC + "jit.rpc_test_faulty",
}
CUDA = {
    "TensorPipeAgentCudaRpcTest": _RPC + "rpc_test",
    "CudaRpcTest": _RPC + "rpc_test",
    "CudaDistAutogradTest": _RPC + "dist_autograd_test",
    "TensorPipeCudaDistAutogradTest": _RPC + "dist_autograd_test",
    "CudaRemoteModuleTest": _HOME + "nn.api.remote_module_test",
    "CudaDdpComparisonTest": _HOME + "ddp_under_dist_autograd_test",
}
"""Those that are for devices. Other versions of torch may not have all of them."""


class _Spawner(common_distributed.MultiProcessTestCase):
    """Starts a test's workers: forked from a server that has torch and the suites loaded already, or anew if they use
    devices, of which a process that forks must know nothing.
    """

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def tearDown(self) -> None:
        super().tearDown()
        if os.path.exists(self.file_name):
            os.unlink(self.file_name)

    def _spawn_processes(self) -> None:
        multiprocessing.set_forkserver_preload(["backhaul._public", __name__])
        way = "spawn" if type(self).__name__ in CUDA else "forkserver"
        self._start_processes(multiprocessing.get_context(way).Process)


def _make(suite: str, module: str) -> type[unittest.TestCase] | None:
    tests = getattr(importlib.import_module(module), suite, None)
    if tests is None:
        return None
    faulty = "Faulty" in suite
    fixture = "FaultyRpcAgentTestFixture" if faulty else "TensorPipeRpcAgentTestFixture"
    place = "faulty_rpc_agent_test_fixture" if faulty else "tensorpipe_rpc_agent_test_fixture"
    bases: Any = (
        tests,
        getattr(importlib.import_module(_RPC + place), fixture),
        _Spawner,
    )
    made = type(suite, bases, {"__module__": __name__})
    globals()[suite] = made  # workers find the class by its name
    return made


def _make_all() -> dict[str, type[unittest.TestCase]]:
    made = {suite: _make(suite, module) for suite, module in (SUITES | CUDA).items()}
    return {suite: found for suite, found in made.items() if found is not None}


CLASSES = _make_all()


def names(suites: Iterable[str]) -> list[str]:
    """All tests of these suites, as ``Suite.test``."""
    load = unittest.TestLoader().getTestCaseNames
    return [f"{suite}.{test}" for suite in suites if suite in CLASSES for test in load(CLASSES[suite])]


def lacking(suite: str, test: str) -> str:
    """What of devices a test needs that is not here; it would find out too, in each of its processes."""
    wanted, there = _devices_for(getattr(CLASSES[suite], test)), torch.cuda.device_count()
    return f"needs {wanted} CUDA devices, of which there are {there}" if wanted > there else ""


def _devices_for(test: Callable[..., Any] | None) -> int:
    """What the suites' own decorator was given; 0 if it is not there."""
    while test is not None:
        code = getattr(test, "__code__", None)
        if code is not None and code.co_qualname.startswith("skip_if_lt_x_gpu.") and "x" in code.co_freevars:
            return int(test.__closure__[code.co_freevars.index("x")].cell_contents)  # type: ignore[attr-defined]
        test = getattr(test, "__wrapped__", None)
    return 0
