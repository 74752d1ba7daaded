"""Kinds of tensors and of operations: sparse, complex and half gradients, in-place changes, views, custom functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

import backhaul as bh

from .worlds import World, vector

Check = Callable[..., None]

A = vector(0.3, -1.2, 2.0)
B = vector(1.5, 0.4, -0.7)
C = vector(-0.2, 0.9, 1.1)


def by(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.tanh(x) * world.leaves[name]


def sine(world: World, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


# Kinds of gradients.

TABLE = torch.arange(12, dtype=torch.float64).reshape(4, 3).requires_grad_()


def look_up(world: World, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(index, world.table, sparse=True) * x


def test_sparse_gradients_of_a_remote_embedding(check: Check) -> None:
    """In several calls, so that sparse gradients are added to sparse ones."""

    def program(world: World) -> None:
        y = world.call(1, look_up, torch.tensor([0, 2, 2]), world.a)
        z = world.call(1, look_up, torch.tensor([1, 2]), world.a)
        world.backward(y.sum() + z.pow(2).sum())

    check(program, {"table": TABLE, "a": A})


def look_up_in(world: World, index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(index, table, sparse=True).sin()


def test_sparse_gradients_travel(check: Check) -> None:
    """The table is sent, so its gradient comes back in a message."""

    def program(world: World) -> None:
        y = world.call(1, look_up_in, torch.tensor([0, 2, 2]), world.table)
        z = world.call(2, look_up_in, torch.tensor([3]), world.table)
        world.backward(y.sum() + z.sum())

    check(program, {"table": TABLE})


def test_sparse_and_dense_gradients_of_one_table(check: Check) -> None:
    def program(world: World) -> None:
        y = world.call(1, look_up, torch.tensor([0, 2, 2]), world.a)
        z = world.call(1, use_densely)
        w = world.call(1, look_up, torch.tensor([1]), world.a)
        world.backward(y.sum() + z.sum() + w.sum())

    check(program, {"table": TABLE, "a": A})


def use_densely(world: World) -> torch.Tensor:
    return world.table.sin()


def test_a_sparse_leaf_that_is_sent() -> None:
    leaf = torch.eye(3).to_sparse().requires_grad_()
    with bh.cluster(2), bh.context() as context:
        made = bh.rpc_sync("worker1", torch.add, args=(leaf, leaf))
        bh.backward(context, [torch.sparse.sum(made)])
        found = bh.get_gradients(context)[leaf]
    assert torch.equal(found.to_dense(), 2 * torch.eye(3))


def test_a_sparse_module() -> None:
    torch.manual_seed(0)
    module, index = torch.nn.EmbeddingBag(10, 3, mode="sum", sparse=True), torch.tensor([[1, 2], [2, 9]])
    with bh.cluster(2), bh.context() as ctx:
        ctx.backward(bh.rpc_sync(1, module, args=(index,)).pow(2).sum())
        found = ctx.grads[module.weight]
    module(index).pow(2).sum().backward()
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), module.weight.grad.to_dense())


def turn(world: World, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return z.conj() * world.w, torch.view_as_real(z).sum(-1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex(check: Check, dtype: torch.dtype) -> None:
    def program(world: World) -> None:
        z = torch.exp(1j * world.z)
        y, real = world.call(1, turn, z.conj())
        world.backward((y * z.conj()).abs().sum() + real.pow(2).sum())

    leaves = {
        "z": torch.tensor([1 + 2j, -0.5j, 0.3], dtype=dtype, requires_grad=True),
        "w": torch.tensor([0.2j, 1 - 1j, 2], dtype=dtype, requires_grad=True),
    }
    check(program, leaves, rtol=1e-5, atol=1e-5)


def test_complex_roots(check: Check) -> None:
    def program(world: World) -> None:
        y, _ = world.call(1, turn, world.z)
        world.backward([y], grad_tensors=[torch.tensor([1j, 2.0, 1 - 1j], dtype=torch.complex128)])

    leaves = {name: torch.tensor([1 + 2j, -0.5j, 0.3], dtype=torch.complex128, requires_grad=True) for name in "zw"}
    check(program, leaves)


def test_a_complex_number_needs_a_gradient_of_its_own() -> None:
    """As in plain autograd: a complex root needs a gradient."""
    z = torch.tensor(1 + 2j, requires_grad=True)
    with pytest.raises(RuntimeError, match="real scalar"):
        (z * 2).backward()
    with bh.cluster(2), bh.context() as ctx:
        y = bh.rpc_sync(1, torch.mul, args=(z, 2))
        with pytest.raises((ValueError, RuntimeError)):
            ctx.backward(y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_types(check: Check, dtype: torch.dtype) -> None:
    def program(world: World) -> None:
        x = world.a * 2
        y = world.call(1, by, x, "b")
        z = world.call(2, mixed, y, x.to(torch.float32))
        world.backward((y.float() * z).sum())

    leaves = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in {"a": A, "b": B}.items()}
    check(program, leaves, rtol=1e-2, atol=1e-2)


def mixed(world: World, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.float() * y


def test_gradients_that_are_not_contiguous(check: Check) -> None:
    def program(world: World) -> None:
        y = world.call(1, transpose, world.m)
        world.backward((y[:, ::2].expand(2, -1, -1) * world.m[::2].T).sum())

    check(program, {"m": torch.arange(12.0, dtype=torch.float64).reshape(4, 3).requires_grad_()})


def transpose(world: World, x: torch.Tensor) -> torch.Tensor:
    return x.T * 2


def test_empty_and_scalar_tensors(check: Check) -> None:
    def program(world: World) -> None:
        empty, scalar = world.call(1, sine, world.none), world.call(1, sine, world.one)
        world.backward([empty.sum(), scalar])

    none = torch.empty((0, 3), dtype=torch.float64, requires_grad=True)
    check(program, {"none": none, "one": torch.tensor(0.7, dtype=torch.float64, requires_grad=True)})


# In-place changes and views.


def change(world: World, x: torch.Tensor) -> torch.Tensor:
    x.mul_(world.b).add_(1)
    return x


def test_received_arguments_changed_in_place(check: Check) -> None:
    def program(world: World) -> None:
        x = torch.sin(world.a)
        world.backward((world.call(1, change, x) * x).sum())

    check(program, {"a": A, "b": B})


def test_received_results_changed_in_place(check: Check) -> None:
    def program(world: World) -> None:
        y = world.call(1, sine, world.a)
        y.exp_()
        world.backward((y * world.b).sum())

    check(program, {"a": A, "b": B})


def change_both(world: World, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.mul_(2)
    y.mul_(x)
    return x, y


def test_tensors_of_one_message_changed_in_place(check: Check) -> None:
    def program(world: World) -> None:
        first, second = world.call(1, change_both, world.a * 1, world.b)
        first.add_(second)
        second.mul_(world.c)
        world.backward((first * second).sum())

    check(program, {"a": A, "b": B, "c": C})


def change_views(world: World, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x[:2].mul_(y[1:].clone())
    view = y.view(3, 1)
    view.add_(1)
    y[0] = x[2]
    return x, view


@pytest.mark.parametrize("both", [True, False])
def test_views_of_received_tensors_changed_in_place(check: Check, both: bool) -> None:
    """In a message with one tensor, or with several."""

    def program(world: World) -> None:
        if both:
            first, second = world.call(1, change_views, torch.sin(world.a), world.b)
        else:
            first, second = world.call(1, change_views, torch.sin(world.a), C), world.call(1, change_a_view, world.b)
            first = first[0]
        first[1:].mul_(second.flatten()[-1:].clone())
        world.backward((first.sum() * second).sum())

    check(program, {"a": A, "b": B})


def change_a_view(world: World, x: torch.Tensor) -> torch.Tensor:
    x[1:].exp_()
    return x[:2]


def test_a_value_changed_in_place_after_it_was_sent(check: Check) -> None:
    """A message has the values from when it was sent."""

    def program(world: World) -> None:
        x = world.a * 2
        y = world.call(1, by, x, "b")
        x.mul_(3)
        z = world.call(1, by, x, "b")
        world.backward((x * y * z).sum())

    check(program, {"a": A, "b": B})


def test_views_of_one_memory_in_one_message() -> None:
    """They share memory on the other worker, and each is its own part of the graph."""
    a = A.detach().clone().requires_grad_()
    with bh.cluster(2), bh.context() as ctx:
        x = torch.sin(a)
        y = bh.rpc_sync(1, join, args=(x, x[1:]))
        ctx.backward(y.sum())
        found = ctx.grads[a]
    x = torch.sin(a)
    join(x, x[1:]).sum().backward()
    torch.testing.assert_close(found, a.grad)


def join(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return x.sum() * part.exp()


def test_views_of_one_memory_changed_in_place() -> None:
    """Plain autograd refuses this because a saved value is changed. Here no gradient may be wrong."""
    a = A.detach().clone().requires_grad_()
    x = a * 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        change_one_of_two(x, x[1:]).backward()
    with bh.cluster(2), bh.context() as ctx:
        x = a * 1
        with contextlib.suppress(RuntimeError):
            ctx.backward(bh.rpc_sync(1, change_one_of_two, args=(x, x[1:])))
        found = ctx.grads.get(a)
    if found is None:
        return
    change_one_of_two(a.clone(), a[1:].clone()).backward()
    torch.testing.assert_close(found, a.grad)


def change_one_of_two(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    y = part * part
    x.mul_(2)
    return y.sum() + x.sum()


def test_detach(check: Check) -> None:
    def program(world: World) -> None:
        x = torch.sin(world.a)
        y = world.call(1, half_detached, x, x.detach())
        world.backward((y * y.detach() * x).sum())

    check(program, {"a": A, "b": B})


def half_detached(world: World, x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
    assert not frozen.requires_grad
    return x.detach() * world.b + frozen * x


# Custom functions.


class Bent(torch.autograd.Function):
    """Its backward is nonlinear, so it shows partial sums. It can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, world: World, key: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.world, ctx.key = world, key
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.world.saw(ctx.key, grad)
        return 2 * x * grad + 0.1 * torch.tanh(grad), None, None


class Once(torch.autograd.Function):
    """Cannot be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.cos() * grad


class Selective(torch.autograd.Function):
    """Has several inputs and outputs, some without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, world: World) -> Any:
        ctx.set_materialize_grads(False)
        ctx.world = world
        third = (z > 0).to(z.dtype)
        ctx.mark_non_differentiable(third)
        return x + y, y * 2 + z, third

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any, third: Any) -> Any:
        ctx.world.saw(f"got {first is not None} {second is not None} {third is not None}")
        return first, None, None if second is None else second * 3, None


def bent(world: World, x: torch.Tensor, key: str) -> torch.Tensor:
    return Bent.apply(x, world, key) * world.b


def test_functions_that_are_not_linear(check: Check) -> None:
    """Where several gradients meet, on both workers, inside and outside a circle."""

    def program(world: World) -> None:
        x = Bent.apply(world.a, world, "x")
        y, z = world.call(1, bent, x, "y"), world.call(2, sine, x)
        u = Bent.apply(world.call(1, sine, y), world, "u")
        v = world.call(2, sine, u)
        world.backward((x * y * z * u * v).sum())

    check(program, {"a": A, "b": B})


def test_functions_that_can_be_differentiated_once(check: Check) -> None:
    def program(world: World) -> None:
        x = Once.apply(world.a)
        y = world.call(1, once, x)
        world.backward((y * x).sum())

    check(program, {"a": A})


def once(world: World, x: torch.Tensor) -> torch.Tensor:
    return Once.apply(x) + x


def test_a_function_differentiated_once_too_often() -> None:
    a = A.detach().clone().requires_grad_()
    with bh.cluster(2), bh.context() as ctx:
        y = bh.rpc_sync(1, once, args=(None, a))
        ctx.backward(y.pow(2).sum(), create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            ctx.backward(ctx.grads[a].pow(2).sum())


@pytest.mark.parametrize("used", [(0,), (1,), (2, 0), (0, 1), (1, 1)])
def test_functions_that_return_none(check: Check, used: tuple[int, ...]) -> None:
    def program(world: World) -> None:
        outputs = world.call(1, select, world.a * 1, world.b, world.c)
        here = Selective.apply(outputs[0], outputs[1], world.c, world)
        world.backward(sum((outputs[number] * here[number] * 2).sum() for number in used))

    check(program, {"a": A, "b": B, "c": C})


def select(world: World, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
    return Selective.apply(x, y, z, world)


def test_a_gradient_that_is_none_on_the_way(check: Check) -> None:
    """A message whose gradients are all None still ends its part of the pass."""

    def program(world: World) -> None:
        x = torch.sin(world.b)
        y = world.call(1, sine, x)
        first, _, _ = Selective.apply(world.a, y, world.c, world)
        z = world.call(2, sine, first)
        world.backward((z * first).sum())

    check(program, {"a": A, "b": B, "c": C})


def test_functions_with_saved_tensor_hooks(check: Check) -> None:
    def program(world: World) -> None:
        world.backward(world.call(1, packed, world.a).sum())

    check(program, {"a": A, "b": B})


def packed(world: World, x: torch.Tensor) -> torch.Tensor:
    def unpack(value: torch.Tensor) -> torch.Tensor:
        world.saw("unpacked")
        return value

    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
        return (x * world.b).exp()
