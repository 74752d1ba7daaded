"""Which writes of a function are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from backhaul._ops.write_detector import ForeignWriteError, NoForeignWrites

WRITES: list[Callable[[torch.Tensor], object]] = [
    lambda x: x.add_(1),
    lambda x: x.view(2, 2)[0].zero_(),
    lambda x: x.detach().mul_(2),
    lambda x: torch.sin(torch.ones(4), out=x),
    lambda x: torch._foreach_add_([torch.ones(4), x], 1),
    lambda x: x.index_fill_(0, torch.tensor([0]), 9.0),
    lambda x: torch.nn.functional.batch_norm(torch.ones(3, 4), x, torch.ones(4), training=True),
]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_writes_to_others(write: Callable[[torch.Tensor], object], again: bool) -> None:
    other = torch.arange(4.0).add_(1)
    before = other.clone()
    with pytest.raises(ForeignWriteError, match=r"would change a float32\["), NoForeignWrites([], again=again):
        write(other)
    assert torch.equal(other, before)
    with NoForeignWrites([other], again=again):
        write(other)
    assert not torch.equal(other, before)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_writes_to_what_was_made_inside(write: Callable[[torch.Tensor], object], again: bool) -> None:
    other = torch.arange(4.0).add_(1)
    with NoForeignWrites([], again=again):
        for made in (other * 2, other.clone(), torch.tensor([1.0, 2.0, 3.0, 4.0]), copy.deepcopy(other)):
            write(made)
            write(made)


@pytest.mark.parametrize("again", [False, True])
def test_reading_and_memory_from_elsewhere(again: bool) -> None:
    other = torch.arange(4.0).add_(1)
    with NoForeignWrites([], again=again):
        torch.nn.functional.batch_norm(torch.ones(3, 4), other, other, training=False)
        torch.frombuffer(bytearray(16), dtype=torch.float32).add_(1).add_(1)
        torch.ones(3, 3).to_sparse().mul_(2)
        with torch.inference_mode():
            (other + 1).add_(1)
        torch.ops.higher_order.cond(other.sum() > 0, torch.sin, torch.cos, (other,))
