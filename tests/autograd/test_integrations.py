"""What users put around their functions: checkpoint, torch.compile, autocast, anomaly mode, DDP."""

from __future__ import annotations

import copy
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import backhaul as bh
from backhaul._autograd.torch_engine.reducers import reducers

from .worlds import DEADLINE_SECONDS, World, check_outside, vector
from .worlds import check as check_once

Check = Callable[..., None]

# a and b are used by the driver, c by worker 1.
LEAVES = {"a": vector(0.3, -1.2, 2.0), "b": vector(1.5, 0.4, -0.7), "c": vector(-0.2, 0.9, 1.1)}


# Checkpoint.


def stage(world: World, x: torch.Tensor) -> torch.Tensor:
    world.saw("stage")
    return torch.tanh(x * world.c).exp() + x


def checkpointed(world: World, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(stage, world, x, use_reentrant=False) * x


def test_checkpoint_on_the_remote_side(check: Check) -> None:
    """Values that were not kept are recomputed, as often as in plain autograd."""

    def program(world: World) -> None:
        y = world.call(1, checkpointed, world.a)
        world.backward((world.call(1, checkpointed, y) * y).sum())

    check(program, LEAVES)


def calling_stage(world: World, x: torch.Tensor) -> torch.Tensor:
    return world.call(2, stage_without_weight, x * world.c).exp()


def checkpointed_call(world: World, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(calling_stage, world, x, use_reentrant=False) * x


def test_a_call_inside_of_a_checkpoint(check: Check) -> None:
    """The call is repeated when its values are needed, and is part of no graph then."""

    def program(world: World) -> None:
        world.backward(world.call(1, checkpointed_call, world.a).sum())

    check(program, LEAVES)


def test_checkpoint_in_a_circle(check: Check) -> None:
    def program(world: World) -> None:
        y = world.call(1, checkpointed, world.a) * world.b
        z = world.call(1, checkpointed, y)
        world.backward((z * y).sum())

    check(program, LEAVES)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # plain autograd, with create_graph
def test_checkpoint_and_the_second_order(check: Check) -> None:
    def program(world: World) -> None:
        world.backward(world.call(1, checkpointed, world.a).sum(), create_graph=True)
        world.backward(world.grad(world.a).pow(2).sum())

    check(program, LEAVES)


# torch.compile.


def network(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * weight).exp() + torch.sin(x)


compiled = {backend: torch.compile(network, backend=backend) for backend in ("eager", "aot_eager")}


def run_compiled(world: World, x: torch.Tensor, backend: str) -> torch.Tensor:
    return compiled[backend](x, world.c)


COMPILER = pytest.mark.filterwarnings("default")  # warnings of the compiler are not ours


@COMPILER
@pytest.mark.parametrize("backend", compiled)
def test_compiled_functions_on_the_remote_side(backend: str) -> None:
    def program(world: World) -> None:
        x = torch.sin(world.a)
        y = world.call(1, run_compiled, x, backend)
        z = world.call(1, run_compiled, y * world.b, backend)
        world.backward((z * y * x).sum())

    check_once(program, LEAVES)
    check_outside(program, LEAVES)


def compiled_around(world: World, x: torch.Tensor, backend: str) -> torch.Tensor:
    y = compiled[backend](x, world.c)
    return world.call(0, stage_without_weight, y) * y


def stage_without_weight(world: World, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


@COMPILER
@pytest.mark.parametrize("backend", compiled)
def test_compiled_functions_in_a_circle(backend: str) -> None:
    """The function's result goes to another worker and is needed here too."""

    def program(world: World) -> None:
        world.backward(world.call(1, compiled_around, world.a, backend).sum())

    check_once(program, LEAVES)
    check_outside(program, LEAVES)


@COMPILER
def test_compiled_functions_with_hooks() -> None:
    def program(world: World) -> None:
        world.c.register_hook(lambda grad: world.saw("c", grad))
        y = world.call(1, run_compiled, world.a, "aot_eager")
        z = world.call(1, run_compiled, world.a * y, "aot_eager")
        z.register_hook(lambda grad: world.saw("z", grad))
        world.backward((z * y).sum())

    check_once(program, LEAVES)
    check_outside(program, LEAVES)


# Modes.


def under_autocast(world: World, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(x, weight) + x


def test_autocast_on_the_remote_side(check: Check) -> None:
    def program(world: World) -> None:
        y = world.call(1, under_autocast, world.x, world.w)
        world.backward(y.float().pow(2).sum())

    make = torch.Generator().manual_seed(0)
    leaves = {name: torch.randn(3, 3, generator=make).requires_grad_() for name in "xw"}
    check(program, leaves, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_anomaly_mode(check: Check) -> None:
    def program(world: World) -> None:
        with torch.autograd.detect_anomaly():
            y = world.call(1, stage, world.a)
            world.backward((world.call(1, stage, y) * y).sum())

    check(program, LEAVES)


def test_modules_in_training_mode() -> None:
    """Batch norm and dropout change on the worker that has them, in the forward pass and only there."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    modules["remote"], local = module, copy.deepcopy(module)
    x = torch.randn(8, 3)
    with bh.cluster(2) as workers, bh.context() as ctx:
        ctx.backward(bh.rpc_sync(1, apply_module, args=(x,)).pow(2).sum())
        with workers[1]:
            grads = bh.get_gradients(ctx)
    local(x).pow(2).sum().backward()
    for remote, parameter in zip(module.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(grads[remote], parameter.grad)
    torch.testing.assert_close(dict(module.named_buffers()), dict(local.named_buffers()))


modules: dict[str, torch.nn.Module] = {}


def apply_module(x: torch.Tensor) -> torch.Tensor:
    return modules["remote"](x)


# DDP. Two processes have a replica each; each is called by the other, in a context of its own.

LIMIT = 3 * DEADLINE_SECONDS  # seconds; the first step imports much, and each process waits for the other's


def init_gloo(file: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = torch.distributed.FileStore(file, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()


def batch(rank: int, step: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, dtype=torch.float64, generator=make)


def apply_replica(x: torch.Tensor) -> torch.Tensor:
    return modules["replica"](x)


def replica_gradients(context: int) -> list[torch.Tensor]:
    held = bh.get_gradients(context)
    return [held[parameter] for parameter in modules["replica"].parameters()]


def train_together(rank: int, warm: bool, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Two steps; in each both workers drive a pass of their own at the same time."""
    modules["replica"] = make_model()
    torch.distributed.barrier()
    if warm:  # the weights take part in a pass before they become a replica's
        with bh.context() as ctx:
            ctx.backward(bh.rpc_sync(1 - rank, apply_replica, args=(batch(rank, 9),)).pow(2).sum())
        torch.distributed.barrier()
    modules["replica"] = DistributedDataParallel(modules["replica"])
    torch.distributed.barrier()
    found = []
    for step in range(2):
        with bh.context() as ctx:
            x = batch(rank, step).requires_grad_()
            loss = bh.rpc_sync(1 - rank, apply_replica, args=(x,)).pow(2).sum()
            ctx.backward(loss, timeout=LIMIT, **options)
            if options:
                grads = bh.rpc_sync(1 - rank, take_grad)
            else:
                grads = bh.rpc_sync(1 - rank, replica_gradients, args=(int(ctx),))
            found.append([*(grad.detach() for grad in grads), (x.grad if options else ctx.grads[x]).detach()])
        torch.distributed.barrier()
    return found


def take_grad() -> list[torch.Tensor]:
    """The gradients in ``.grad``, which are then dropped."""
    parameters = list(modules["replica"].parameters())
    grads = [parameter.grad.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return grads


DDP_WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "gradients in the context": (False, {}),
    "used before it was wrapped": (True, {}),
    "gradients in .grad": (False, {"accumulate": "grad"}),
}


def train_in_all_ways(folder: str) -> dict[str, Any]:
    rank = bh.get_worker_info().id
    init_gloo(f"{folder}/store", rank)
    try:
        return {name: train_together(rank, *way) for name, way in DDP_WAYS.items()}
    finally:
        torch.distributed.destroy_process_group()


def expected_gradients(step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The mean over both batches, as DDP makes it; and each batch's own."""
    sums, of_batches = [], []
    for rank in range(2):
        model, x = make_model(), batch(rank, step).requires_grad_()
        model(x).pow(2).sum().backward()
        sums.append([parameter.grad for parameter in model.parameters()])
        of_batches.append(x.grad)
    return [(one + other) / 2 for one, other in zip(*sums, strict=True)], of_batches


def test_ddp_on_the_remote_side(tmp_path: pathlib.Path) -> None:
    found = bh.launch(train_in_all_ways, 2, args=(str(tmp_path),), timeout=LIMIT, start_method="forkserver")
    for name in DDP_WAYS:
        for step in range(2):
            mean, of_batches = expected_gradients(step)
            for rank in range(2):
                *grads, of_batch = found[rank][name][step]
                torch.testing.assert_close(grads, mean, msg=lambda text, name=name: f"{name}: {text}")
                torch.testing.assert_close(of_batch, of_batches[rank])


class Around(torch.nn.Module):
    """A model with a call in the middle: some of its weights are reached before the message, some behind it."""

    def __init__(self, other: int) -> None:
        super().__init__()
        self.model = make_model()
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, _, last = self.model
        return last(bh.rpc_sync(self.other, torch.tanh, args=(first(x),)))


def train_around(folder: str) -> list[list[torch.Tensor]]:
    rank = bh.get_worker_info().id
    init_gloo(f"{folder}/store", rank)
    try:
        model, found = DistributedDataParallel(Around(1 - rank)), []
        for step in range(2):
            with bh.context() as ctx:
                ctx.backward(model(batch(rank, step)).pow(2).sum(), timeout=LIMIT)
                found.append([ctx.grads[parameter].detach() for parameter in model.parameters()])
            torch.distributed.barrier()
        return found
    finally:
        torch.distributed.destroy_process_group()


def test_ddp_around_calls(tmp_path: pathlib.Path) -> None:
    found = bh.launch(train_around, 2, args=(str(tmp_path),), timeout=LIMIT, start_method="forkserver")
    for step in range(2):
        mean, _ = expected_gradients(step)
        for rank in range(2):
            torch.testing.assert_close(found[rank][step], mean)


def leave_group(folder: str) -> None:
    """End a process group while one of its operations, started in a hook of a pass, waits for the other process."""
    rank = bh.get_worker_info().id
    init_gloo(f"{folder}/store", rank)
    model = DistributedDataParallel(make_model())
    if rank == 1:
        time.sleep(0.3)  # the other process has left the group by then
        torch.distributed.barrier()
    else:
        x = torch.ones(1, requires_grad=True)
        with bh.context() as ctx:
            y = bh.rpc_sync(1, torch.tanh, args=(x,))
            torch.autograd.graph.register_multi_grad_hook([x], lambda _: torch.distributed.barrier(async_op=True))
            ctx.backward(y.sum())
    torch.distributed.destroy_process_group()
    del model


def test_process_groups_end(tmp_path: pathlib.Path) -> None:
    """Torch ends them with the interpreter's lock held, and Gloo's threads, which it waits for, must not need it. They
    do if there are objects of Python's in the state of the thread that started an operation: Gloo copies it.
    """
    bh.launch(leave_group, 2, args=(str(tmp_path),), timeout=LIMIT, start_method="forkserver")


def test_the_look_for_replicas_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as ``torch.distributed.reduce_op``, which warns at every attribute access."""

    class Touchy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    touchy = Touchy()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(reducers, "_searched", False)
    assert reducers.module_of(torch.ones(1, requires_grad=True)) is None
    del touchy
