"""What programs put around models: DDP and FSDP2 at either end, autocast, GradScaler, torch.compile, TorchScript."""

from __future__ import annotations

import copy
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import backhaul as bh
from tests.autograd.worlds import DEADLINE_SECONDS, World, check_outside, check_processes

LIMIT = 3 * DEADLINE_SECONDS  # seconds; the first step imports much, and each process waits for the other's
LEAVES = {
    name: torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    for seed, name in enumerate("abcd")  # a and b are used by the driver, c by worker 1, d by worker 2
}


# Lower precision.


def linear(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.mm(x, world.leaves[name]) + x


def cast_linear(world: World, x: torch.Tensor, name: str) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(world, x, name)


def autocast_at_both_ends(world: World) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.mm(world.a, world.b)
        y = world.call(1, cast_linear, x, "c")
        z = torch.mm(y, world.b) * world.call(2, cast_linear, y, "d")
    world.backward(z.float().pow(2).sum())


def take_gradient(world: World, name: str) -> torch.Tensor:
    """The gradient of a leaf of this worker, which is then dropped."""
    leaf = world.leaves[name]
    grad, leaf.grad = leaf.grad, None
    assert grad is not None
    return grad


def scaled_loss(world: World) -> None:
    """A GradScaler scales the loss; it unscales, checks and steps the parameters that are here."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD([world.a, world.b], lr=0.1)
    for number in range(3):
        y = world.call(1, linear, world.a * world.b, "c")
        scaler.scale(y.pow(2).mean() * (float("inf") if number == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        world.saw("finite", world.call(1, take_gradient, "c").isfinite().all())
        world.saw("scale", torch.tensor(scaler.get_scale()))
    for name in "ab":
        world.saw(name, world.leaves[name])


PROGRAMS = {program.__name__: program for program in (autocast_at_both_ends, scaled_loss)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_one_process(name: str) -> None:
    check_outside(PROGRAMS[name], LEAVES, rtol=1e-2, atol=1e-2)  # sums in bfloat16 have any order


def test_over_processes() -> None:
    check_processes(PROGRAMS, LEAVES, rtol=1e-2, atol=1e-2)


# torch.compile.


def smooth(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * weight).exp() + torch.sin(x)


def with_a_call(world: World, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = smooth(x, weight)
    return smooth(world.call(1, linear, y, "c") * y, weight)


@pytest.mark.filterwarnings("default")  # warnings of the compiler are not ours
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_call_in_the_middle_of_a_compiled_function(backend: str) -> None:
    """The call breaks the graph; backward goes through both compiled parts and the worker."""
    compiled: Callable[..., torch.Tensor] = torch.compile(with_a_call, backend=backend)

    def program(world: World) -> None:
        for _ in range(2):
            world.backward((compiled(world, world.a * 1, world.b)).sum(), retain_graph=False)

    try:
        check_outside(program, LEAVES, rtol=1e-4, atol=1e-4)
    finally:
        torch.compiler.reset()


# TorchScript.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_function_around_and_behind_a_call() -> None:
    scripted = torch.jit.script(smooth)

    def program(world: World) -> None:
        y = world.call(1, linear, scripted(world.a, world.b), "c")
        world.backward((scripted(y, world.b)).sum())

    check_outside(program, LEAVES, rtol=1e-4, atol=1e-4)


# DDP and FSDP2. Two processes have a replica each; the call goes to the other process, or the model is around a call.


def init_gloo(folder: str) -> int:
    rank = bh.get_worker_info().id
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return rank


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * number + rank))


modules: dict[str, torch.nn.Module] = {}


def apply_here(x: torch.Tensor) -> torch.Tensor:
    return modules["model"](x)


class Around(torch.nn.Module):
    """A model with a call in the middle."""

    def __init__(self, other: int) -> None:
        super().__init__()
        self.model = make_model()
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _, last = self.model
        found: torch.Tensor = last(bh.rpc_sync(self.other, torch.tanh, args=(first(x),)))
        return found


def wrap(kind: str, module: torch.nn.Module) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(module)
    for part in list(module.modules()):
        if isinstance(part, torch.nn.Linear) and kind == "fsdp by layer":
            fully_shard(part)
    return fully_shard(module)


def whole(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def train(folder: str, kind: str, place: str) -> list[list[torch.Tensor]]:
    """Gradients of two steps and the weights after them."""
    torch.set_num_threads(1)
    rank = init_gloo(folder)
    try:
        made = make_model() if place == "at the callee" else Around(1 - rank)
        modules["model"] = model = wrap(kind, made)
        torch.distributed.barrier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for number in range(2):
            x = batch(rank, number)
            y = bh.rpc_sync(1 - rank, apply_here, args=(x,)) if place == "at the callee" else model(x)
            y.pow(2).sum().backward()
            torch.distributed.barrier()
            found.append([whole(parameter.grad) for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            torch.distributed.barrier()
        found.append([whole(parameter) for parameter in model.parameters()])
        return found
    finally:
        modules.clear()
        torch.distributed.destroy_process_group()


def expected() -> list[list[torch.Tensor]]:
    """The mean over both batches."""
    model, found = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        for rank in range(2):
            (model(batch(rank, number)).pow(2).sum() / 2).backward()
        found.append([copy.deepcopy(parameter.grad) for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return [*found, [parameter.detach() for parameter in model.parameters()]]


@pytest.mark.parametrize("place", ["around calls", "at the callee"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp by layer"])
def test_data_parallel(tmp_path: pathlib.Path, kind: str, place: str) -> None:
    options = bh.Options(backward_timeout=DEADLINE_SECONDS)
    arguments: Any = (str(tmp_path), kind, place)
    found = bh.launch(train, 2, args=arguments, options=options, timeout=LIMIT, start_method="forkserver")
    for rank in range(2):
        torch.testing.assert_close(found[rank], expected())


def test_a_search_for_unused_parameters_is_refused() -> None:
    """It finds those in front of the call, and reduces them before they have gradients."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with bh.cluster(2):
            model = DistributedDataParallel(Around(1), find_unused_parameters=True)
            with pytest.raises(bh.errors.BackhaulError) as caught:
                model(batch(0, 0)).sum().backward()
            assert isinstance(caught.value.__cause__, RuntimeError)  # torch's
    finally:
        torch.distributed.destroy_process_group()


def test_a_static_graph_is_refused() -> None:
    """It would reduce nothing, without an error."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with bh.cluster(2):
            model = DistributedDataParallel(Around(1), static_graph=True)
            with pytest.raises(bh.errors.BackhaulError):
                model(batch(0, 0)).sum().backward()
            here = DistributedDataParallel(make_model(), static_graph=True)
            here(batch(0, 0)).sum().backward()  # of this worker alone
            assert all(parameter.grad is not None for parameter in here.parameters())
    finally:
        torch.distributed.destroy_process_group()
