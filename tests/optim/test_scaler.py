"""A scaler over workers does what ``torch.amp.GradScaler`` does in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import backhaul as bh

from .training import OWNERS, WORKERS, Far, Plain, batches, initial, same

OPTIONS: dict[str, Any] = {"init_scale": 1000.3, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 2}
HUGE = 3e38  # its gradient is finite, and infinite once it is scaled
SINGLE = torch.float32


def spoil(rref: bh.RRef[Any]) -> torch.Tensor:
    return (rref.local_value() * HUGE).sum()


def run_plain(spoiled: set[int], steps: int, clip: bool = False) -> tuple[Any, Any, list[Any]]:
    plain = Plain(initial(SINGLE))
    optimizer = torch.optim.Adam(plain.groups(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    states = []
    for step, x in enumerate(batches(steps, SINGLE)):
        scaler.scale(plain.loss(x)).backward()
        if step in spoiled:
            scaler.scale((plain.params["b1"] * HUGE).sum()).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(plain.groups(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        states.append(scaler.state_dict())
    return plain, optimizer, states


@pytest.mark.parametrize("way", ["context", "grad"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_step_is_skipped_everywhere_if_one_worker_finds_an_infinity(way: str, clip: bool) -> None:
    spoiled, steps = {0, 4}, 9
    plain, expected, wanted = run_plain(spoiled, steps, clip)
    with bh.cluster(WORKERS):
        far = Far(initial(SINGLE))
        optimizer = bh.optim.DistributedOptimizer(torch.optim.Adam, far.groups(), lr=0.05)
        scaler = bh.optim.GradScaler(**OPTIONS)
        states = []
        for step, x in enumerate(batches(steps, SINGLE)):
            before = far.values()
            with bh.context() as ctx:
                losses = [far.loss(x)]
                if step in spoiled:
                    losses.append(bh.rpc_sync(OWNERS["b1"], spoil, (far.params["b1"],)))
                ctx.backward(scaler.scale(losses), accumulate=way)
                where = ctx if way == "context" else None
                if clip:
                    scaler.unscale_(optimizer, where)
                    bh.optim.clip_grad_norm_(where, optimizer, 0.05)
                assert scaler.step(optimizer, where) is (step not in spoiled)
                scaler.update()
                optimizer.zero_grad()
            if step in spoiled:
                same(far.values(), before)
            states.append(scaler.state_dict())
        same(states, wanted)
        same(far.values(), plain.values())
        same(optimizer.state_dict(), expected.state_dict())


def test_states_are_exchanged_with_torch() -> None:
    _, _, states = run_plain({0}, 4)
    scaler = bh.optim.GradScaler()
    scaler.load_state_dict(states[-1])
    assert scaler.state_dict() == states[-1]
    assert scaler.get_scale() == states[-1]["scale"]
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == states[-1]


def test_one_unscale_and_one_step_to_an_update() -> None:
    with bh.cluster(WORKERS):
        far = Far(initial(SINGLE))
        optimizer = bh.optim.DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.05)
        scaler = bh.optim.GradScaler(**OPTIONS)
        with pytest.raises(RuntimeError):
            scaler.update()
        with bh.context() as ctx:
            with pytest.raises(RuntimeError, match="no parameter"):
                scaler.step(optimizer, ctx)
            ctx.backward(scaler.scale(far.loss(batches(1, SINGLE)[0])))
            scaler.unscale_(optimizer, ctx)
            with pytest.raises(RuntimeError, match="already unscaled"):
                scaler.unscale_(optimizer, ctx)
            assert scaler.step(optimizer, ctx)
            for again in (scaler.step, scaler.unscale_):
                with pytest.raises(RuntimeError, match="already"):
                    again(optimizer, ctx)
            scaler.update(4.0)
            assert scaler.get_scale() == 4.0
        with pytest.raises(bh.errors.UnknownContextError):
            scaler.step(optimizer, ctx)


def test_gradients_in_float16_are_refused() -> None:
    with bh.cluster(2), bh.context() as ctx:
        param = bh.remote("worker1", torch.nn.Parameter, (torch.ones(2, dtype=torch.float16),))
        optimizer = bh.optim.DistributedOptimizer(torch.optim.SGD, [param], lr=0.05)
        scaler = bh.optim.GradScaler(init_scale=2.0)
        ctx.backward(scaler.scale(param.rpc_sync().sum()))
        with pytest.raises(ValueError, match="float16"):
            scaler.step(optimizer, ctx)


def test_not_enabled() -> None:
    with bh.cluster(WORKERS):
        plain, far = Plain(), Far()
        optimizer = bh.optim.DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.05)
        scaler = bh.optim.GradScaler(enabled=False)
        with bh.context() as ctx:
            ctx.backward(scaler.scale(far.loss(batches(1)[0])))
            scaler.unscale_(optimizer, ctx)
            assert scaler.step(optimizer, ctx)
            scaler.update()
        with plain.backward(batches(1)[0]):
            torch.optim.SGD(plain.groups(), lr=0.05).step()
        same(far.values(), plain.values())
        assert (scaler.state_dict(), scaler.get_scale(), scaler.is_enabled()) == ({}, 1.0, False)


@pytest.mark.parametrize("options", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"backoff_factor": 0.0}])
def test_wrong_factors(options: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        bh.optim.GradScaler(**options)


def test_an_infinite_scale_is_not_taken() -> None:
    """Nor by torch."""
    state = {"scale": 3e38, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1, "_growth_tracker": 0}
    with bh.cluster(1), bh.context() as ctx:
        param = torch.nn.Parameter(torch.ones(1))
        optimizer = bh.optim.DistributedOptimizer(torch.optim.SGD, [bh.RRef(param)], lr=0.0)
        scaler = bh.optim.GradScaler()
        scaler.load_state_dict(state)
        ctx.backward(scaler.scale(param.sum()))
        assert scaler.step(optimizer, ctx)
        scaler.update()
        assert scaler.state_dict()["scale"] == pytest.approx(3e38)
