"""Optimizers that untrusting owners expose: the steps are torch's own, and nobody else can make them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import backhaul as bh

from ..cluster.mixed import mixed_cluster

TRUSTING = bh.Options(shutdown_timeout=10, timeout=20)
STRICT = bh.Options(shutdown_timeout=10, timeout=20, security=bh.Security(trusted=False))
ROWS = torch.linspace(-1, 1, 24).view(8, 3)
bottoms: dict[str, nn.Linear] = {}
OWNERS = ("left", "right")


def embed(owner: str) -> torch.Tensor:
    return bottoms[owner](ROWS)  # type: ignore[no-any-return]


for _owner in OWNERS:
    bh.expose(functools.partial(embed, _owner), name=f"exposed.{_owner}", to=("labels",))


def make() -> tuple[nn.Linear, bh.optim.JointOptimizer]:
    """The model: a bottom at each owner, and the top here. Each owner exposes its own optimizer."""
    torch.manual_seed(0)
    for owner in OWNERS:
        bottoms[owner] = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(bottoms[owner].parameters(), lr=0.1)
        bh.optim.expose(optimizer, f"{owner}.bottom", to=("labels",))
    top = nn.Linear(4, 1)
    exposed = {owner: f"{owner}.bottom" for owner in OWNERS}
    return top, bh.optim.JointOptimizer(exposed, torch.optim.Adam(top.parameters(), lr=0.1))


def values(top: nn.Linear) -> list[torch.Tensor]:
    return [each.detach().clone() for module in (*bottoms.values(), top) for each in module.parameters()]


def train(top: nn.Linear, optimizer: Any, call: Any) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        top(torch.cat([call(owner) for owner in OWNERS], dim=1)).square().mean().backward()
        optimizer.step()


def call(owner: str) -> torch.Tensor:
    return bh.rpc_sync(owner, f"exposed.{owner}")  # type: ignore[no-any-return]


@pytest.fixture(params=[STRICT, TRUSTING], ids=["strict", "trusting labels"])
def workers(request: pytest.FixtureRequest) -> Iterator[list[bh.Worker]]:
    with mixed_cluster({"labels": request.param, "left": STRICT, "right": STRICT, "other": TRUSTING}) as started:
        yield started


def test_steps_are_those_of_one_optimizer(workers: list[bh.Worker]) -> None:
    top, _ = make()
    everything = [each for module in (*bottoms.values(), top) for each in module.parameters()]
    train(top, torch.optim.Adam(everything, lr=0.1), embed)
    wanted = values(top)
    top, optimizer = make()
    train(top, optimizer, call)
    assert all(map(torch.equal, values(top), wanted))


def test_nobody_else_steps_or_changes_anything(workers: list[bh.Worker]) -> None:
    top, optimizer = make()
    train(top, optimizer, call)
    before = values(top)
    with workers[3]:
        for what in ("left.bottom.step", "left.bottom.zero_grad", "exposed.left"):
            with pytest.raises(bh.errors.PermissionDeniedError):
                bh.rpc_sync("left", what)
    for wrong in ("left.bottom.load_state_dict", "left.bottom.add_param_group", "left.bottom.__init__"):
        with pytest.raises(bh.errors.PermissionDeniedError):
            bh.rpc_sync("left", wrong, args=({},))
    with pytest.raises(TypeError):
        bh.rpc_sync("left", "left.bottom.step", args=(1,))
    assert all(map(torch.equal, values(top), before))


def test_an_owner_refuses_a_step(workers: list[bh.Worker]) -> None:
    top, optimizer = make()

    def refuse(*_: Any) -> None:
        raise ArithmeticError("not this one")

    refusing = torch.optim.Adam(bottoms["left"].parameters(), lr=0.1)
    refusing.register_step_pre_hook(refuse)
    bh.optim.expose(refusing, "left.bottom", to=("labels",))
    before = values(top)
    with pytest.raises(ArithmeticError) as caught:
        train(top, optimizer, call)
    assert "'left'" in "".join(caught.value.__notes__)
    assert "'right'" not in "".join(caught.value.__notes__)
    stepped = [not torch.equal(now, then) for now, then in zip(values(top), before, strict=True)]
    assert stepped == [False, False, True, True, True, True]


def test_wrong_arguments(workers: list[bh.Worker]) -> None:
    with pytest.raises(TypeError):
        bh.optim.expose(nn.Linear(1, 1), "wrong")  # type: ignore[arg-type]
    top, _ = make()
    own = torch.optim.SGD(top.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="labels"):
        bh.optim.JointOptimizer({"labels": "left.bottom"}, own).step()
    with pytest.raises(bh.errors.UnknownWorkerError):
        bh.optim.JointOptimizer({"nobody": "left.bottom"}).step()
    with pytest.raises(bh.errors.PermissionDeniedError):
        bh.optim.JointOptimizer({"left": "right.bottom.step"}).step()
