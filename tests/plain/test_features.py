"""``torch.autograd`` over workers: the arguments of ``backward`` and ``grad``, and graphs that live several steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import backhaul as bh
from tests.autograd.worlds import World, check_outside, check_processes, vector

LEAVES = {
    "a": vector(0.3, -1.2, 2.0),  # a and b are used by the driver
    "b": vector(1.5, 0.4, -0.7),
    "c": vector(-0.2, 0.9, 1.1),  # c by worker 1
    "d": vector(0.8, -0.5, 0.6),  # d by worker 2
}


def by(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.tanh(x) * world.leaves[name]


def two(world: World, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.sin(x) * world.c, torch.cos(y)


def through_both(world: World, x: torch.Tensor) -> torch.Tensor:
    return world.call(2, by, by(world, x, "c"), "d") * x


def see(world: World, what: str, found: Any) -> None:
    for number, each in enumerate(found):
        world.saw(f"{what} {number}", each)


# torch.autograd.grad.


def grad_of_leaves(world: World) -> None:
    """It gives gradients of leaves here, and leaves all ``.grad`` alone."""
    y = world.call(1, through_both, world.a * world.b)
    see(world, "first", torch.autograd.grad(y.sum(), [world.a, world.b], retain_graph=True))
    see(world, "second", torch.autograd.grad(y.sum(), {"b": world.b, "a": world.a}.values()))


def grad_of_values(world: World) -> None:
    """Of a sent, of a received and of a local tensor, of an edge, and of one tensor twice."""
    h = torch.sin(world.a)
    y = world.call(1, through_both, h)
    z = y * world.call(2, by, y, "d") * h
    wanted = [h, y, z, world.a, get_gradient_edge(y), h]
    see(world, "found", torch.autograd.grad(z.sum(), wanted))


def grad_with_seeds(world: World) -> None:
    y, z = world.call(1, two, world.a, world.b)
    seeds = [torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)]
    see(world, "found", torch.autograd.grad([y, z.sum()], [world.a, world.b], grad_outputs=seeds))


def grad_of_unused(world: World) -> None:
    y, _ = world.call(1, two, world.a, world.b)
    see(world, "allowed", torch.autograd.grad(y.sum(), [world.a, world.b], allow_unused=True, retain_graph=True))
    see(world, "zeros", torch.autograd.grad(y.sum(), [world.b, world.a], materialize_grads=True, retain_graph=True))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(y.sum(), [world.a, world.b])


# torch.autograd.backward.


def backward_of_several(world: World) -> None:
    y, z = world.call(1, two, world.a, world.b)
    torch.autograd.backward([y, z.sum(), z.prod()], [torch.ones_like(y) * 2, None, torch.tensor(0.5).double()])


def backward_of_edges(world: World) -> None:
    y = world.call(1, through_both, world.a)
    torch.autograd.backward([get_gradient_edge(y)], [torch.ones_like(y)])


def backward_to_inputs(world: World) -> None:
    """Leaves and values get ``.grad``; nothing else does."""
    h = world.a * world.b
    y = world.call(1, through_both, h)
    (y * world.call(2, by, y, "d")).sum().backward(inputs=[world.a, h, y])
    see(world, "values", [h.grad, y.grad])


def backward_to_retained(world: World) -> None:
    h = world.a * world.b
    y = world.call(1, through_both, h)
    h.retain_grad()
    y.retain_grad()
    (y * h).sum().backward()
    see(world, "values", [h.grad, y.grad])


# Several passes over one graph.


def several_losses(world: World) -> None:
    """They share the graphs of all workers."""
    h = world.call(1, through_both, world.a)
    world.backward((h * world.b).sum(), retain_graph=True)
    world.backward(world.call(2, by, h, "d").sum(), retain_graph=True)
    world.backward(h.prod())


def losses_without_retain(world: World) -> None:
    """The second pass says what torch says, and then the graph is gone everywhere."""
    h = world.call(1, through_both, world.a)
    first, second = (h * world.b).sum(), h.sin().sum()
    world.backward(first)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            world.backward(second)


def gradient_accumulation(world: World) -> None:
    for number in range(4):
        loss = (world.call(1, through_both, world.a * number) * world.b).sum() / 4
        world.backward(loss)
    for leaf in (world.a, world.b):
        leaf.grad = None
    world.backward(world.call(1, through_both, world.a * world.b).sum())


def graphs_side_by_side(world: World) -> None:
    """Passes run in another order than their forwards; one graph is dropped."""
    losses = [world.call(1, through_both, world.a * number).sum() for number in range(4)]
    for number in (2, 0, 3):
        world.backward(losses[number])


def truncated_in_time(world: World) -> None:
    """Hidden state goes from step to step. Every second step cuts it off."""
    h = world.a * 0
    for step in range(6):
        h = torch.tanh(world.call(1, through_both, h + world.b))
        if step % 2:
            world.backward(h.sum())
            h = h.detach()


def over_two_steps(world: World) -> None:
    """Truncated backward of two steps: each pass goes back through the graph of the step before too."""
    kept = [world.a * 0]
    for _ in range(4):
        h = kept[-1].detach().requires_grad_()
        middle = world.call(1, through_both, h + world.b)
        end = world.call(2, by, middle * world.a, "d")
        world.saw("step", torch.autograd.grad(end.sum(), h, retain_graph=True)[0])
        world.backward(end.sum(), retain_graph=True)
        kept.append(middle)
        world.backward(kept[-1].prod())


def keep(world: World, x: torch.Tensor) -> None:
    world.state = by(world, x, "c")


def state(world: World) -> torch.Tensor:
    world.state = torch.tanh(world.state * world.c)
    return world.state * 1


def forget(world: World) -> None:
    world.state = None


def state_of_a_worker(world: World) -> None:
    """The hidden state stays on a worker, with its graph."""
    world.call(1, keep, world.a)
    losses = [world.call(1, state).sum() for _ in range(3)]
    world.backward(losses[1], retain_graph=True)
    world.backward(losses[0] + losses[2])
    world.call(1, forget)


# Errors.


def changed_in_place(world: World) -> None:
    """A value that its graph needs was changed on the worker that has it, after it was sent, or here."""
    h = world.a.exp()
    y = world.call(1, by, h, "c")
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        world.backward(y.sum())
    loss = world.call(1, spoil, world.a)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        world.backward(loss.sum())


def spoil(world: World, x: torch.Tensor) -> torch.Tensor:
    y = (x * world.c).exp()
    z = y * 2
    with torch.no_grad():
        y.mul_(0)
    return z


PROGRAMS = {
    program.__name__: program
    for program in (
        grad_of_leaves,
        grad_of_values,
        grad_with_seeds,
        grad_of_unused,
        backward_of_several,
        backward_of_edges,
        backward_to_inputs,
        backward_to_retained,
        several_losses,
        losses_without_retain,
        gradient_accumulation,
        graphs_side_by_side,
        truncated_in_time,
        over_two_steps,
        state_of_a_worker,
        changed_in_place,
    )
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_one_process(name: str) -> None:
    check_outside(PROGRAMS[name], LEAVES)


def test_over_processes() -> None:
    check_processes(PROGRAMS, LEAVES)


# What cannot go to another worker says so.


def test_batched_gradients() -> None:
    a = vector(1.0, 2.0)
    with bh.cluster(2):
        y = bh.rpc_sync(1, torch.sin, args=(a,))
        with pytest.raises(bh.errors.BackhaulError, match=r"is_grads_batched.*remote_op"):
            torch.autograd.grad(y, a, torch.eye(2, dtype=torch.float64), is_grads_batched=True)
        with pytest.raises(bh.errors.BackhaulError, match=r"is_grads_batched.*remote_op"):
            torch.autograd.functional.jacobian(
                lambda x: bh.rpc_sync(1, torch.sin, args=(x,)), a.detach(), vectorize=True
            )
        found = torch.autograd.functional.jacobian(lambda x: bh.rpc_sync(1, torch.sin, args=(x,)), a.detach())
        torch.testing.assert_close(found, torch.diag(torch.cos(a.detach())))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by jacfwd
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.vmap])
def test_transforms(transform: Any) -> None:
    with bh.cluster(2), pytest.raises(Exception, match=r"remote_op|torch\.func"):
        transform(lambda x: bh.rpc_sync(1, torch.sin, args=(x,)).sum())(torch.ones(2))


def test_roots_without_a_graph() -> None:
    with bh.cluster(2):
        y = bh.rpc_sync(1, torch.sin, args=(vector(1.0),))
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.backward([y.sum(), torch.ones(())])
        with pytest.raises(RuntimeError, match="implicitly created only for scalar"):
            torch.stack([y, y]).backward()
