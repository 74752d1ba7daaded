"""``create_graph``: a later pass differentiates through an earlier one's communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import backhaul as bh

from .worlds import Distributed, World, check_outside, vector
from .worlds import check as check_once

Check = Callable[..., None]

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # plain autograd, with create_graph

# a and b are used by the driver, c by worker 1, d by worker 2.
LEAVES = {
    "a": vector(0.3, -1.2, 2.0),
    "b": vector(1.5, 0.4, -0.7),
    "c": vector(-0.2, 0.9, 1.1),
    "d": vector(0.8, -0.5, 0.6),
}
HOME = {"a": 0, "b": 0, "c": 1, "d": 2}


def stage(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.tanh(x * world.leaves[name]) + x.pow(3) * 0.1


def model(world: World, x: torch.Tensor) -> torch.Tensor:
    """Two remote stages, with a connection around the second."""
    y = world.call(1, stage, x * world.b, "c")
    return world.call(2, stage, y, "d") * y


def squared(world: World, names: str) -> torch.Tensor:
    """The penalty of the gradients of leaves on this worker."""
    return sum(world.grad(world.leaves[name]).pow(2).sum() for name in names)


def penalty(world: World, *names: str) -> torch.Tensor:
    """The penalty of the gradients of leaves, computed by the workers that hold them."""
    return sum(world.call(HOME[group[0]], squared, group) for group in names)


def test_the_first_pass_alone(check: Check) -> None:
    """The gradients are the same, and are part of a graph."""

    def program(world: World) -> None:
        world.backward(model(world, world.a).sum(), create_graph=True)
        for name in "ab":
            assert world.grad(world.leaves[name]).requires_grad

    check(program, LEAVES)


def test_a_gradient_penalty(check: Check) -> None:
    """On the input only, as for a critic."""

    def program(world: World) -> None:
        loss = model(world, world.a).sum()
        world.backward(loss, create_graph=True)
        world.backward((world.grad(world.a).pow(2).sum().sqrt() - 1).pow(2))

    check(program, LEAVES)


def test_a_gradient_penalty_with_inputs(check: Check) -> None:
    """The first pass computes only the penalized gradient; the second pass all the others."""

    def program(world: World) -> None:
        loss = model(world, world.a).sum()
        world.backward(loss, inputs=[world.a], create_graph=True)
        world.backward(loss + (world.grad(world.a).norm() - 1).pow(2))

    check(program, LEAVES)


def test_penalties_of_all_workers(check: Check) -> None:
    def program(world: World) -> None:
        loss = model(world, world.a).sum()
        world.backward(loss, create_graph=True)
        world.backward(penalty(world, "ab", "c", "d") + loss)

    check(program, LEAVES)


def test_a_penalty_of_some_workers(check: Check) -> None:
    """Some gradient messages of the first pass do not take part in the second."""

    def program(world: World) -> None:
        world.backward(model(world, world.a).sum(), create_graph=True)
        world.backward(penalty(world, "d"))

    check(program, LEAVES)


def test_a_hessian_vector_product(check: Check) -> None:
    direction = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64)

    def program(world: World) -> None:
        world.backward(model(world, world.a).sum(), create_graph=True)
        first = world.grad(world.a)
        world.backward([first], grad_tensors=[direction])

    check(program, LEAVES)


def test_hessian_vector_products_by_two_means_agree() -> None:
    """The last row of a Hessian, against ``torch.autograd.functional``."""
    b, c, d = (LEAVES[name].detach() for name in "bcd")
    a = LEAVES["a"].detach().clone().requires_grad_()

    def loss(x: torch.Tensor, call: Callable[..., torch.Tensor]) -> torch.Tensor:
        y = call(1, smooth, x * b, c)
        return (call(2, smooth, y, d) * y).sum()

    hessian = torch.autograd.functional.hessian(lambda x: loss(x, lambda _, function, *args: function(*args)), a)
    with bh.cluster(3), bh.context() as ctx:
        ctx.backward(loss(a, lambda to, function, *args: bh.rpc_sync(to, function, args=args)), create_graph=True)
        first = ctx.grads[a]
        before = first.detach()
        rows = []
        for number in range(3):
            ctx.backward(first[number], retain_graph=True)
            now = ctx.grads[a].detach()
            rows.append(now - before)
            before = now
    torch.testing.assert_close(torch.stack(rows), hessian)


def smooth(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * weight) + x.pow(3) * 0.1


@pytest.mark.parametrize("steps", [1, 3])
def test_an_inner_loop_across_workers(steps: int) -> None:
    """MAML: every worker adapts its weights by its own gradients. The loss after that is differentiated."""

    def program(world: World) -> None:
        world.fast = {}
        for _ in range(steps):
            world.call(1, start, "c")
            world.call(2, start, "d")
            loss = adapted(world, world.a).pow(2).sum()
            world.backward(loss, create_graph=True)
            for worker, name in ((1, "c"), (2, "d")):
                world.call(worker, adapt, name)
        world.backward(adapted(world, world.a).sum())

    def start(world: World, name: str) -> None:
        """Forget the gradient of the last step: it is not part of the next."""
        world.seen = getattr(world, "seen", {})
        world.seen[name] = world.grad(world.leaves[name])

    def adapt(world: World, name: str) -> None:
        leaf, before = world.leaves[name], world.seen[name]
        grad = world.grad(leaf) if before is None else world.grad(leaf) - before
        world.fast[name] = world.fast.get(name, leaf) - 0.1 * grad

    def fast_stage(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.tanh(x * world.fast.get(name, world.leaves[name]))

    def adapted(world: World, x: torch.Tensor) -> torch.Tensor:
        y = world.call(1, fast_stage, x * world.b, "c")
        return world.call(2, fast_stage, y, "d") * y

    check_once(program, LEAVES)


@pytest.mark.parametrize("names", [("ab",), ("c", "d"), ("ab", "c", "d")])
def test_third_order(check: Check, names: Sequence[str]) -> None:
    def program(world: World) -> None:
        world.backward(model(world, world.a).sum(), create_graph=True)
        world.backward(penalty(world, *names), create_graph=True)
        world.backward(penalty(world, *names))

    check(program, LEAVES, rtol=1e-7)


def test_fourth_order(check: Check) -> None:
    def program(world: World) -> None:
        world.backward(world.call(1, stage, world.a, "c").sum(), create_graph=True)
        for _ in range(2):
            world.backward(penalty(world, "a"), create_graph=True)
        world.backward(penalty(world, "a"))

    check(program, LEAVES, rtol=1e-7)


def test_a_worker_that_calls_itself(check: Check) -> None:
    def program(world: World) -> None:
        y = world.call(0, stage, world.a, "b")
        world.backward((world.call(0, stage, y, "b") * y).sum(), create_graph=True)
        world.backward(penalty(world, "ab"))

    check(program, LEAVES)


def test_gradients_that_need_no_grad_are_not_recorded() -> None:
    """A linear function: its gradient is constant."""
    a = LEAVES["a"].detach().clone().requires_grad_()
    with bh.cluster(2), bh.context() as ctx:
        ctx.backward(bh.rpc_sync(1, torch.mul, args=(a, 2)).sum(), create_graph=True)
        shares = ctx.describe()["workers"]
        assert not any(send["gradient"] for share in shares.values() for send in share["sends"])
        assert not ctx.grads[a].requires_grad


def test_what_a_pass_sends_is_recorded_as_its_own() -> None:
    """The gradient messages of a pass are no sources of that pass, and its ends are seen by ``describe``."""
    a = LEAVES["a"].detach().clone().requires_grad_()
    with bh.cluster(2), bh.context() as ctx:
        ctx.backward(bh.rpc_sync(1, torch.sin, args=(a,)).pow(2).sum(), create_graph=True)
        shares = ctx.describe()["workers"]
        gradients = {name: sum(send["gradient"] for send in share["sends"]) for name, share in shares.items()}
        assert gradients == {"worker0": 1, "worker1": 1}
        assert {name: len(share["recvs"]) for name, share in shares.items()} == {"worker0": 2, "worker1": 2}


@pytest.mark.parametrize("names", [("ab",), ("ab", "c", "d")])
def test_fast_mode(names: Sequence[str]) -> None:
    """In every mode, messages of an earlier pass may take part in a later one, or not."""

    def program(world: World) -> None:
        world.backward(model(world, world.a).sum(), create_graph=True)
        world.backward(penalty(world, *names))

    check_once(program, LEAVES, mode="fast", timeout=5.0)


def test_a_first_pass_in_fast_mode_and_a_second_in_exact(check: Check) -> None:
    def program(world: World) -> None:
        fast: dict[str, Any] = {"mode": "fast"} if isinstance(world, Distributed) else {}
        world.backward(model(world, world.a).sum(), create_graph=True, **fast)
        world.backward(penalty(world, "ab", "c"))

    check(program, LEAVES)


def test_the_graph_does_not_depend_on_who_looks() -> None:
    """Gradients read under ``no_grad`` are still part of the graph."""

    def program(world: World) -> None:
        y = world.call(1, stage, world.a, "c") * world.call(1, stage, world.a * 2, "c")
        world.backward(y.sum(), create_graph=True)
        with torch.no_grad():
            assert world.call(1, squared, "c").isfinite()
            assert world.grad(world.a) is not None
        world.backward(penalty(world, "a", "c"))

    check_once(program, LEAVES)
    check_once(program, LEAVES, deterministic=True)
    check_outside(program, LEAVES)


def test_retain_graph_follows_create_graph() -> None:
    """As in plain autograd; a graph that is not retained is freed."""
    a = LEAVES["a"].detach().clone().requires_grad_()
    with bh.cluster(2), bh.context() as ctx:
        y = bh.rpc_sync(1, torch.sin, args=(a,)).sum()
        ctx.backward(y, create_graph=True)
        ctx.backward(y, create_graph=True, retain_graph=False)
        with pytest.raises(bh.errors.GraphFreedError):
            ctx.backward(y)
