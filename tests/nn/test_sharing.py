"""One remote module used by several workers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import backhaul as bh
from backhaul.nn import RemoteModule

from . import modules
from .conftest import await_references
from .modules import batch, seeded

pytestmark = pytest.mark.usefixtures("workers")


@pytest.mark.parametrize("owner", ["worker0", "worker1", "worker2"])
def test_others_can_use_it(owner: str) -> None:
    there = RemoteModule(owner, seeded, (3,))
    wanted = seeded(3)(batch())
    torch.testing.assert_close(bh.rpc_sync("worker2", modules.use, (there, batch())), wanted)
    torch.testing.assert_close(bh.rpc_sync("worker1", modules.pass_on, ("worker2", there, batch())), wanted)


def test_gradients_from_all_sides() -> None:
    here, there = seeded(), RemoteModule("worker1", seeded)
    x, y = batch().requires_grad_(), batch().requires_grad_()
    torch.stack([here(x) for _ in range(3)]).pow(2).sum().backward()
    with bh.context() as ctx:
        outputs = [there(y), bh.rpc_sync("worker2", modules.use, (there, y)), bh.rpc_sync(0, modules.use, (there, y))]
        ctx.backward(torch.stack(outputs).pow(2).sum())
        torch.testing.assert_close(ctx.grads[y], x.grad)
        found = bh.rpc_sync("worker1", modules.grads_of, (there.module_rref, ctx.id))
    for grad, parameter in zip(found, here.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)


def test_what_travels() -> None:
    there = RemoteModule("worker1", seeded).eval()
    found = bh.rpc_sync("worker2", modules.attributes, (there,))
    assert found == {"training": False, "on": "worker1", "device": "cpu"}
    came_back = bh.rpc_sync("worker2", lambda module: module, (there,))
    assert isinstance(came_back, RemoteModule)
    assert torch.equal(came_back(batch()), there(batch()))


def test_added_attributes_stay() -> None:
    there = RemoteModule("worker1", seeded)
    there.colour = "red"
    there.part = nn.Linear(1, 1)
    with pytest.warns(UserWarning, match="colour, part"):
        found = bh.rpc_sync("worker2", modules.attributes, (there,))
    assert "colour" not in found


class Named(RemoteModule):
    def shout(self) -> str:
        return self.on.upper()


def test_subclasses_travel() -> None:
    there = Named("worker1", seeded)
    assert bh.rpc_sync("worker2", lambda module: module.shout(), (there,)) == "WORKER1"


def test_a_second_one_for_the_same_module() -> None:
    there = RemoteModule("worker1", seeded)
    again = bh.rpc_sync("worker2", RemoteModule.init_from_module_rref, ("worker1/cpu", there.get_module_rref()))
    assert again.on == "worker1"
    again.eval()
    torch.testing.assert_close(again(batch()), seeded().eval()(batch()))
    assert not any(bh.rpc_sync("worker1", modules.mode_of, (there.module_rref,)))
    with pytest.raises(TypeError, match="must be an RRef"):
        RemoteModule.init_from_module_rref("worker1", nn.Linear(1, 1))  # type: ignore[arg-type]


def test_it_lives_as_long_as_anyone_has_it() -> None:
    there = RemoteModule("worker1", seeded)
    keeper: bh.RRef[list[RemoteModule]] = bh.remote("worker2", list, ((there,),))
    wanted = there(batch())
    del there
    await_references(2)
    assert torch.equal(bh.rpc_sync("worker2", lambda rref: rref.local_value()[0](batch()), (keeper,)), wanted)
    del keeper
    await_references(0)


def test_it_travels_in_calls_only() -> None:
    there = modules.Hybrid(RemoteModule("worker1", seeded))
    for way in (pickle.dumps, copy.copy, lambda module: torch.save(module, io.BytesIO())):
        with pytest.raises(bh.errors.SerializationError, match="travels in calls only"):
            way(there.there)
    with pytest.raises(RuntimeError):
        pickle.dumps(there)


def drive() -> float | None:
    """Runs in every process."""
    if bh.get_worker_info().id:
        return None
    there = RemoteModule("rank:1/cpu", seeded, (3,))
    found = bh.rpc_sync("worker2", modules.use, (there, batch()))
    return (found - seeded(3)(batch())).abs().max().item()


def test_between_processes() -> None:
    difference = bh.launch(drive, 3, timeout=100, start_method="forkserver")[0]
    assert difference < 1e-12
