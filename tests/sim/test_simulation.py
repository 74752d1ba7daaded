"""Random steps under random faults: some seeds pass, and a seed always gives the same run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import backhaul as bh
from backhaul._sim.cluster import SimCluster
from backhaul._sim.faults import FAULTS
from tools.simulation.command import main
from tools.simulation.one_seed import SimulationSetting
from tools.simulation.run import run_seed

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


@pytest.mark.parametrize("seed", range(12))
def test_a_seed(seed: int) -> None:
    verdict = run_seed(SimulationSetting(seed, workers=5, steps=8))
    assert verdict.problems == []
    assert verdict.outcomes.total() == 8


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kind_of_fault(fault: str) -> None:
    kinds = (fault, "crash") if fault == "restart" else (fault,)
    struck = 0
    for seed in range(100):
        if not struck:
            verdict = run_seed(SimulationSetting(seed, workers=5, steps=4, faults=kinds))
            assert verdict.problems == []
            struck += verdict.faults[fault]
    assert struck


def test_every_step_is_right_where_nothing_goes_wrong() -> None:
    verdict = run_seed(SimulationSetting(3, workers=6, steps=10, faults=()))
    assert verdict.problems == []
    outcomes = verdict.outcomes
    assert outcomes["right"] + outcomes["right, with replay"] + outcomes["plain right"] == 10
    assert outcomes["plain right"]


@pytest.mark.parametrize("seed", [1, 4, 6])
def test_a_seed_is_one_run(seed: int) -> None:
    first, second = (run_seed(SimulationSetting(seed, workers=5, steps=6, keep_trace=True)) for _ in range(2))
    differing = [pair for pair in zip(first.trace, second.trace, strict=False) if pair[0] != pair[1]]
    assert not differing[:1]
    assert first.digest == second.digest


def test_a_seed_is_one_run_in_every_process() -> None:
    """Hashes of strings and addresses of objects differ between processes.

    Both are new processes: hooks that a process has registered before, on any tensor, change what a worker does.
    """
    program = "from tools.simulation.run import *; print(run_seed(SimulationSetting(6, workers=5, steps=5)).digest)"
    first, second = (
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in "12"
    )
    assert first
    assert first == second


def test_the_command_says_how_to_run_a_failure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(trial: object, enter: object) -> list[str]:
        return ["all of it"]

    monkeypatch.setattr("tools.simulation.run.run_step", wrong)
    lines: list[str] = []
    assert main(["--seeds", "4:6", "--workers", "3", "--steps", "2", "--faults", "none"], lines.append) == 1
    assert lines[-1] == ("failed: python -m tools.simulation --seeds 5 --workers 3 --steps 2 --faults 'none'")


def pass_on(x: torch.Tensor, path: list[int]) -> torch.Tensor:
    return bh.rpc_sync(path[0], pass_on, args=(x * 2, path[1:])) if path else x


def spread(x: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """A tree of calls over the workers from ``first`` on."""
    if count <= 1:
        return x * 2
    half = count // 2
    parts = [
        bh.rpc_async(first, spread, args=(x, first, half)),
        bh.rpc_async(first + half, spread, args=(x, first + half, count - half)),
    ]
    return sum(part.wait() for part in parts) * 1


def test_five_hundred_workers() -> None:
    """A ring of calls and a tree of calls."""
    workers = 500
    with SimCluster(workers, seed=1, options=bh.Options(timeout=600.0)) as cluster:

        def ring() -> list[float]:
            x = torch.ones(1, dtype=torch.float64, requires_grad=True)
            with bh.context() as ctx:
                y = x * 1
                for begin in range(1, workers, 25):
                    y = bh.rpc_sync(begin, pass_on, args=(y / 2**24, list(range(begin + 1, min(begin + 25, workers)))))
                ctx.backward(y.sum())
                return ctx.grads[x].tolist()

        def tree() -> list[float]:
            x = torch.ones(1, requires_grad=True)
            with bh.context() as ctx:
                ctx.backward(spread(x, 0, workers).sum())
                return ctx.grads[x].tolist()

        assert cluster.run("worker0", ring).result() == [0.5]  # the last part of the ring has one worker less
        assert cluster.run("worker7", tree).result() == [2.0 * workers]
        cluster.sleep(1.0)
        assert not cluster.leftovers()
