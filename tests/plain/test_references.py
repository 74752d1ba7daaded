"""Values that stay on a worker, with their graphs: RRefs outside contexts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import backhaul as bh
from tests.autograd.worlds import World, check_outside, check_processes, copied, vector

LEAVES = {
    "a": vector(0.3, -1.2, 2.0),  # a and b are used by the driver
    "b": vector(1.5, 0.4, -0.7),
    "c": vector(-0.2, 0.9, 1.1),  # c by worker 1
    "d": vector(0.8, -0.5, 0.6),  # d by worker 2
}


class Here:
    """In one process: what an RRef is over workers."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def to_here(self) -> Any:
        return copied(self.value)


def refer(world: World, to: int, function: Any, *args: Any) -> Any:
    if world.remote:
        return bh.remote(to, function, args=(world, *args))
    return Here(function(world, *copied(args)))


def value_of(reference: Any) -> Any:
    """The value, on the worker that has it; a copy on another."""
    if isinstance(reference, Here):
        return reference.value
    return reference.local_value() if reference.is_owner() else reference.to_here()


def by(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.tanh(x) * world.leaves[name]


def use(world: World, reference: Any, name: str) -> torch.Tensor:
    return value_of(reference) * world.leaves[name]


def to_here(world: World) -> None:
    world.backward((refer(world, 1, by, world.a, "c").to_here() * world.b).sum())


def method(world: World) -> None:
    reference = refer(world, 1, by, world.a, "c")
    y = reference.rpc_sync().mul(2) if world.remote else copied(reference.value.mul(2))
    z = reference.rpc_async().sin().wait() if world.remote else copied(reference.value.sin())
    u = reference.remote().cos().to_here() if world.remote else copied(reference.value.cos())
    world.backward((y * z + u).sum())


def used_by_several(world: World) -> None:
    """The owner, two other workers and the caller use one value; its graph is one."""
    reference = refer(world, 1, by, world.a, "c")
    x = reference.to_here()
    y, z = world.call(1, use, reference, "c"), world.call(2, use, reference, "d")
    world.backward((x * y * z * world.call(2, use, reference, "d")).sum())


def passed_on(world: World) -> None:
    """A worker makes a reference to a third one's value, and returns it."""
    reference = world.call(1, make_elsewhere, world.a)
    world.backward((reference.to_here() * world.call(1, use, reference, "c")).sum())


def make_elsewhere(world: World, x: torch.Tensor) -> Any:
    return refer(world, 2, by, x * world.c, "d")


def used_in_several_steps(world: World) -> None:
    """The value's graph is kept for each pass but the last."""
    reference = refer(world, 1, by, world.a, "c")
    for _ in range(2):
        world.backward(world.call(2, use, reference, "d").sum(), retain_graph=True)
    world.backward((reference.to_here() * world.b).sum())
    with pytest.raises(RuntimeError, match=r"second time|no longer has the graph"):
        world.backward(reference.to_here().sum())


PROGRAMS = {
    program.__name__: program for program in (to_here, method, used_by_several, passed_on, used_in_several_steps)
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_one_process(name: str) -> None:
    check_outside(PROGRAMS[name], LEAVES)


def test_over_processes() -> None:
    check_processes(PROGRAMS, LEAVES)
