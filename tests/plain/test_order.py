"""Derivatives of derivatives with ``torch.autograd`` over workers."""

from __future__ import annotations

import pytest
import torch

import backhaul as bh
from tests.autograd.worlds import World, check_outside, check_processes, vector

LEAVES = {
    "a": vector(0.3, -1.2, 2.0),  # a and b are used by the driver
    "b": vector(1.5, 0.4, -0.7),
    "c": vector(-0.2, 0.9, 1.1),  # c by worker 1
    "d": vector(0.8, -0.5, 0.6),  # d by worker 2
}

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # plain autograd, with create_graph


def stage(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.tanh(x * world.leaves[name]) + x.pow(3) * 0.1


def model(world: World, x: torch.Tensor) -> torch.Tensor:
    y = world.call(1, stage, x * world.b, "c")
    return world.call(2, stage, y, "d") * y


def squared(world: World, name: str) -> torch.Tensor:
    """The penalty of the gradient of a leaf, on the worker that has the leaf."""
    grad = world.leaves[name].grad
    assert grad is not None
    return grad.pow(2).sum()


def gradient_penalty(world: World) -> None:
    (first,) = torch.autograd.grad(model(world, world.a).sum(), world.a, create_graph=True)
    world.backward((first.norm() - 1).pow(2))


def penalties_everywhere(world: World) -> None:
    world.backward(model(world, world.a).sum(), create_graph=True)
    penalty = squared(world, "a") + world.call(1, squared, "c") + world.call(2, squared, "d")
    world.backward(penalty)


def third_order(world: World) -> None:
    (first,) = torch.autograd.grad(model(world, world.a).sum(), world.a, create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), world.a, create_graph=True)
    world.backward(second.pow(2).sum())


def fourth_order(world: World) -> None:
    value = world.call(1, stage, world.a, "c").sum()
    for _ in range(3):
        (grad,) = torch.autograd.grad(value, world.a, create_graph=True)
        value = grad.pow(2).sum()
    world.backward(value)


def grad_of_a_value(world: World) -> None:
    """The gradient of a received tensor, and of one that was sent, in a later pass."""
    h = world.a * world.b
    y = world.call(1, stage, h, "c")
    z = world.call(2, stage, y, "d").sum()
    of_h, of_y = torch.autograd.grad(z, [h, y], create_graph=True)
    world.backward((of_h * of_y).sum() + z)


def vector_product_with_the_hessian(world: World) -> None:
    (first,) = torch.autograd.grad(model(world, world.a).sum(), world.a, create_graph=True)
    world.backward([first], grad_tensors=[torch.tensor([0.5, 2.0, -1.0]).double()])


PROGRAMS = {
    program.__name__: program
    for program in (
        gradient_penalty,
        penalties_everywhere,
        third_order,
        fourth_order,
        grad_of_a_value,
        vector_product_with_the_hessian,
    )
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_one_process(name: str) -> None:
    check_outside(PROGRAMS[name], LEAVES, rtol=1e-7)


@pytest.mark.filterwarnings("default")
def test_over_processes() -> None:
    check_processes(PROGRAMS, LEAVES)


def smooth(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * weight) + x.pow(3) * 0.1


def over_workers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = bh.rpc_sync(1, smooth, args=(x, weight))
    return bh.rpc_sync(2, smooth, args=(y, weight)) * y


def test_gradcheck() -> None:
    inputs = vector(0.3, -1.2), vector(1.5, 0.4)
    with bh.cluster(3):
        assert torch.autograd.gradcheck(over_workers, inputs, check_batched_grad=False)
        assert torch.autograd.gradgradcheck(over_workers, inputs)


def test_hessian() -> None:
    a, weight = vector(0.3, -1.2), vector(1.5, 0.4).detach()
    with bh.cluster(3):
        found = torch.autograd.functional.hessian(lambda x: over_workers(x, weight).sum(), a.detach())

    def local(x: torch.Tensor) -> torch.Tensor:
        y = smooth(x, weight)
        return (smooth(y, weight) * y).sum()

    torch.testing.assert_close(found, torch.autograd.functional.hessian(local, a.detach()))
