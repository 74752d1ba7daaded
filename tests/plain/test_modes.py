"""What is recorded, and what is not: grad modes, kinds of values, views and changes in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import backhaul as bh
from tests.autograd.worlds import World, check_outside, check_processes, expect_no_records, records_on, vector

LEAVES = {
    "a": vector(0.3, -1.2, 2.0),  # a and b are used by the driver
    "b": vector(1.5, 0.4, -0.7),
    "c": torch.nn.Parameter(vector(-0.2, 0.9, 1.1).detach()),  # c by worker 1
    "d": vector(0.8, -0.5, 0.6),  # d by worker 2
    "t": torch.arange(6.0, dtype=torch.float64).reshape(3, 2).requires_grad_(),  # t by the driver
}


def by(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.tanh(x) * world.leaves[name]


# Grad modes.


def not_here(world: World, mode: Any) -> torch.Tensor:
    with mode():
        return by(world, world.c * 2, "c") * 1


def in_no_grad(world: World, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results are made under ``no_grad``; the argument is not."""
    with torch.no_grad():
        first, second = by(world, x, "c"), x * 2
    return first, second


def modes_of_the_caller(world: World) -> None:
    """Nothing is recorded of the first call, on both sides; the second is recorded."""
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = world.call(1, by, world.a, "c")
        assert not y.requires_grad
        z = world.call(1, by, world.a, "c")
        assert z.requires_grad
        weight = y.clone() if y.is_inference() else y
        world.backward((weight * z).sum())


def modes_of_a_handler(world: World) -> None:
    assert not world.call(1, not_here, torch.no_grad).requires_grad
    first, second = world.call(1, in_no_grad, world.a)
    assert not first.requires_grad
    assert not second.requires_grad
    world.backward((first * world.b).sum())


def graded(world: World, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return by(world, x, "c")


def handler_that_enables(world: World) -> None:
    """A handler starts with grad mode on; the caller without it gets no graph."""
    with torch.no_grad():
        assert not world.call(1, graded, world.a).requires_grad


def frozen(world: World) -> None:
    """Arguments that need no gradient; a worker's leaf gets one nevertheless."""
    y = world.call(1, by, world.a.detach(), "c")
    world.backward((y * world.b).sum())
    world.a.requires_grad_(False)
    world.backward(world.call(1, by, world.a * world.b, "c").sum())
    world.a.requires_grad_(True)


# Kinds of values.


def mixed(world: World, x: torch.Tensor, which: torch.Tensor, flag: bool) -> dict[str, Any]:
    return {"picked": x[which] * world.c[which], "which": which + 1, "flag": flag, "bools": which > 0}


def integers(world: World) -> None:
    found = world.call(1, mixed, world.a, torch.tensor([2, 0, 0]), True)
    assert found["which"].tolist() == [3, 1, 1]
    assert found["bools"].tolist() == [True, False, False]
    assert not found["which"].requires_grad
    world.backward((found["picked"] * world.b[found["which"] - 1]).sum())


def spectrum(world: World, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.fft(x) * torch.view_as_complex(torch.stack([world.c, world.c.sin()], -1))


def complex_numbers(world: World) -> None:
    z = world.call(1, spectrum, torch.complex(world.a, world.b))
    world.backward(world.call(2, double, z).abs().pow(2).sum())


def double(world: World, x: torch.Tensor) -> torch.Tensor:
    return x * 2


def look_up(world: World, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(index, table, sparse=True)


def sparse_gradients(world: World) -> None:
    """A sparse gradient goes to another worker, and into ``.grad`` of a leaf here."""
    table = world.call(0, double, world.t)
    y = world.call(1, look_up, table, torch.tensor([0, 2, 2]))
    world.backward(y.pow(2).sum())


def several_kinds(world: World) -> None:
    y = world.call(1, double, world.a.half())
    z = world.call(2, double, world.b.bfloat16())
    world.backward((y.double() * z.double()).sum())


# Views, and changes in place.


def change(world: World, x: torch.Tensor) -> torch.Tensor:
    """A handler may change what it has received."""
    x.mul_(2)
    x[0] = world.c[0]
    x[1:].add_(world.c[1:])
    return x


def changed_on_both_sides(world: World) -> None:
    h = world.a * 1
    y = world.call(1, change, h)
    y.mul_(world.b)
    y[0] += h[2]
    world.backward((y * h).sum())


def changed_after_it_was_sent(world: World) -> None:
    """The worker has a copy. The gradient of what was sent is that of the value at that time."""
    h = world.a * world.b
    y = world.call(1, by, h, "c")
    h.mul_(3)
    world.backward((y * h).sum())


def views(world: World) -> None:
    h = torch.outer(world.a, world.b)
    first, second = world.call(1, double, h[0]), world.call(2, double, h.t()[1:, ::2])
    halves = world.call(1, split, h.flatten())
    world.backward(first.sum() * second.prod() + (halves[0] * halves[1][:4]).sum())


def split(world: World, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x[:4], x[4:]


def leaf_changed_later(world: World) -> None:
    """As an optimizer does: the graph needs the old value of a leaf that was sent."""
    y = world.call(1, by, world.b, "c")
    with torch.no_grad():
        world.b.add_(1)
    world.backward(y.sum())
    world.backward(world.call(1, by, world.b, "c").sum())


PROGRAMS = {
    program.__name__: program
    for program in (
        modes_of_the_caller,
        modes_of_a_handler,
        handler_that_enables,
        frozen,
        integers,
        complex_numbers,
        sparse_gradients,
        several_kinds,
        changed_on_both_sides,
        changed_after_it_was_sent,
        views,
        leaf_changed_later,
    )
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_one_process(name: str) -> None:
    check_outside(PROGRAMS[name], LEAVES)


def test_over_processes() -> None:
    check_processes(PROGRAMS, LEAVES)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_without_grad_mode(mode: Any) -> None:
    a = vector(1.0, 2.0)
    with bh.cluster(2) as workers:
        with mode():
            found = [bh.rpc_sync(1, torch.sin, args=(a,)), bh.remote(1, torch.sin, args=(a,)).to_here()]
            assert [records_on(worker.name) for worker in workers] == [0, 0]
        assert not any(each.requires_grad for each in found)
        kept = bh.rpc_sync(1, torch.sin, args=(a,))
        assert [records_on(worker.name) for worker in workers] == [1, 1]
        del kept
        expect_no_records(workers)
