"""FSDP2 (``fully_shard``) in passes over workers: a sharded caller, a sharded callee, and both."""

from __future__ import annotations

import copy
import inspect
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.utils.checkpoint import checkpoint

import backhaul as bh
from tests.autograd.worlds import DEADLINE_SECONDS

LIMIT = 3 * DEADLINE_SECONDS  # seconds; the first step imports much, and each process waits for the others
WIDTH = 6

models: dict[str, torch.nn.Module] = {}
Grads = list[torch.Tensor | None]


def apply_there(x: torch.Tensor) -> torch.Tensor:
    return models["there"](x)


class Calls:
    """Calls the other side; in one process, its model."""

    def __init__(self, other: int | None) -> None:
        self.other = other

    def there(self, x: torch.Tensor) -> torch.Tensor:
        return apply_there(x) if self.other is None else bh.rpc_sync(self.other, apply_there, args=(x,))

    def both(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two calls whose gradients arrive side by side. FSDP2 can run only one forward at a time."""
        return self.there(x), self.there(y)


class Net(torch.nn.Module):
    """Layers with a residual connection."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.scale = torch.nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x * self.scale


class Around(Net):
    """A model with calls between its layers."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(4)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.layers
        y, z = self.calls.both(first(x), second(x))
        y = third(y * z) + self.calls.there(z * self.scale)
        return fourth(torch.tanh(y)) + y


class Before(Net):
    """A model whose output another worker computed."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(2)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.calls.there(super().forward(x)))


class Twice(Net):
    """A model that runs its layers twice, once on a result of another worker."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(2)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.calls.there(super().forward(x)) + x)


class Checkpointed(Around):
    """A checkpoint repeats the calls. The model there must not stay gathered when no gradients follow a call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(y, torch.Tensor)
        return y


class Back(Net):
    """A model that returns what the worker that called it computed."""

    back: int | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return torch.sin(y) if self.back is None else bh.rpc_sync(self.back, torch.sin, args=(y,))


class Stages(Net):
    """Only calls, in a chain."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(1)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.calls.there(self.calls.there(self.layers[0](x) * self.scale))


class Frozen(Around):
    """Some layers need no gradients."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        for layer in list(self.layers)[::2]:
            layer.requires_grad_(False)


class Inside(Net):
    """Checkpoints without calls inside."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(2)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(super().forward, x.requires_grad_(), use_reentrant=False)
        return checkpoint(self.layers[0], self.calls.there(y), use_reentrant=True)


HERE: dict[str, Callable[[Calls], torch.nn.Module]] = {
    each.__name__.lower(): each for each in (Around, Before, Twice, Stages, Inside, Checkpointed, Frozen)
}


def build(kind: str, calls: Calls, back: int | None) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The models here and there."""
    torch.manual_seed(11)
    here = HERE[kind](calls).double()
    torch.manual_seed(12)
    there = Back() if kind in ("before", "stages") else Net()
    there.back = back
    return here, there.double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def whole(value: torch.Tensor | None) -> torch.Tensor | None:
    if value is None:
        return None
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def one_step(model: torch.nn.Module, rank: int, step: int, parts: int) -> None:
    """A step in which backward runs several times: for two batches, and twice for the last of them."""
    for part in range(2):
        loss = model(batch(rank, 10 * step + part)).pow(2).mean() / parts
        loss.backward(retain_graph=part == 1)
    loss.backward()


def train(folder: str, kind: str, by_layer: bool, ranks: int) -> tuple[list[Grads], list[Grads]]:
    """What a process of one side finds: the gradients of each step, and the weights."""
    torch.set_num_threads(1)
    me = bh.get_worker_info().id
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = torch.distributed.FileStore(f"{folder}/store", 2 * ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=me, world_size=2 * ranks)
    try:
        driving = me < ranks
        here, there = build(kind, Calls(me + ranks), me - ranks)
        mesh = init_device_mesh("cpu", (2, ranks), mesh_dim_names=("side", "shard"))["shard"]
        model = here if driving else there
        reshard = True if kind == "checkpointed" else None
        if by_layer:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        models["there"] = model
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)
        found: list[Grads] = []
        torch.distributed.barrier()
        for step in range(3):
            if driving:
                one_step(model, me, step, 1)
            torch.distributed.barrier()
            found.append([whole(each.grad) for each in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            torch.distributed.barrier()
        return found, [whole(each) for each in model.parameters()]
    finally:
        models.clear()
        torch.distributed.destroy_process_group()


def expected(kind: str, ranks: int) -> list[tuple[list[Grads], Grads]]:
    """The same in one process, for both sides: the mean over all ranks' batches."""
    here, there = build(kind, Calls(None), None)
    models["there"] = there
    found: list[tuple[list[Grads], Grads]] = [([], []), ([], [])]
    trained = [each for model in (here, there) for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    for step in range(3):
        for rank in range(ranks):
            one_step(here, rank, step, ranks)
        for side, model in enumerate((here, there)):
            found[side][0].append([whole(each.grad) for each in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    models.clear()
    return [
        (grads, [whole(each) for each in model.parameters()])
        for (grads, _), model in zip(found, (here, there), strict=True)
    ]


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("kind", HERE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_both_ends(tmp_path: pathlib.Path, kind: str, by_layer: bool, ranks: int) -> None:
    options = bh.Options(backward_timeout=DEADLINE_SECONDS)
    found = bh.launch(
        train,
        2 * ranks,
        args=(str(tmp_path), kind, by_layer, ranks),
        options=options,
        timeout=LIMIT,
        start_method="forkserver",
    )
    should = expected(kind, ranks)
    for rank in range(2 * ranks):
        torch.testing.assert_close(found[rank], should[rank // ranks])


# In one process, with one rank. Gloo keeps descriptors.


@pytest.fixture
def model(tmp_path: pathlib.Path) -> Iterator[torch.nn.Module]:
    """A sharded model that worker 1 serves, and an equal one in ``plain``."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.manual_seed(12)
        models["plain"] = Net().double()
        models["there"] = made = copy.deepcopy(models["plain"])
        fully_shard(made)
        yield made
    finally:
        models.clear()
        torch.distributed.destroy_process_group()


def grads_of(model: torch.nn.Module) -> Grads:
    return [whole(each.grad) for each in model.parameters()]


def call_twice(calls: Calls, x: torch.Tensor) -> torch.Tensor:
    return calls.there(calls.there(x) + x).pow(2).sum()


def in_plain(program: Callable[[], Any]) -> Any:
    """Run a program with the model that is not sharded."""
    sharded, models["there"] = models["there"], models["plain"]
    try:
        return program()
    finally:
        models["there"] = sharded


@pytest.mark.may_leak
def test_accumulation_without_reduction(model: torch.nn.Module) -> None:
    with bh.cluster(2):
        model.set_requires_gradient_sync(False)
        call_twice(Calls(1), batch(0, 0)).backward()
        assert grads_of(model) == [None] * 7
        model.set_requires_gradient_sync(True)
        call_twice(Calls(1), batch(0, 1)).backward()
    in_plain(lambda: [call_twice(Calls(None), batch(0, step)).backward() for step in range(2)])
    torch.testing.assert_close(grads_of(model), grads_of(models["plain"]))


@pytest.mark.may_leak
def test_gradients_of_inputs_alone(model: torch.nn.Module) -> None:
    x = batch(0, 0).requires_grad_()
    with bh.cluster(2):
        (found,) = torch.autograd.grad(call_twice(Calls(1), x), x)
        assert grads_of(model) == [None] * 7
        call_twice(Calls(1), x).backward()
    (should,) = in_plain(lambda: torch.autograd.grad(call_twice(Calls(None), x), x))
    torch.testing.assert_close(found, should)
    torch.testing.assert_close(x.grad, should)
    in_plain(lambda: call_twice(Calls(None), x).backward())
    torch.testing.assert_close(grads_of(model), grads_of(models["plain"]))


@pytest.mark.may_leak
def test_frozen_model(model: torch.nn.Module) -> None:
    model.requires_grad_(False)
    x = batch(0, 0).requires_grad_()
    with bh.cluster(2):
        for _ in range(2):
            call_twice(Calls(1), x).backward()
    found, x.grad = x.grad, None
    in_plain(lambda: [call_twice(Calls(None), x).backward() for _ in range(2)])
    torch.testing.assert_close(found, x.grad)


@pytest.mark.may_leak
def test_gradients_in_contexts(model: torch.nn.Module) -> None:
    with bh.cluster(2):
        with bh.context() as ctx, pytest.raises(bh.BackhaulError, match=r"FSDP2 .* call loss\.backward\(\) outside"):
            ctx.backward(call_twice(Calls(1), batch(0, 0)))
        with bh.context() as ctx:
            ctx.backward(call_twice(Calls(1), batch(0, 0)), accumulate="grad")
        found = grads_of(model)
    in_plain(lambda: call_twice(Calls(None), batch(0, 0)).backward())
    torch.testing.assert_close(found, grads_of(models["plain"]))


@pytest.mark.may_leak
def test_passes_in_one_process_stay_as_they_are(model: torch.nn.Module) -> None:
    with bh.cluster(2):
        call_twice(Calls(1), batch(0, 0)).backward()
        model(batch(0, 1)).pow(2).sum().backward()
    in_plain(lambda: call_twice(Calls(None), batch(0, 0)).backward())
    models["plain"](batch(0, 1)).pow(2).sum().backward()
    torch.testing.assert_close(grads_of(model), grads_of(models["plain"]))


def apply_other(x: torch.Tensor) -> torch.Tensor:
    return models["other"](x)


@pytest.mark.may_leak
def test_two_models(model: torch.nn.Module) -> None:
    """They share nothing, and each is sharded on its own."""
    models["plain other"] = Net(2).double()
    models["other"] = copy.deepcopy(models["plain other"])
    fully_shard(models["other"])
    x = batch(0, 0)
    with bh.cluster(2):
        for _ in range(2):
            y = bh.rpc_sync(1, apply_other, args=(bh.rpc_sync(1, apply_there, args=(x,)) * x,))
            (y * bh.rpc_sync(1, apply_other, args=(x,))).sum().backward()
    plain, other = models["plain"], models["plain other"]
    for _ in range(2):
        (other(plain(x) * x) * other(x)).sum().backward()
    torch.testing.assert_close(grads_of(model), grads_of(plain))
    torch.testing.assert_close(grads_of(models["other"]), grads_of(other))


# Canaries.


def replaced() -> tuple[object, object]:
    return (
        _fsdp_state.FSDPState._register_root_post_backward_final_callback,
        _fsdp_param_group.FSDPParamGroup.post_backward,
    )


@pytest.mark.may_leak
def test_patches_are_there_from_the_first_pass_until_the_last_worker_ends(model: torch.nn.Module) -> None:
    before = replaced()
    for _ in range(2):
        with bh.cluster(2) as workers:
            assert replaced() == before
            call_twice(Calls(1), batch(0, 0)).backward()
            assert not {*replaced()} & {*before}
            workers[0].close()
            assert not {*replaced()} & {*before}
        assert replaced() == before


def test_torch_has_what_is_replaced() -> None:
    register, post_backward = map(inspect.getsource, replaced())
    assert "queue_callback(" in register
    assert "_state_ctx.post_backward_final_callback_queued = True" in register
    assert "self.post_backward" not in post_backward
    assert "ctx.param_group.post_backward()" in inspect.getsource(
        _fsdp_param_group.RegisterPostBackwardFunction.backward
    )
