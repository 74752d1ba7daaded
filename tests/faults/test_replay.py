"""A process is killed in the middle of a step, another takes its place, and the step goes on."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import backhaul as bh
from tools.fleet import Fleet, die

PATIENCE = 60.0


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(2, bh.Options(timeout=PATIENCE)) as made:
        yield made


weights: list[torch.Tensor] = []


def load() -> None:
    weights[:] = [torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)]


def die_once(marker: str) -> None:
    """Ends this process, the first time that it is called."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    die()


def layer(x: torch.Tensor, stage: str, marker: str, onward: list[str]) -> torch.Tensor:
    if stage == "before":
        die_once(marker)
    y = torch.tanh(x * weights[0])
    if stage == "backward":
        y.register_hook(lambda _: die_once(marker))
    if onward:
        y = bh.rpc_sync(onward[0], layer, args=(y, "", marker, onward[1:])) * y
    if stage == "after":
        die_once(marker)
    return y


def own_gradient(ctx: int) -> torch.Tensor:
    return bh.get_gradients(ctx)[weights[0]]


def step(stage: str, marker: str) -> list[torch.Tensor]:
    for name in ("worker1", "worker2"):
        bh.rpc_sync(name, load)
    x = torch.tensor([0.5, 0.25], dtype=torch.float64, requires_grad=True)
    with bh.context(replay=bh.Replay(restore=load, timeout=PATIENCE)) as ctx:
        y = bh.rpc_sync("worker1", layer, args=(x, "", marker, ["worker2"]))
        y = bh.rpc_sync("worker2", layer, args=(y, stage, marker, ["worker1"]))
        y = bh.rpc_sync("worker1", layer, args=(y, "", marker, []))
        ctx.backward(y.sum(), deterministic=True, timeout=PATIENCE)
        with torch.no_grad():
            return [ctx.grads[x], *(bh.rpc_sync(name, own_gradient, args=(ctx.id,)) for name in ("worker1", "worker2"))]


@pytest.mark.parametrize("stage", ["before", "after", "backward"])
def test_a_process_that_is_killed(fleet: Fleet, tmp_path: pathlib.Path, stage: str) -> None:
    expected = step("", "")
    with ThreadPoolExecutor(1) as thread:
        going = thread.submit(fleet.worker.run, step, stage, str(tmp_path / "died"))
        assert fleet.died("worker2", PATIENCE)
        fleet.remove("worker2")
        fleet.replace("worker2")
        found = going.result(PATIENCE)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(step("", "")) == 3
    assert not fleet.leftovers(timeout=30.0)
