"""Training over workers gives what a plain optimizer gives in one process."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch

import backhaul as bh

from .training import OWNERS, WORKERS, Far, Plain, batches, same, train

DistributedOptimizer = bh.optim.DistributedOptimizer

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.01}),
    "adam-foreach": (torch.optim.Adam, {"lr": torch.tensor(0.05), "foreach": False}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.05, "centered": True, "momentum": 0.5}),
    "asgd": (torch.optim.ASGD, {"lr": 0.05}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grouped", [False, True])
def test_parameters_and_state_are_equal(kind: str, grouped: bool) -> None:
    make, options = KINDS[kind]
    plain = Plain()
    expected = make(plain.two_groups() if grouped else plain.groups(), **options)
    train(plain, expected, batches(4))
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(make, far.two_groups() if grouped else far.groups(), **options)
        train(far, optimizer, batches(4))
        same(far.values(), plain.values())
        same(optimizer.state_dict(), expected.state_dict())


def test_positional_arguments_reach_the_owners() -> None:
    plain = Plain()
    train(plain, torch.optim.SGD(plain.groups(), 0.25, 0.5), batches(2))
    with bh.cluster(WORKERS):
        far = Far()
        train(far, DistributedOptimizer(torch.optim.SGD, far.groups(), 0.25, 0.5), batches(2))
        same(far.values(), plain.values())


def test_gradients_in_grad() -> None:
    plain, wanted = Plain(), torch.optim.SGD
    optimizer = wanted(plain.groups(), lr=0.1, momentum=0.9)
    for _ in range(2):  # accumulates over two passes, then starts anew
        for x in batches(2):
            plain.loss(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    with bh.cluster(WORKERS):
        far = Far(accumulate="grad")
        spread = DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.1, momentum=0.9)
        for _ in range(2):
            for x in batches(2):
                with far.backward(x):
                    pass
            spread.step()
            spread.zero_grad()
        assert set(far.grads(None).values()) == {None}
        same(far.values(), plain.values())


@pytest.mark.parametrize("named", [False, True])
def test_a_closure_computes_the_gradients(named: bool) -> None:
    plain = Plain()
    expected = torch.optim.SGD(plain.groups(), lr=0.1)
    for x in batches(2):
        expected.zero_grad()
        plain.loss(x).backward()
        expected.step()
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.1)
        for x in batches(2):

            def closure(x: torch.Tensor = x) -> float:
                optimizer.zero_grad()
                loss = far.loss(x)
                loss.backward()
                return loss.item()

            with torch.no_grad():
                found = optimizer.step(closure=closure) if named else optimizer.step(closure)
            assert isinstance(found, float)
        same(far.values(), plain.values())


def test_zero_grad_can_leave_zeros() -> None:
    with bh.cluster(WORKERS):
        far = Far(accumulate="grad")
        optimizer = DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.1)
        with far.backward(batches(1)[0]):
            assert far.grads(None)["w1"].count_nonzero() > 0
        optimizer.zero_grad(set_to_none=False)
        found = far.grads(None)
        same(found["w1"], torch.zeros(4, 4, dtype=torch.float64))
        assert found["idle"] is None


def test_grad_is_left_as_it_was() -> None:
    with bh.cluster(WORKERS):
        far = Far()
        marks = {name: torch.full_like(value, 5.0) for name, value in far.values().items() if name != "b0"}
        for name, mark in marks.items():
            bh.rpc_sync(OWNERS[name], set_grad, args=(far.params[name], mark))
        plain = Plain()
        train(plain, torch.optim.SGD(plain.groups(), lr=0.1), batches(2))
        train(far, DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.1), batches(2))
        same(far.values(), plain.values())
        same(far.grads(None), {**marks, "b0": None})


def set_grad(rref: bh.RRef[Any], grad: torch.Tensor) -> None:
    rref.local_value().grad = grad


def test_gradients_in_the_context_stay() -> None:
    plain = Plain()
    with plain.backward(batches(1)[0]), bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.Adam, far.groups(), weight_decay=0.1)
        with far.backward(batches(1)[0]) as ctx:
            optimizer.step(ctx)
            same(far.grads(ctx), plain.grads())


def test_several_contexts_at_once_keep_their_gradients_apart() -> None:
    """Two strands make their passes, then both step: each with what it computed from the first parameters."""
    one, two = batches(2)
    plain = Plain()
    expected = torch.optim.SGD(plain.groups(), lr=0.1, momentum=0.9)
    grads = []
    for x in (two, one):
        with plain.backward(x):
            grads.append(plain.grads())
    for found in grads:
        for name, grad in found.items():
            plain.params[name].grad = grad
        expected.step()
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.SGD, far.groups(), lr=0.1, momentum=0.9)
        strand, other = contextvars.copy_context(), far.backward(two)
        second = strand.run(other.__enter__)
        with far.backward(one) as first:
            optimizer.step(second)
            optimizer.step(first)
        strand.run(other.__exit__, None, None, None)
        same(far.values(), plain.values())


def test_groups_can_be_added() -> None:
    plain = Plain()
    names = list(plain.params)
    expected = torch.optim.Adam([plain.params[name] for name in names[:2]], lr=0.05)
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.Adam, [far.params[name] for name in names[:2]], lr=0.05)
        for model, either in ((plain, expected), (far, optimizer)):
            train(model, either, batches(2))
            # On one owner that has parameters already, and on three that have none.
            either.add_param_group({"params": [model.params[name] for name in names[2:]], "lr": 0.2})
            train(model, either, batches(2))
        same(far.values(), plain.values())
        same(optimizer.state_dict(), expected.state_dict())


def test_a_group_may_be_empty() -> None:
    plain = Plain()
    expected = torch.optim.Adam([{"params": []}, {"params": plain.groups()}], lr=0.05)
    train(plain, expected, batches(2), torch.optim.lr_scheduler.StepLR(expected, 1))
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.Adam, [{"params": []}, {"params": far.groups()}], lr=0.05)
        train(far, optimizer, batches(2), torch.optim.lr_scheduler.StepLR(optimizer, 1))
        same(far.values(), plain.values())
        same(optimizer.state_dict(), expected.state_dict())
        optimizer.load_state_dict(expected.state_dict())
        same(optimizer.state_dict(), expected.state_dict())


def test_a_group_that_one_owner_refuses_is_added_nowhere() -> None:
    plain = Plain()
    names = list(plain.params)[1:]
    expected = torch.optim.Adam([plain.params[name] for name in names], lr=0.05)
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(torch.optim.Adam, [far.params[name] for name in names], lr=0.05)
        more = bh.remote("worker2", torch.nn.Parameter, args=(torch.ones(2),))
        with pytest.raises(ValueError) as caught:
            optimizer.add_param_group({"params": [more, far.params["idle"]]})  # the latter for the second time
        assert "worker1" in "".join(caught.value.__notes__)
        for model, either in ((plain, expected), (far, optimizer)):
            either.add_param_group({"params": [model.params["w0"]]})
            train(model, either, batches(2))
        optimizer.add_param_group({"params": more})
        expected.add_param_group({"params": torch.nn.Parameter(torch.ones(2))})
        same(far.values(), plain.values())
        same(optimizer.state_dict(), expected.state_dict())


class Counting(torch.optim.SGD):
    """Keeps state of its own among the options."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


def test_options_that_owners_change_are_theirs() -> None:
    with bh.cluster(WORKERS):
        far = Far()
        optimizer = DistributedOptimizer(Counting, far.groups(), lr=0.05)
        train(far, optimizer, batches(2))
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups[0]["steps"] == 2
        train(far, optimizer, batches(3))
        assert optimizer.state_dict()["param_groups"][0]["steps"] == 5


TOKENS = [torch.tensor([1, 2, 2, 5]), torch.tensor([0, 5]), torch.tensor([2])]


def embedding() -> torch.nn.Embedding:
    torch.manual_seed(3)
    return torch.nn.Embedding(6, 3, sparse=True, dtype=torch.float64)


def weight_of(module: bh.RRef[Any]) -> bh.RRef[Any]:
    return bh.RRef(module.local_value().weight)


def test_sparse_gradients() -> None:
    table = embedding()
    expected = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    for tokens in TOKENS:
        table(tokens).square().sum().backward()
        expected.step()
        expected.zero_grad()
    with bh.cluster(2):
        remote = bh.remote("worker1", embedding)
        weight = bh.rpc_sync("worker1", weight_of, args=(remote,))
        optimizer = DistributedOptimizer(torch.optim.SparseAdam, [weight], lr=0.1)
        for tokens in TOKENS:
            with bh.context() as ctx:
                ctx.backward(remote.rpc_sync().forward(tokens).square().sum())
                assert bh.rpc_sync("worker1", is_sparse, args=(weight, ctx))
                optimizer.step(ctx)
        same(weight.to_here().detach(), table.weight.detach())
        same(optimizer.state_dict(), expected.state_dict())


def is_sparse(rref: bh.RRef[Any], context: int) -> bool:
    return bh.get_gradients(context)[rref.local_value()].is_sparse


def train_in_processes() -> dict[str, torch.Tensor] | None:
    torch.set_num_threads(1)
    if bh.get_worker_info().id != 0:
        return None
    far = Far()
    optimizer = DistributedOptimizer(torch.optim.Adam, far.two_groups(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(far, optimizer, batches(5), scheduler)
    return {**far.values(), "state": optimizer.state_dict()}


def test_processes() -> None:
    plain = Plain()
    expected = torch.optim.Adam(plain.two_groups(), lr=0.05)
    train(plain, expected, batches(5), torch.optim.lr_scheduler.StepLR(expected, 2))
    found, *_ = bh.launch(train_in_processes, WORKERS, start_method="forkserver", timeout=60)
    same(found, {**plain.values(), "state": expected.state_dict()})
