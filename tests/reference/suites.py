"""The reference's test classes, each with the fixture that its tests expect, made to run against Backhaul.

Imported by the process that runs a test and, through the fork server, by the workers that the test starts; so Backhaul
is in place in all of them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import unittest
from typing import Any

from tests.reference import substitute

substitute.install()

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


class _Spawner(common_distributed.MultiProcessTestCase):
    """Starts a test's workers: forked from a server that has torch and the suites loaded already."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def tearDown(self) -> None:
        super().tearDown()
        if os.path.exists(self.file_name):
            os.unlink(self.file_name)

    def _spawn_processes(self) -> None:
        multiprocessing.set_forkserver_preload([__name__])
        self._start_processes(multiprocessing.get_context("forkserver").Process)


def _make(suite: str, module: str) -> type[unittest.TestCase]:
    faulty = "Faulty" in suite
    fixture = "FaultyRpcAgentTestFixture" if faulty else "TensorPipeRpcAgentTestFixture"
    place = "faulty_rpc_agent_test_fixture" if faulty else "tensorpipe_rpc_agent_test_fixture"
    bases: Any = (
        getattr(importlib.import_module(module), suite),
        getattr(importlib.import_module(_RPC + place), fixture),
        _Spawner,
    )
    made = type(suite, bases, {"__module__": __name__})
    globals()[suite] = made  # workers find the class by its name
    return made


def _make_all() -> dict[str, type[unittest.TestCase]]:
    return {suite: _make(suite, module) for suite, module in SUITES.items()}


CLASSES = _make_all()


def names() -> list[str]:
    """All tests, as ``Suite.test``."""
    load = unittest.TestLoader().getTestCaseNames
    return [f"{suite}.{test}" for suite, made in CLASSES.items() for test in load(made)]
