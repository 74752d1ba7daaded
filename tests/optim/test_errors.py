"""What goes wrong on owners reaches the caller, with all of them named and nobody left at work."""

from __future__ import annotations

import operator
import pickle
from typing import Any

import pytest
import torch

import backhaul as bh

from .training import OWNERS, WORKERS, Far, Plain, batches, same, train

DistributedOptimizer = bh.optim.DistributedOptimizer


class Failing(torch.optim.SGD):
    """Fails on the workers that are named in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["failing"] = ()

    def step(self, closure: Any = None) -> None:
        name = bh.get_worker_info().name
        if name in self.param_groups[0]["failing"]:
            raise LookupError(f"{name} does not like this")
        super().step()


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


@pytest.mark.parametrize("failing", [("worker2",), ("worker1", "worker2"), ("worker0",)])
def test_failing_step(failing: tuple[str, ...]) -> None:
    plain = Plain()
    before = plain.values()
    train(plain, torch.optim.SGD(plain.groups(), lr=0.1), batches(1))
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(Failing, far.groups(), lr=0.1)
        optimizer.param_groups[0]["failing"] = failing
        with pytest.raises(LookupError) as caught:
            train(far, optimizer, batches(1))
        assert all(f"'{name}'" in notes(caught.value) for name in failing)
        assert not any(f"'{name}'" in notes(caught.value) for name in set(OWNERS.values()) - set(failing))
        after = plain.values()
        same(far.values(), {name: (before if OWNERS[name] in failing else after)[name] for name in before})
        same(far.grads(None), dict.fromkeys(OWNERS))


def test_goes_on_after_a_failing_step() -> None:
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(Failing, far.groups(), lr=0.1)
        optimizer.param_groups[0].update(failing=("worker2",), lr=0.7)
        with pytest.raises(LookupError):
            train(far, optimizer, batches(1))
        optimizer.param_groups[0]["failing"] = ()
        plain = Plain(far.values())
        train(plain, torch.optim.SGD(plain.groups(), lr=0.7), batches(2))
        train(far, optimizer, batches(2))
        same(far.values(), plain.values())


def test_all_failures_of_construction_are_told() -> None:
    with bh.cluster(WORKERS):
        far = Far()
        with pytest.raises(ValueError, match="learning rate") as caught:
            DistributedOptimizer(torch.optim.SGD, far.groups(), lr=-1.0)
        assert all(f"'{name}'" in notes(caught.value) for name in OWNERS.values())


def test_what_is_not_there_cannot_be_optimized() -> None:
    with bh.cluster(2):
        with pytest.raises(ZeroDivisionError) as caught:
            DistributedOptimizer(torch.optim.SGD, [bh.remote("worker1", operator.truediv, args=(1, 0))], lr=0.1)
        assert "worker1" in notes(caught.value)
        with pytest.raises(TypeError) as other:
            DistributedOptimizer(torch.optim.SGD, [bh.remote("worker1", dict)], lr=0.1)
        assert "worker1" in notes(other.value)


def test_wrong_arguments() -> None:
    with bh.cluster(1):
        param = torch.nn.Parameter(torch.ones(2))
        rref = bh.RRef(param)
        with pytest.raises(TypeError, match="RRef"):
            DistributedOptimizer(torch.optim.SGD, [param], lr=0.1)
        with pytest.raises(TypeError, match="list"):
            DistributedOptimizer(torch.optim.SGD, rref, lr=0.1)
        with pytest.raises(TypeError, match="group 1"):
            DistributedOptimizer(torch.optim.SGD, [{"params": [rref]}, rref], lr=0.1)
        with pytest.raises(TypeError, match="group 0"):
            DistributedOptimizer(torch.optim.SGD, [{"lr": 1.0}], lr=0.1)
        with pytest.raises(ValueError, match="no parameters"):
            DistributedOptimizer(torch.optim.SGD, [], lr=0.1)
        with pytest.raises(ValueError, match="no parameters"):
            DistributedOptimizer(torch.optim.SGD, [{"params": []}], lr=0.1)
        with pytest.raises(TypeError, match="LBFGS"):
            DistributedOptimizer(torch.optim.LBFGS, [rref])
        with pytest.raises(TypeError, match="class"):
            DistributedOptimizer("SGD", [rref])


def test_contexts_that_are_gone_or_never_were() -> None:
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.1)
        with far.backward(batches(1)[0]) as ctx:
            pass
        before = far.values()
        for context in (ctx, 12345):
            with pytest.raises(bh.errors.UnknownContextError):
                optimizer.step(context)
            with pytest.raises(bh.errors.UnknownContextError):
                bh.optim.clip_grad_norm_(context, far.groups(), 1.0)
        with pytest.raises(TypeError):
            optimizer.step("context")
        with bh.context() as fresh:
            optimizer.step(fresh)  # nothing has a gradient, as in torch
        same(far.values(), before)


def test_it_stays_where_it_is() -> None:
    with bh.cluster(2):
        optimizer = DistributedOptimizer(torch.optim.SGD, [bh.RRef(torch.nn.Parameter(torch.ones(1)))], lr=0.1)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(optimizer)
        with pytest.raises(bh.errors.SerializationError):
            bh.rpc_sync("worker1", len, args=(optimizer,))


def test_an_owner_that_is_lost_is_named_and_the_others_step() -> None:
    plain = Plain()
    train(plain, torch.optim.SGD(plain.groups(), lr=0.1), batches(1))
    with bh.cluster(WORKERS) as workers:
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.1)
        with far.backward(batches(1)[0]) as ctx:
            with workers[3]:
                bh.shutdown(graceful=False)
            with pytest.raises(bh.PeerLostError) as caught:
                optimizer.step(ctx)
        assert "'worker3'" in notes(caught.value)
        for name, wanted in plain.values().items():
            if OWNERS[name] != "worker3":
                same(far.params[name].to_here().detach(), wanted)
