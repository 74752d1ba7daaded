"""Hooks of every kind, on every kind of tensor, fire as often as in plain autograd, with the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import backhaul as bh

from .worlds import World, check_outside, vector
from .worlds import check as check_once

Check = Callable[..., None]

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # plain autograd, with create_graph

LEAVES = {
    "a": vector(0.3, -1.2, 2.0),  # a and b are used by the driver
    "b": vector(1.5, 0.4, -0.7),
    "c": vector(-0.2, 0.9, 1.1),  # c and d by worker 1
    "d": vector(0.8, -0.5, 0.6),
    "e": vector(0.1, 1.3, -0.9),  # e by worker 2
}


def by(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.tanh(x) * world.leaves[name]


def sine(world: World, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def bend(world: World, key: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A nonlinear hook: its result shows whether it got a partial sum."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        world.saw(key, grad)
        return grad + 0.1 * torch.sin(grad)

    return hook


# Shapes of graphs. Each calls ``world.hang`` with the values it makes, before they are used further.


def one_call(world: World) -> torch.Tensor:
    x = torch.sin(world.a) * world.b
    world.hang("x", x)
    y = world.call(1, serve, x, "c")
    world.hang("y", y)
    return (x * y).sum()


def serve(world: World, x: torch.Tensor, *names: str) -> torch.Tensor:
    key = "".join(names)
    world.hang(f"received for {key}", x)
    u = torch.tanh(x)
    world.hang(f"made for {key}", u)
    for name in names:
        x = u * world.leaves[name] + x
    return x


def shared(world: World) -> torch.Tensor:
    """One value goes three ways, two of them through calls; leaves that several calls reach."""
    x = torch.sin(world.a) * world.b
    world.hang("x", x)
    y, z = world.call(1, serve, x, "c", "d"), world.call(2, serve, x * 2, "e")
    world.hang("y", y)
    return (y * z * x * world.a * world.call(1, serve, world.b, "d")).sum()


def circle(world: World) -> torch.Tensor:
    """The gradient of ``x`` is complete only after the gradients of all results computed from it."""
    first = world.call(1, serve, world.a, "c")
    x = first * world.b
    world.hang("x", x)
    second = world.call(1, serve, x, "d")
    world.hang("second", second)
    return (x * world.call(2, serve, second + x, "e") * world.call(1, serve, second, "c", "d")).sum()


SHAPES = pytest.mark.parametrize("shape", [one_call, shared, circle])


def twice(world: World, shape: Any) -> None:
    """Two passes over one graph."""
    loss = shape(world)
    world.backward(loss, retain_graph=True)
    world.backward(loss)


def hang_nothing(key: str, tensor: torch.Tensor) -> None:
    """No hooks on values."""


@SHAPES
def test_tensor_hooks(check: Check, shape: Any) -> None:
    def program(world: World) -> None:
        world.hang = lambda key, tensor: tensor.register_hook(bend(world, key))
        twice(world, shape)

    check(program, LEAVES)


@SHAPES
def test_tensor_hooks_on_leaves(check: Check, shape: Any) -> None:
    """A leaf that many sources reach: its hook sees their sum, once."""

    def program(world: World) -> None:
        world.hang = hang_nothing
        for name, leaf in world.leaves.items():
            leaf.register_hook(bend(world, name))
        twice(world, shape)

    check(program, LEAVES)


@SHAPES
def test_hooks_registered_after_the_call(check: Check, shape: Any) -> None:
    """Later changes of a sent value do not affect the message, but hooks on it do."""

    def program(world: World) -> None:
        values: list[tuple[str, torch.Tensor]] = []
        world.hang = lambda key, tensor: values.append((key, tensor))
        loss = shape(world)
        for key, tensor in values:
            tensor.register_hook(bend(world, key))
        world.backward(loss)

    check(program, LEAVES)


@SHAPES
def test_hooks_that_are_removed(check: Check, shape: Any) -> None:
    def program(world: World) -> None:
        handles: list[Any] = []
        world.hang = lambda key, tensor: handles.append(tensor.register_hook(bend(world, key)))
        handles += [leaf.register_hook(bend(world, name)) for name, leaf in world.leaves.items()]
        loss = shape(world)
        world.backward(loss, retain_graph=True)
        for handle in handles:
            handle.remove()
        world.backward(loss)

    check(program, LEAVES)


@SHAPES
def test_node_hooks(check: Check, shape: Any) -> None:
    """Hooks after and before each node of the path."""

    def program(world: World) -> None:
        def hang(key: str, tensor: torch.Tensor) -> None:
            node = tensor.grad_fn
            if node.name().endswith("::Error") or node.name().startswith("Clone"):
                return  # the node of a call differs in the two worlds

            def after(outputs: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
                for grad in (*outputs, *inputs):
                    world.saw(f"after {key}", grad)
                return tuple(None if grad is None else grad + 0.1 * torch.sin(grad) for grad in outputs)

            def before(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
                for grad in inputs:
                    world.saw(f"before {key}", grad)
                return tuple(None if grad is None else grad * 1.1 for grad in inputs)

            node.register_hook(after)
            node.register_prehook(before)

        world.hang = hang
        twice(world, shape)

    check(program, LEAVES)


@SHAPES
@pytest.mark.parametrize("which", ["hook", "prehook", "both"])
def test_hooks_on_accumulation_nodes(check: Check, shape: Any, which: str) -> None:
    """The node runs, once for a pass, and the hooks before it may change what it gets."""

    def program(world: World) -> None:
        world.hang = hang_nothing
        nodes = [get_gradient_edge(leaf).node for leaf in world.leaves.values()]
        for name, node in zip(world.leaves, nodes, strict=True):
            if which != "hook":
                node.register_prehook(lambda inputs, name=name: (bend(world, f"before {name}")(inputs[0]),))
            if which != "prehook":
                node.register_hook(lambda _, inputs, name=name: world.saw(f"after {name}", inputs[0]))
        twice(world, shape)
        del nodes

    check(program, LEAVES)


@SHAPES
def test_post_accumulate_grad_hooks(check: Check, shape: Any) -> None:
    """They see the whole gradient so far in ``.grad`` and may change it."""

    def program(world: World) -> None:
        world.hang = hang_nothing
        for name, leaf in world.leaves.items():

            def hook(leaf: torch.Tensor, name: str = name) -> None:
                world.saw(name, leaf.grad)
                leaf.grad = leaf.grad * 0.5

            leaf.register_post_accumulate_grad_hook(hook)
        twice(world, shape)

    check(program, LEAVES)


def test_all_hooks_of_a_leaf_together(check: Check) -> None:
    def program(world: World) -> None:
        world.hang = hang_nothing
        node = get_gradient_edge(world.d).node
        node.register_hook(lambda _, inputs: world.saw("node", inputs[0]))
        world.d.register_hook(bend(world, "tensor"))
        world.d.register_post_accumulate_grad_hook(lambda leaf: world.saw("after", leaf.grad))
        twice(world, shared)
        del node

    check(program, LEAVES)


def test_an_optimizer_inside_the_backward_pass() -> None:
    """The common use: step each weight and drop its gradient as soon as the gradient is there."""

    def step(leaf: torch.Tensor) -> None:
        with torch.no_grad():
            leaf -= 0.1 * leaf.grad
        leaf.grad = None

    def program(world: World) -> None:
        for leaf in world.leaves.values():
            leaf.register_post_accumulate_grad_hook(step)
        world.hang = hang_nothing
        for _ in range(3):
            world.backward(one_call(world))
        for name, leaf in world.leaves.items():
            world.saw(name, leaf)

    check_once(program, LEAVES)
    check_once(program, LEAVES, accumulate="grad")
    check_outside(program, LEAVES)


def fire(world: World, mode: str, grads: Any) -> None:
    """What a multi-grad hook does: in mode any it gets the one gradient that came first, whichever."""
    world.saw("fired")
    for number, grad in enumerate(grads if mode == "all" else ()):
        world.saw(f"gradient {number}", grad)


@SHAPES
@pytest.mark.parametrize("mode", ["all", "any"])
def test_multi_grad_hooks_on_values(check: Check, shape: Any, mode: Any) -> None:
    """Values of one worker; they fire when the gradients of all are there, or of any."""

    def program(world: World) -> None:
        values: dict[str, torch.Tensor] = {}
        world.hang = values.__setitem__
        loss = shape(world)
        here = [values[key] for key in ("x", "y", "second") if key in values]
        assert len(here) == 2
        register_multi_grad_hook(here, lambda grads: fire(world, mode, grads), mode=mode)
        world.backward(loss, retain_graph=True)
        world.backward(loss)

    check(program, LEAVES)


@SHAPES
@pytest.mark.parametrize("mode", ["all", "any"])
@pytest.mark.parametrize("names", ["ab", "cd"])
def test_multi_grad_hooks_on_leaves(check: Check, shape: Any, mode: Any, names: str) -> None:
    """Leaves of one worker, reached by one source or by several."""

    def program(world: World) -> None:
        world.hang = hang_nothing
        leaves = [world.leaves[name] for name in names]
        register_multi_grad_hook(leaves, lambda grads: fire(world, mode, grads), mode=mode)
        twice(world, shape)

    check(program, LEAVES)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_multi_grad_hook_over_sources_that_share_nothing_else(check: Check, mode: Any) -> None:
    """Two calls to one worker, each with a leaf of its own there."""

    def program(world: World) -> None:
        register_multi_grad_hook([world.c, world.d], lambda grads: fire(world, mode, grads), mode=mode)
        world.backward((world.call(1, by, world.a, "c") * world.call(1, by, world.a, "d")).sum())

    check(program, LEAVES)


@SHAPES
def test_retain_grad(check: Check, shape: Any) -> None:
    def program(world: World) -> None:
        values: dict[str, torch.Tensor] = {}

        def hang(key: str, tensor: torch.Tensor) -> None:
            tensor.retain_grad()
            values[key] = tensor

        world.hang = hang
        world.backward(shape(world))
        for key, tensor in values.items():
            world.saw(key, tensor.grad)

    check(program, LEAVES)


def test_the_hook_of_one_tensor_is_not_called_for_another_of_its_message(check: Check) -> None:
    """Two tensors of one message: only the hook of the one that gets a gradient fires."""

    def program(world: World) -> None:
        first, second = world.call(1, two, world.a, world.b)
        first.register_hook(lambda grad: world.saw("first", grad))
        second.register_hook(lambda grad: world.saw("second", grad))
        world.backward(first.sum())

    check(program, LEAVES)


def two(world: World, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.register_hook(lambda grad: world.saw("x", grad))
    y.register_hook(lambda grad: world.saw("y", grad))
    return torch.sin(x), torch.sin(y)


def test_hooks_in_fast_mode(check_context: Check) -> None:
    def program(world: World) -> None:
        world.hang = lambda key, tensor: tensor.register_hook(bend(world, key))
        for name, leaf in world.leaves.items():
            leaf.register_hook(bend(world, name))
        world.backward(circle(world))

    check_context(program, LEAVES, mode="fast")


@SHAPES
def test_hooks_under_create_graph(check: Check, shape: Any) -> None:
    def program(world: World) -> None:
        world.hang = lambda key, tensor: tensor.register_hook(bend(world, key))
        world.b.register_hook(bend(world, "b"))
        world.backward(shape(world), create_graph=True)
        world.backward(world.grad(world.a).pow(2).sum())

    check(program, LEAVES)


# What a hook may do.


def test_a_hook_knows_its_worker_and_may_call_others() -> None:
    def program(world: World) -> None:
        y = world.call(1, ask_in_a_hook, world.a)
        y.register_hook(lambda grad: note_worker(world, "hook on the driver"))
        world.backward(y.sum())
        if world.remote:
            names = {what: [int(seen) for seen in world.events.pop(what)] for what in list(world.events)}
            assert names == {"hook": [1], "called by the hook": [2], "hook on the driver": [0]}
        world.events.clear()

    check_once(program, {"a": LEAVES["a"]})
    check_outside(program, {"a": LEAVES["a"]})


def note_worker(world: World, key: str) -> None:
    number = bh.get_worker_info().id if world.remote else -1
    world.saw(key, torch.tensor(number))


def ask_in_a_hook(world: World, x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        note_worker(world, "hook")
        world.call(2, note_worker, "called by the hook")

    x.register_hook(hook)
    return x * 2


def test_a_backward_function_knows_its_worker_too() -> None:
    """In a circle and beside one."""

    def program(world: World) -> None:
        first = world.call(1, sine, world.a)
        x = first * 2
        second = world.call(1, ask_in_a_hook, x)
        world.backward((x * second).sum())
        if world.remote:
            assert [int(seen) for seen in world.events["hook"]] == [1]
        world.events.clear()

    check_once(program, {"a": LEAVES["a"]})
    check_outside(program, {"a": LEAVES["a"]})
