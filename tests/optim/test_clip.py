"""Clipping over workers gives what ``torch.nn.utils`` gives in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import utils

import backhaul as bh

from .training import WORKERS, Far, Plain, batches, same

BATCH = batches(1)[0]


def handed(far: Far, way: str) -> Any:
    """The parameters, in one of the ways in which they may be given."""
    return far.groups() if way == "list" else bh.optim.DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.1)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("way", ["list", "optimizer"])
def test_norm(norm_type: float, max_norm: float, way: str) -> None:
    plain = Plain()
    with plain.backward(BATCH), bh.cluster(WORKERS):
        total = utils.clip_grad_norm_(plain.groups(), max_norm, norm_type)
        far = Far()
        with far.backward(BATCH) as ctx:
            same(bh.optim.clip_grad_norm_(ctx, handed(far, way), max_norm, norm_type), total)
            same(far.grads(ctx), plain.grads())


@pytest.mark.parametrize("way", ["list", "optimizer"])
def test_gradients_in_grad(way: str) -> None:
    plain = Plain()
    with plain.backward(BATCH), bh.cluster(WORKERS):
        total = utils.clip_grad_norm_(plain.groups(), 0.1)
        utils.clip_grad_value_(plain.groups(), 0.01)
        far = Far(accumulate="grad")
        with far.backward(BATCH) as none:
            same(bh.optim.clip_grad_norm_(none, handed(far, way), 0.1), total)
            bh.optim.clip_grad_value_(none, handed(far, way), 0.01)
            same(far.grads(None), plain.grads())


def test_value() -> None:
    plain = Plain()
    with plain.backward(BATCH), bh.cluster(WORKERS):
        utils.clip_grad_value_(plain.groups(), 0.02)
        far = Far()
        with far.backward(BATCH) as ctx:
            bh.optim.clip_grad_value_(ctx, far.groups(), 0.02)
            same(far.grads(ctx), plain.grads())


def test_only_the_given_parameters() -> None:
    plain = Plain()
    names = ["w1", "b0"]
    with plain.backward(BATCH), bh.cluster(WORKERS):
        total = utils.clip_grad_norm_([plain.params[name] for name in names], 0.01)
        far = Far()
        with far.backward(BATCH) as ctx:
            same(bh.optim.clip_grad_norm_(ctx, [far.params[name] for name in names], 0.01), total)
            same(far.grads(ctx), plain.grads())


def spoil(rref: bh.RRef[Any]) -> torch.Tensor:
    return (rref.local_value() * math.inf).sum()


def test_infinite_norm() -> None:
    plain = Plain()
    (plain.params["b1"] * math.inf).sum().backward()
    with plain.backward(BATCH), bh.cluster(WORKERS):
        before = plain.grads()
        same(before["b1"], torch.full((4,), math.inf, dtype=torch.float64))
        before = {name: grad if grad is None else grad.clone() for name, grad in before.items()}
        far = Far()
        with bh.context() as ctx:
            ctx.backward([far.loss(BATCH), bh.rpc_sync("worker2", spoil, (far.params["b1"],))])
            with pytest.raises(RuntimeError, match="inf"):
                bh.optim.clip_grad_norm_(ctx, far.groups(), 1.0, error_if_nonfinite=True)
            same(far.grads(ctx), before)
            total = bh.optim.clip_grad_norm_(ctx, far.groups(), 1.0)
            same(total, utils.clip_grad_norm_(plain.groups(), 1.0))
            same(far.grads(ctx), plain.grads())


def test_without_gradients() -> None:
    with bh.cluster(WORKERS), bh.context() as ctx:
        far = Far()
        same(bh.optim.clip_grad_norm_(ctx, far.groups(), 1.0), utils.clip_grad_norm_(Plain().groups(), 1.0))
        bh.optim.clip_grad_value_(ctx, far.groups(), 1.0)


def times(rref: bh.RRef[Any], factor: float) -> torch.Tensor:
    return rref.local_value() * factor


def test_norms_are_summed_in_the_order_of_the_parameters() -> None:
    """Not by owner: the sum of these depends on the order."""
    slopes = [1.0, 1e16, 1.0, 1.0]
    plain = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in slopes]
    sum(param * slope for param, slope in zip(plain, slopes, strict=True)).backward()
    total = utils.clip_grad_norm_(plain, 1.0, 1.0)
    assert total != utils.get_total_norm([torch.tensor(slope, dtype=torch.float64) for slope in sorted(slopes)], 1.0)
    with bh.cluster(2), bh.context() as ctx:
        rrefs = [bh.remote(owner, torch.nn.Parameter, (torch.zeros(1, dtype=torch.float64),)) for owner in (0, 1, 0, 0)]
        parts = [bh.rpc_sync(r.owner(), times, (r, slope)) for r, slope in zip(rrefs, slopes, strict=True)]
        ctx.backward(sum(parts))
        same(bh.optim.clip_grad_norm_(ctx, rrefs, 1.0, 1.0), total)


def test_owners_are_asked_no_more_than_needed() -> None:
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = handed(far, "optimizer")
        with far.backward(BATCH) as ctx:
            for max_norm, calls in ((1e6, 1), (0.01, 2)):
                before = served("worker2")
                bh.optim.clip_grad_norm_(ctx, optimizer, max_norm)
                assert served("worker2") - before == calls + 1  # one of them is the question itself


def served(worker: str) -> int:
    return bh.rpc_sync(worker, bh.get_debug_info)["num_calls_served"]


def test_gradients_that_were_taken_before_stay() -> None:
    """They may be shared, with another leaf or with whoever asked for them."""
    with bh.cluster(1), bh.context() as ctx:
        param = torch.nn.Parameter(torch.ones(4))
        ctx.backward(param.square().sum())
        taken = bh.get_gradients(ctx)[param]
        bh.optim.clip_grad_norm_(ctx, [bh.RRef(param)], 0.5)
        bh.optim.clip_grad_value_(ctx, [bh.RRef(param)], 0.01)
        same(taken, torch.full((4,), 2.0))
        same(bh.get_gradients(ctx)[param], torch.full((4,), 0.01))


def gradient(rref: bh.RRef[Any], context: int) -> torch.Tensor:
    return bh.get_gradients(context)[rref.local_value()]


def look_up(table: bh.RRef[Any], tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(tokens, table.local_value(), sparse=True)


def test_sparse_gradients() -> None:
    tokens = torch.tensor([1, 1, 3])
    values = torch.arange(8.0).reshape(4, 2)
    dense = torch.nn.Parameter(values)
    torch.nn.functional.embedding(tokens, dense).square().sum().backward()
    total = utils.clip_grad_norm_([dense], 2.0)
    with bh.cluster(2), bh.context() as ctx:
        table = bh.remote("worker1", torch.nn.Parameter, (values,))
        ctx.backward(bh.rpc_sync("worker1", look_up, (table, tokens)).square().sum())
        torch.testing.assert_close(bh.optim.clip_grad_norm_(ctx, [table], 2.0), total)
        found = bh.rpc_sync("worker1", gradient, (table, ctx))
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), dense.grad)
        bh.optim.clip_grad_value_(ctx, [table], 0.5)
        utils.clip_grad_value_([dense], 0.5)
        torch.testing.assert_close(bh.rpc_sync("worker1", gradient, (table, ctx)).to_dense(), dense.grad)
