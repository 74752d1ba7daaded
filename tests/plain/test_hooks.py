"""Hooks of every kind outside contexts: each fires once, on its worker, with the gradients of one process.

``tests/autograd/test_hooks.py`` has more of them, which also run outside contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

import backhaul as bh
from tests.autograd.worlds import World, check_outside, check_processes, vector

LEAVES = {
    "a": vector(0.3, -1.2, 2.0),  # a and b are used by the driver
    "b": vector(1.5, 0.4, -0.7),
    "c": vector(-0.2, 0.9, 1.1),  # c by worker 1
    "d": vector(0.8, -0.5, 0.6),  # d by worker 2
}


def bend(world: World, key: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A nonlinear hook: its result shows whether it got a partial sum. It notes where it runs."""
    home = bh.get_worker_info().id if world.remote else -1

    def hook(grad: torch.Tensor) -> torch.Tensor:
        assert not world.remote or bh.get_worker_info().id == home
        world.saw(key, grad)
        return grad + 0.1 * torch.sin(grad)

    return hook


def serve(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
    """Hooks on a received tensor, on a value, on a leaf, and on a tensor that is sent back."""
    leaf = world.leaves[name]
    if not leaf._backward_hooks:
        leaf.register_hook(bend(world, f"leaf {name}"))
        leaf.register_post_accumulate_grad_hook(lambda leaf: world.saw(f"accumulated {name}", leaf.grad))
    x.register_hook(bend(world, f"received for {name}"))
    y = torch.tanh(x) * leaf
    y.register_hook(bend(world, f"made for {name}"))
    return y * 2 + x


def on_tensors(world: World) -> None:
    world.a.register_hook(bend(world, "leaf a"))
    x = torch.sin(world.a) * world.b
    x.register_hook(bend(world, "sent"))
    y = world.call(1, serve, x, "c")
    y.register_hook(bend(world, "received"))
    z = world.call(2, serve, y, "d") * world.call(1, serve, x, "c")
    for _ in range(2):
        world.backward((y * z * x).sum(), retain_graph=True)


def note_node(world: World, key: str, *grads: Any) -> None:
    for number, grad in enumerate(grads[-1]):
        world.saw(f"{key} {number}", grad)


def hooks_of_a_node(world: World, x: torch.Tensor) -> torch.Tensor:
    y = x * world.c
    node = y.grad_fn
    assert node is not None
    node.register_prehook(lambda grads: note_node(world, "before", grads))
    node.register_hook(lambda inputs, outputs: note_node(world, "after", inputs))
    return torch.exp(y)


def on_nodes(world: World) -> None:
    x = world.a * world.b
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(lambda grads: tuple(2 * grad for grad in grads))
    world.backward((world.call(1, hooks_of_a_node, x) * x).sum())


def several_at_once(world: World, x: torch.Tensor) -> torch.Tensor:
    y = x * world.c
    z = torch.exp(y)
    register_multi_grad_hook([x, y, z, world.c], lambda grads: note_node(world, "there", grads))
    return y + z


def on_several(world: World) -> None:
    x = world.a * world.b
    y = world.call(1, several_at_once, x)
    register_multi_grad_hook([x, y, world.a], lambda grads: note_node(world, "here", grads))
    register_multi_grad_hook([x, y], lambda grad: world.saw("any"), mode="any")
    world.backward((y * x).sum())


class Scale(torch.nn.Module):
    """A module with one weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.weight)


def hooked_module(world: World, leaf: torch.Tensor, key: str) -> Scale:
    module = Scale(leaf)

    def after(_: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        note_node(world, f"{key} inputs", inputs)
        note_node(world, f"{key} outputs", outputs)
        return tuple(None if grad is None else grad * 1.5 for grad in inputs)

    module.register_full_backward_hook(after)
    module.register_full_backward_pre_hook(lambda _, outputs: tuple(grad + 1 for grad in outputs))
    return module


def module_there(world: World, x: torch.Tensor) -> torch.Tensor:
    return hooked_module(world, world.c, "there")(x)


def on_modules(world: World) -> None:
    """Around a call, behind one, and on a worker."""
    module = hooked_module(world, world.b, "here")
    y = module(world.call(1, module_there, module(world.a * 1)))
    world.backward((y * y).sum())


def pack_there(world: World, x: torch.Tensor) -> torch.Tensor:
    with packing(world, "there"):
        return (x * world.c).exp()


def packing(world: World, key: str) -> saved_tensors_hooks:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        world.saw(f"packed {key}", tensor)
        return tensor.detach() * 1

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        world.saw(f"unpacked {key}", tensor)
        return tensor * 1.5

    return saved_tensors_hooks(pack, unpack)


def on_saved_tensors(world: World) -> None:
    """They hold for the code of their own worker only."""
    x = torch.sin(world.a)
    y = world.call(1, pack_there, x)
    with packing(world, "here"):
        z = y * x
    world.backward(z.sum())


PROGRAMS = {program.__name__: program for program in (on_tensors, on_nodes, on_several, on_modules, on_saved_tensors)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_one_process(name: str) -> None:
    check_outside(PROGRAMS[name], LEAVES)


def test_over_processes() -> None:
    check_processes(PROGRAMS, LEAVES)
