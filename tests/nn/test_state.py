"""state_dict and load_state_dict of remote modules."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from backhaul.nn import RemoteModule

from . import modules
from .modules import Hybrid, batch, seeded

pytestmark = pytest.mark.usefixtures("workers")


def test_state_is_that_of_the_module() -> None:
    there, here = RemoteModule("worker1", seeded), seeded()
    found, wanted = there.state_dict(), here.state_dict()
    assert list(found) == list(wanted)
    torch.testing.assert_close(found, wanted)
    assert found._metadata == wanted._metadata
    assert not any(value.requires_grad for value in found.values())


def test_state_of_a_model_with_parts_elsewhere() -> None:
    there, here = Hybrid(RemoteModule("worker1", seeded)), Hybrid(seeded())
    found, wanted = there.state_dict(), here.state_dict()
    assert list(found) == list(wanted)
    torch.testing.assert_close(found, wanted)
    assert found._metadata == wanted._metadata


def test_round_trip() -> None:
    here, there = Hybrid(seeded(5)), Hybrid(RemoteModule("worker1", seeded))
    here(batch())  # buffers change too
    file = io.BytesIO()
    torch.save(here.state_dict(), file)
    file.seek(0)
    assert not any(there.load_state_dict(torch.load(file)))
    torch.testing.assert_close(there.state_dict(), here.state_dict())
    torch.testing.assert_close(there.eval()(batch()), here.eval()(batch()))
    fresh = Hybrid(seeded())
    fresh.load_state_dict(there.state_dict())
    torch.testing.assert_close(fresh.eval()(batch()), here(batch()))


def test_state_alone_and_assigned() -> None:
    there = RemoteModule("worker1", seeded)
    there.load_state_dict(seeded(5).state_dict())
    torch.testing.assert_close(there.state_dict(), seeded(5).state_dict())
    there.load_state_dict(seeded(6).float().state_dict(), assign=True)
    torch.testing.assert_close(there.state_dict(), seeded(6).float().state_dict())


def test_what_is_missing_or_too_much() -> None:
    here, there = Hybrid(seeded()), Hybrid(RemoteModule("worker1", seeded))
    state = seeded(5).state_dict()
    state = {f"there.{name}": value for name, value in state.items()} | Hybrid(nn.Identity()).state_dict()
    del state["there.0.weight"]
    state["there.more"] = torch.ones(1)
    assert there.load_state_dict(state, strict=False) == here.load_state_dict(state, strict=False)
    torch.testing.assert_close(there.state_dict(), here.state_dict())
    for model in (here, there):
        with pytest.raises(RuntimeError, match=r"there\.more") as caught:
            model.load_state_dict(state)
        assert "there.0.weight" in str(caught.value)
    errors = []
    for model in (here, there):
        with pytest.raises(RuntimeError, match=r"size mismatch for there\.0\.weight") as caught:
            model.load_state_dict({"there.0.weight": torch.ones(1)}, strict=False)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_more_than_tensors() -> None:
    there = RemoteModule("worker1", modules.Extra, ("a",))
    assert there.state_dict() == {"_extra_state": "a"}
    there.load_state_dict({"_extra_state": "b"})
    assert there.state_dict() == {"_extra_state": "b"}


def test_hooks_of_this_side() -> None:
    there = RemoteModule("worker1", nn.Linear, (1, 1))
    there.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update(note=1))
    there.register_load_state_dict_pre_hook(lambda module, state, *rest: state.pop("note"))
    state = there.state_dict()
    assert state["note"] == 1
    there.load_state_dict(state)


def test_variables_are_not_here() -> None:
    with pytest.raises(ValueError, match="keep_vars"):
        RemoteModule("worker1", nn.Linear, (1, 1)).state_dict(keep_vars=True)
