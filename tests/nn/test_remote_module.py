"""A remote module compared with the same local module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import backhaul as bh
from backhaul.nn import RemoteModule

from . import modules
from .conftest import await_references
from .modules import batch, seeded

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize("place", ["worker1", "worker1/cpu", "rank:1/cpu", "worker0"])
def test_output(place: str) -> None:
    there = RemoteModule(place, seeded, (3,))
    assert torch.equal(there(batch()), seeded(3)(batch()))
    assert torch.equal(there.forward(batch()), seeded(3)(batch()))
    assert torch.equal(there.forward_async(batch()).wait(), seeded(3)(batch()))
    assert there.on == place.partition("/")[0].replace("rank:", "worker")
    assert there.device == "cpu"


def test_it_is_a_module() -> None:
    there = RemoteModule("worker1", nn.Linear, (4, 2), {"bias": False})
    assert isinstance(there, nn.Module)
    assert repr(there) == "RemoteModule(on='worker1', device='cpu')"
    assert list(there.modules()) == [there]
    assert list(there.children()) == []


def test_any_arguments_and_results() -> None:
    there = RemoteModule("worker1", modules.Shapes)
    found = there(torch.ones(2), scale=3.0, names=["a", "b"])
    assert sorted(found) == ["a", "b"]
    assert torch.equal(found["b"], torch.full((2,), 3.0))


def test_gradients() -> None:
    here = modules.Hybrid(seeded())
    here(batch()).pow(2).sum().backward()
    there = modules.Hybrid(RemoteModule("worker1", seeded))
    with bh.context() as ctx:
        ctx.backward(there(batch()).pow(2).sum())
        for parameter, wanted in zip(there.here.parameters(), here.here.parameters(), strict=True):
            torch.testing.assert_close(ctx.grads[parameter], wanted.grad)
        found = bh.rpc_sync("worker1", modules.grads_of, (there.there.get_module_rref(), ctx.id))
    for grad, parameter in zip(found, here.there.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


def test_futures_are_part_of_the_graph() -> None:
    x = batch().requires_grad_()
    layers = [RemoteModule(f"worker{n}", seeded, (n,)) for n in (1, 2)]
    with bh.context() as ctx:
        outputs = bh.wait_all([layer.forward_async(x) for layer in layers])
        ctx.backward((outputs[0] * outputs[1]).sum())
        found = ctx.grads[x]
    (seeded(1)(x) * seeded(2)(x)).sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_under_no_grad_nothing_is_recorded_there_either() -> None:
    there = RemoteModule("worker1", modules.Mode)
    with bh.context():
        assert there(method="m", device="d") == (True, {"method": "m", "device": "d"})
        with torch.no_grad():
            assert there() == (False, {})
    with torch.inference_mode():
        assert there() == (False, {})


def test_training() -> None:
    here = modules.Hybrid(seeded())
    there = modules.Hybrid(RemoteModule("worker1", seeded))
    optimizer = torch.optim.SGD(here.parameters(), lr=0.1)
    parameters = there.there.remote_parameters()
    for step in range(5):
        optimizer.zero_grad()
        wanted = here(batch(step)).pow(2).mean()
        wanted.backward()
        optimizer.step()
        with bh.context() as ctx:
            loss = there(batch(step)).pow(2).mean()
            ctx.backward(loss)
            bh.rpc_sync("worker1", modules.descend, (parameters, ctx.id, 0.1))
            modules.descend([bh.RRef(parameter) for parameter in there.here.parameters()], ctx, 0.1)
        torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(there.state_dict(), here.state_dict())


def test_remote_parameters() -> None:
    there = RemoteModule("worker1", seeded, (3,))
    found = there.remote_parameters()
    assert {rref.owner_name() for rref in found} == {"worker1"}
    for rref, wanted in zip(found, seeded(3).parameters(), strict=True):
        assert torch.equal(rref.to_here(), wanted)
    assert there.remote_parameters(recurse=False) == []


def test_module_rref() -> None:
    there = RemoteModule("worker1", seeded, (3,))
    assert there.get_module_rref() is there.module_rref
    torch.testing.assert_close(there.get_module_rref().to_here().state_dict(), seeded(3).state_dict())


def test_references_are_released() -> None:
    there = RemoteModule("worker1", seeded)
    await_references(1)
    found = there.remote_parameters()
    await_references(1 + len(found))
    future = there.forward_async(batch())
    del there, found
    future.wait()
    await_references(0)


def test_train_and_eval() -> None:
    there = RemoteModule("worker1", seeded, kwargs={"dropout": 0.9})
    assert there.training
    assert not torch.equal(there(batch()), there(batch()))
    assert there.eval() is there
    assert not there.training
    assert not any(bh.rpc_sync("worker1", modules.mode_of, (there.module_rref,)))
    assert torch.equal(there(batch()), there(batch()))
    assert modules.Hybrid(there).train().there.training
    assert all(bh.rpc_sync("worker1", modules.mode_of, (there.module_rref,)))


def test_a_module_that_is_made_for_evaluation() -> None:
    assert not RemoteModule("worker1", lambda: seeded().eval()).training


def test_conversions() -> None:
    there = RemoteModule("worker1", seeded)
    x = batch()
    assert there.float()(x.float()).dtype is torch.float32
    assert there.to(torch.float64)(x).dtype is torch.float64
    assert there.to("cpu", dtype=torch.float32)(x.float()).dtype is torch.float32
    assert there.bfloat16()(x.bfloat16()).dtype is torch.bfloat16
    assert there.type(torch.float64)(x).dtype is torch.float64
    assert there.half().double().cpu()(x).dtype is torch.float64
    assert modules.Hybrid(there).float().there(x).dtype is torch.float64
    with pytest.raises((RuntimeError, AssertionError, TypeError)):
        there.to("worker1")


def test_inputs_follow_the_module() -> None:
    """Besides the CPU, every machine has the meta device."""
    there = RemoteModule("worker1/meta", nn.Linear, (4, 2))
    assert there.device == "meta"
    assert there(torch.ones(3, 4)).is_meta
    there = RemoteModule("worker1", nn.Linear, (4, 2)).to("meta")
    assert there.device == "meta"
    assert there.to_empty(device="cpu").device == "cpu"
    assert there(torch.ones(1, 4)).shape == (1, 2)
    shapes = RemoteModule("worker1", modules.Shapes).to("meta")
    assert shapes(torch.ones(2))["x"].is_meta
    assert not shapes.cpu()(torch.ones(2))["x"].is_meta


def test_apply_and_requires_grad() -> None:
    there = RemoteModule("worker1", nn.Linear, (4, 2))
    assert modules.Hybrid(there).apply(modules.fill).there is there
    assert torch.equal(there.state_dict()["weight"], torch.ones(2, 4))
    there.requires_grad_(False)
    assert not any(rref.to_here().requires_grad for rref in there.remote_parameters())
    there.zero_grad()


def test_methods_of_an_interface() -> None:
    there = RemoteModule("worker1", modules.Shapes, _module_interface_cls=modules.Doubles)
    assert torch.equal(there.double_it(torch.ones(1)), torch.full((1,), 2.0))
    assert torch.equal(there.double_it_async(torch.ones(1)).wait(), torch.full((1,), 2.0))
    assert torch.equal(bh.rpc_sync("worker2", lambda m: m.double_it(torch.ones(1)), (there,)), torch.full((1,), 2.0))
    with pytest.raises(AttributeError, match="halve_it"):
        there.halve_it  # noqa: B018


def test_ddp_around_a_model_that_holds_one(tmp_path: Path) -> None:
    here = modules.Hybrid(seeded())
    here(batch()).pow(2).sum().backward()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        there = DistributedDataParallel(modules.Hybrid(RemoteModule("worker1", seeded)))
        with bh.context() as ctx:
            ctx.backward(there(batch()).pow(2).sum())
            for parameter, wanted in zip(there.module.here.parameters(), here.here.parameters(), strict=True):
                torch.testing.assert_close(ctx.grads[parameter], wanted.grad)
    finally:
        torch.distributed.destroy_process_group()


# Errors.


@pytest.mark.parametrize("make", [modules.NoModule, modules.no_module, nn.Linear(1, 1), "Linear", None])
def test_only_modules_are_made(make: Any) -> None:
    with pytest.raises(ValueError, match="module"):
        RemoteModule("worker1", make)


def test_errors_are_raised_here() -> None:
    with pytest.raises(KeyError, match="made") as caught:
        RemoteModule("worker1", modules.Fails, ("made",))
    assert isinstance(caught.value.__cause__, bh.errors.RemoteTraceback)
    there = RemoteModule("worker1", modules.Fails, ("called",))
    with pytest.raises(KeyError, match="called"):
        there(torch.ones(1))
    with pytest.raises(KeyError, match="called"):
        there.forward_async(torch.ones(1)).wait()
    with pytest.raises(bh.errors.UnknownWorkerError):
        RemoteModule("worker9", nn.Linear, (1, 1))
    with pytest.raises(bh.errors.UnknownWorkerError):
        RemoteModule("rank:9/cpu", nn.Linear, (1, 1))
    with pytest.raises(ValueError, match="remote_device"):
        RemoteModule("worker1/foo", nn.Linear, (1, 1))
    with pytest.raises(TypeError):
        RemoteModule("worker1", nn.Linear)


def test_nothing_is_added_to_it() -> None:
    there = RemoteModule("worker1", nn.Linear, (1, 1))
    refused = {
        "register_buffer": ("x", torch.ones(1)),
        "register_parameter": ("x", nn.Parameter(torch.ones(1))),
        "add_module": ("x", nn.Linear(1, 1)),
        "share_memory": (),
    }
    for method, args in refused.items():
        with pytest.raises(ValueError, match=method):
            getattr(there, method)(*args)
    with pytest.raises(ValueError, match="register_parameter"):
        there.x = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="mode must be a bool"):
        there.train(1)  # type: ignore[arg-type]
