"""Processes that are killed while steps are made with ``retry_step``: a sample of ``make kills ARGS=--retry-steps``."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import backhaul as bh
from backhaul._wire.callables import resolve
from tools.fleet import Fleet
from tools.retried_training import TrainingPlan, train, train_plainly
from tools.retry_kills import run_retry_kills, table_of
from tools.retry_triggers import RESTORE_STAGES, RETRY_STAGES, arm_retry
from tools.simulation.command import main

PATIENCE = 60.0


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(2, bh.Options(timeout=PATIENCE)) as made:
        yield made


def test_functions_that_stages_look_for_in_frames_exist() -> None:
    stages = [*RETRY_STAGES.values(), *RESTORE_STAGES.values()]
    texts = [text.decode() for stage in stages for text in getattr(stage, "args", ()) if isinstance(text, bytes)]
    functions = [text for text in texts if text.startswith("backhaul.")]
    assert len(functions) == 3
    assert all(callable(resolve(function)) for function in functions)


@pytest.mark.parametrize("stage", ["middle of the update", "update ends", "snapshot made"])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_process_that_is_killed(fleet: Fleet, stage: str, distributed: bool) -> None:
    """One owner has made the update, or a half of it. The other has made it, or not."""
    plan = TrainingPlan(5, ("worker1", "worker2"), 3, optimizer=2, distributed=distributed, context=distributed)
    with ThreadPoolExecutor(1) as thread:

        def before(number: int) -> None:
            if number == 1:
                bh.rpc_sync("worker2", arm_retry, (stage,))

        going = thread.submit(fleet.worker.run, lambda: train(plan, before=before, wait=PATIENCE))
        assert fleet.died("worker2", PATIENCE)
        fleet.remove("worker2")
        fleet.replace("worker2")
        assert going.result(PATIENCE).differences(train_plainly(plan)) == []


def restore() -> None:
    restored.append(bh.current_worker().incarnation)


def count_restored() -> int:
    return len(restored)


restored: list[str] = []


def test_no_process_takes_the_place_in_time(fleet: Fleet) -> None:
    """The step raises the error, and the next one begins with the state before it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    expected = [value.clone() for value in model.state_dict().values()]
    model = bh.nn.split(model, {"0": "worker1", "1": "worker2"})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(kill: bool) -> None:
        model(torch.ones(1, 2)).sum().backward()
        if kill:
            fleet.remove("worker2")
        optimizer.step()
        optimizer.zero_grad()

    def keep() -> list[torch.Tensor]:
        return list(model.state_dict().values())

    found = bh.retry_step(keep, (model, optimizer))
    assert all(map(torch.equal, found, expected))
    with pytest.raises(bh.PeerLostError, match="worker2") as caught:
        bh.retry_step(step, (model, optimizer), (True,), wait=0.2)
    notes = "\n".join(caught.value.__notes__)
    assert "the state could not be restored: PeerLostError" in notes
    assert "the state will be restored by the next retry_step()" in notes
    fleet.replace("worker2")
    found = bh.retry_step(keep, (model, optimizer), restore=restore)
    assert all(map(torch.equal, found, expected))
    assert [bh.rpc_sync(name, count_restored) for name in ("worker1", "worker2")] == [0, 1]
    bh.retry_step(step, (model, optimizer), (False,))
    assert not any(map(torch.equal, bh.retry_step(keep, (model, optimizer)), expected))


def test_snapshots_are_not_compressed() -> None:
    """Calls and gradients are. A step that is made again gives what it gives if it is made once."""
    codec = bh.Codec(forward="bf16", backward="bf16", where="always")
    weights = []
    with Fleet(1, bh.Options(timeout=PATIENCE, transport="tcp", compression=codec)):
        for tries in (1, 2):
            torch.manual_seed(0)
            model = bh.nn.split(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), {"0": "worker1"})
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            left = [tries] * 2

            def step(number: int) -> None:
                model(torch.randn(8, 64)).square().mean().backward()  # noqa: B023
                optimizer.step()  # noqa: B023
                left[number] -= 1  # noqa: B023
                if left[number]:  # noqa: B023
                    raise bh.PeerLostError("lost")
                optimizer.zero_grad()  # noqa: B023

            for number in range(2):
                bh.retry_step(step, (model, optimizer), (number,))
            weights.append(list(model.state_dict().values()))
    assert all(map(torch.equal, *weights))


@pytest.mark.timeout(240)
def test_a_sample_of_kills() -> None:
    verdict = run_retry_kills(3, 3, seed=4)
    assert verdict.problems == []
    assert verdict.killed.total() >= 3
    assert len(table_of(verdict)) == 3 + len(RETRY_STAGES) + len(RESTORE_STAGES) + 1


def test_a_sample_of_simulations() -> None:
    lines: list[str] = []
    assert main(["--retry-steps", "--seeds", "103:106", "--workers", "4", "--steps", "5"], lines.append) == 0
    assert "steps:  right 15" in lines
