"""Training with remote parameters as a whole: how many calls it makes, threads, lost workers, processes, frameworks."""

from __future__ import annotations

import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn, optim
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import backhaul as bh
from backhaul.nn import RemoteModule

from .modules import batch, seeded


def pair() -> tuple[nn.Module, nn.Module]:
    """A model with two modules on one worker and one on another, and the same model in one process."""
    there = nn.Sequential(
        *(RemoteModule("worker1", layer, (seed,)) for seed in (1, 2)), RemoteModule("worker2", seeded, (3,))
    )
    return there, nn.Sequential(layer(1), layer(2), seeded(3))


def layer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 4).double()


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 3) -> None:
    for seed in range(steps):
        optimizer.zero_grad()
        model(batch(seed)).pow(2).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class Counter:
    """Counts the calls that two workers have served since it was asked last."""

    def __init__(self, workers: list[bh.Worker]) -> None:
        self._workers = workers[1:]
        self._before = self._now()

    def _now(self) -> list[int]:
        return [worker.counters["num_calls_served"]() for worker in self._workers]

    def new(self) -> list[int]:
        before, self._before = self._before, self._now()
        return [now - then for now, then in zip(self._before, before, strict=True)]


def test_one_call_for_each_owner_and_operation(workers: list[bh.Worker]) -> None:
    there, _ = pair()
    calls = Counter(workers)
    optimizer = optim.AdamW(there.parameters(), lr=0.1)
    assert sum(each.numel() for each in there.parameters()) > 0
    assert calls.new() == [0, 0]
    for step in range(3):
        optimizer.zero_grad()
        assert calls.new() == [0, 0]
        loss = there(batch()).sum()
        assert calls.new() == [2, 1]  # the forward of each module carries what zero_grad has changed
        loss.backward()
        assert calls.new() == [0, 0]  # gradients are no calls
        clip_grad_norm_(there.parameters(), 0.1)
        assert calls.new() == [3, 3]  # which gradients there are, their norms, scaling
        clip_grad_value_(there.parameters(), 0.1)
        assert calls.new() == [2, 2]
        optimizer.step()
        assert calls.new() == ([1, 1] if step else [2, 2])  # the first makes the optimizers there
    optimizer.zero_grad(set_to_none=False)
    there.requires_grad_(False)
    assert calls.new() == [0, 0]
    assert there[0].weight.grad.sum() == 0
    assert calls.new() == [2, 1]
    optimizer.state_dict()
    assert calls.new() == [1, 1]
    scaler = torch.amp.GradScaler("cpu")
    there.requires_grad_(True)
    scaler.scale(there(batch()).sum()).backward()
    calls.new()
    scaler.unscale_(optimizer)
    assert calls.new() == [2, 2]
    ema = optim.swa_utils.AveragedModel(there, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn())
    ema.update_parameters(there)
    calls.new()
    ema.module.zero_grad()
    with torch.no_grad():
        torch._foreach_lerp_(list(ema.parameters()), list(there.parameters()), 0.1)
    assert calls.new()[0] <= 2


def test_two_threads_train_two_models(workers: list[bh.Worker]) -> None:
    pairs = [pair() for _ in range(2)]
    errors: list[BaseException] = []

    def run(there: nn.Module, rate: float) -> None:
        try:
            with workers[0]:
                train(there, optim.AdamW(there.parameters(), lr=rate), 8)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(there, rate)) for (there, _), rate in zip(pairs, (0.1, 0.01), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for (there, here), rate in zip(pairs, (0.1, 0.01), strict=True):
        train(here, optim.AdamW(here.parameters(), lr=rate), 8)
        assert_same(there.state_dict(), here.state_dict())


def test_a_lost_owner() -> None:
    with bh.cluster(3) as workers:
        there, here = pair()
        optimizer = optim.SGD(there.parameters(), lr=0.1)
        for model in (there, here):
            model(batch()).pow(2).sum().backward()
        workers[2].close()
        with pytest.raises(bh.errors.BackhaulError) as caught:
            optimizer.step()
        assert any("worker2" in note for note in caught.value.__notes__)
        optim.SGD(here.parameters(), lr=0.1).step()
        assert_same(there[0].state_dict(), here[0].state_dict())  # the other owner has stepped
        for model in (there, here):
            for parameter in model.parameters():
                parameter.grad = None  # what the lost owner does not hear harms no other
            model[:2](batch()).sum().backward()
        assert_same(there[0].weight.grad.to_here(), here[0].weight.grad)
        lost = next(iter(there[2].parameters()))
        assert "not reachable" in repr(lost)
        with pytest.raises(bh.errors.BackhaulError):
            lost.to_here()
        del there, optimizer, lost, caught


def test_errors_of_an_operation_name_the_worker(workers: list[bh.Worker]) -> None:
    there, _ = pair()
    weight = there[0].weight
    with torch.no_grad(), pytest.raises(RuntimeError) as caught:
        weight @ weight[:3]
    assert any("worker1" in note and "aten" in note for note in caught.value.__notes__)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="shape"):
        weight.t_()
    del caught


def in_processes() -> list[bool]:
    there, here = pair()
    found = []
    for model in (there, here):
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer)
        saved = optimizer.state_dict()
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        optimizer.load_state_dict(saved)
        train(model, optimizer)
    wanted = here.state_dict()
    for name, value in there.state_dict().items():
        found.append(torch.equal(value, wanted[name]))
    return found


def only_first() -> list[bool]:
    return in_processes() if bh.get_worker_info().name == "worker0" else []


def test_over_processes() -> None:
    found, *_ = bh.launch(only_first, 3, timeout=100, start_method="forkserver")
    assert found == [True] * len(found)
    assert found


# What frameworks do.


def test_checkpoints(workers: list[bh.Worker]) -> None:
    there, here = pair()
    optimizers = [optim.AdamW(model.parameters(), lr=0.01) for model in (there, here)]
    for model, optimizer in zip((there, here), optimizers, strict=True):
        train(model, optimizer)
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_state, optimizer_state = get_state_dict(there, optimizers[0])
        wanted_model, wanted_optimizer = get_state_dict(here, optimizers[1])
        assert_same(model_state, wanted_model)
        assert_same(optimizer_state["state"], wanted_optimizer["state"])
        saved = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.save(saved, checkpoint_id=directory, no_dist=True)
        again, _ = pair()
        fresh = optim.AdamW(again.parameters(), lr=0.5)
        loaded = dict(zip(("model", "optimizer"), get_state_dict(again, fresh), strict=True))
        checkpoint.load(loaded, checkpoint_id=directory, no_dist=True)
        set_state_dict(again, fresh, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for model, optimizer in zip((again, here), (fresh, optimizers[1]), strict=True):
        train(model, optimizer)
    assert_same(again.state_dict(), here.state_dict())


def test_statistics_of_batch_normalization(workers: list[bh.Worker]) -> None:
    there, here = pair()
    for model in (there, here):
        model(batch(7))
        optim.swa_utils.update_bn([batch(seed) for seed in range(3)], model)
    assert_same(there.state_dict(), here.state_dict())


def test_ddp_leaves_them_alone(workers: list[bh.Worker], tmp_path: Path) -> None:
    there, here = [nn.Sequential(layer(0), model) for model in pair()]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(there)
        for model in (wrapped, here):
            train(model, optim.SGD(model.parameters(), lr=0.1))
        assert_same(there.state_dict(), here.state_dict())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.may_leak  # meshes keep their process groups
def test_fully_shard_leaves_them_alone(workers: list[bh.Worker], tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard  # takes long to import

    there, here = pair()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        before = list(there.parameters())
        fully_shard(nn.Sequential(layer(0), there))
        assert all(one is other for one, other in zip(before, there.parameters(), strict=True))
        for model in (there, here):
            model(batch()).pow(2).sum().backward()
        for found, wanted in zip(there.parameters(), here.parameters(), strict=True):
            assert_same(found.grad.to_here(), wanted.grad)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.may_leak  # meshes keep their process groups
@pytest.mark.parametrize("foreach", [None, False])
def test_sharded_gradients_are_not_clipped_together_with_remote_ones(
    workers: list[bh.Worker], tmp_path: Path, foreach: bool | None
) -> None:
    from torch.distributed.fsdp import fully_shard  # takes long to import

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        there, _ = pair()
        here = layer(0)
        fully_shard(here)
        nn.Sequential(here, there)(batch()).pow(2).sum().backward()
        remote, sharded = list(there.parameters()), list(here.parameters())
        before = [each.grad.to_here().clone() for each in remote]
        for parameters in ([*sharded, *remote], [*remote, *sharded]):
            for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
                with pytest.raises(NotImplementedError, match="worker"):
                    clip(parameters, 0.01, foreach=foreach)
        for parameter, wanted in zip(remote, before, strict=True):
            assert torch.equal(parameter.grad.to_here(), wanted)
        nn.utils.clip_grad_norm_(remote, 0.01, foreach=foreach)  # apart
        nn.utils.clip_grad_norm_(sharded, 0.01, foreach=foreach)
    finally:
        torch.distributed.destroy_process_group()


def test_compiled_models(workers: list[bh.Worker]) -> None:
    there, here = [nn.Sequential(layer(0), model) for model in pair()]
    for model in (there, here):
        compiled = torch.compile(model, backend="eager")
        train(compiled, optim.SGD(compiled.parameters(), lr=0.1))
    assert_same(there.state_dict(), here.state_dict())


@pytest.mark.filterwarnings("default")  # warnings of the compiler are not ours
def test_a_compiled_step(workers: list[bh.Worker]) -> None:
    """Forward, backward and the optimizer's step in one compiled function: it breaks where other workers take part."""
    there, here = [nn.Sequential(layer(0), model) for model in pair()]
    for model in (there, here):
        optimizer = optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, model: nn.Module = model, optimizer: optim.Optimizer = optimizer) -> None:
            model(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        compiled = torch.compile(step, backend="eager")
        for seed in range(3):
            compiled(batch(seed))
    assert_same(there.state_dict(), here.state_dict())
