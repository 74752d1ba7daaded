"""State is gathered from owners and scattered to them: saved, loaded elsewhere, it goes on to the last bit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

import backhaul as bh

from .training import ELSEWHERE, WORKERS, Far, Plain, batches, same, train

DistributedOptimizer = bh.optim.DistributedOptimizer
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


@pytest.mark.parametrize("kind", KINDS)
@alone
def test_goes_on_from_a_checkpoint_with_fresh_workers(kind: str, tmp_path: Path) -> None:
    make, options = KINDS[kind]
    data = batches(6)
    plain = Plain()
    expected = make(plain.two_groups(), **options)
    train(plain, expected, data, torch.optim.lr_scheduler.StepLR(expected, 2))

    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(make, far.two_groups(), **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        train(far, optimizer, data[:3], scheduler)
        saved = {"model": far.values(), "optimizer": optimizer, "scheduler": scheduler}
        checkpoint.save(saved, checkpoint_id=tmp_path)

    with bh.cluster(WORKERS):
        saved = bh.optim.read_checkpoint(tmp_path)
        far = Far(saved["model"], ELSEWHERE)
        optimizer = DistributedOptimizer(make, far.two_groups(), **options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        train(far, optimizer, data[3:], scheduler)
        same(far.values(), plain.values())
        same(optimizer.state_dict(), expected.state_dict())


@alone
def test_a_checkpoint_fills_a_state_that_is_there(tmp_path: Path) -> None:
    """With torch's own ``load``: of all parameters that have been stepped."""
    data = batches(4)
    plain = Plain()
    expected = torch.optim.Adam(stepped(plain), lr=0.05)
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.Adam, stepped(far), lr=0.05)
        for model, either in ((plain, expected), (far, optimizer)):
            train(model, either, data[:2])
        checkpoint.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
        wanted = optimizer.state_dict()
        train(far, optimizer, data[2:])
        checkpoint.load({"optimizer": optimizer}, checkpoint_id=tmp_path)
        same(optimizer.state_dict(), wanted)
        same(optimizer.state_dict(), expected.state_dict())


def stepped(model: Any) -> list[Any]:
    return [param for name, param in model.params.items() if name not in ("idle", "spare")]


@alone
def test_a_checkpoint_of_anything(tmp_path: Path) -> None:
    saved = {"a": {"b": [{"c": torch.ones(2)}, {"c": (1, 2)}], "d": {"x": 1}}, "e": [], "f": 0.5}
    checkpoint.save(saved, checkpoint_id=tmp_path)
    same(bh.optim.read_checkpoint(tmp_path), saved)


def test_a_fresh_optimizer_and_its_checkpoint(tmp_path: Path) -> None:
    with bh.cluster(WORKERS):
        optimizer = DistributedOptimizer(torch.optim.Adam, Far().two_groups(), lr=0.05)
        state = optimizer.state_dict()
        del state["state"]
        optimizer.load_state_dict(state)
        assert optimizer.state_dict()["state"] == {}


def test_states_are_those_of_a_plain_optimizer() -> None:
    """So they can be exchanged, here through ``torch.save``, in both directions."""
    data = batches(6)
    plain = Plain()
    expected = torch.optim.AdamW(plain.two_groups(), lr=0.05)
    train(plain, expected, data[:2])
    with bh.cluster(WORKERS):
        far = Far(plain.values())
        optimizer = DistributedOptimizer(torch.optim.AdamW, far.two_groups(), lr=0.3)
        optimizer.load_state_dict(through_a_file(expected.state_dict()))
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.5]
        train(far, optimizer, data[2:4])
        train(plain, expected, data[2:4])
        same(far.values(), plain.values())
        second = Plain(far.values())
        other = torch.optim.AdamW(second.two_groups())
        other.load_state_dict(through_a_file(optimizer.state_dict()))
        train(second, other, data[4:])
        train(plain, expected, data[4:])
        same(second.values(), plain.values())


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def test_a_state_is_a_copy() -> None:
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.Adam, far.groups(), lr=0.05)
        train(far, optimizer, batches(1))
        state, wanted = optimizer.state_dict(), optimizer.state_dict()
        for entry in state["state"].values():
            entry["exp_avg"].fill_(7.0)
        same(optimizer.state_dict(), wanted)
        optimizer.load_state_dict(wanted)
        for entry in wanted["state"].values():
            entry["exp_avg"].fill_(7.0)
        assert not any((entry["exp_avg"] == 7.0).any() for entry in optimizer.state_dict()["state"].values())


def test_a_state_of_other_groups_is_refused() -> None:
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.Adam, far.two_groups(), lr=0.05)
        train(far, optimizer, batches(1))
        before = optimizer.state_dict()
        other = DistributedOptimizer(torch.optim.Adam, far.groups(), lr=0.7).state_dict()
        with pytest.raises(ValueError, match="groups"):
            optimizer.load_state_dict(other)
        same(optimizer.state_dict(), before)
