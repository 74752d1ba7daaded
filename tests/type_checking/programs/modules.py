"""``RemoteModule``, ``split`` and ``gather``."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor, nn

import backhaul as bh
from tests.type_checking.handlers import Block, Untyped, make_block, make_module, x


def results() -> None:
    layer = bh.nn.RemoteModule("w", nn.Linear, (4, 2))
    assert_type(layer(x), Tensor)
    assert_type(layer(input=x), Tensor)
    assert_type(layer.forward(x), Tensor)
    assert_type(layer.forward_async(x), bh.Future[Tensor])
    block = bh.nn.RemoteModule("w/cuda:0", Block, (4,))
    assert_type(block(x), tuple[Tensor, int])
    assert_type(block(x, gain=2.0), tuple[Tensor, int])
    assert_type(block.forward_async(x), bh.Future[tuple[Tensor, int]])
    assert_type(bh.nn.RemoteModule("w", Block, [4])(x), tuple[Tensor, int])
    assert_type(bh.nn.RemoteModule("w", nn.Linear, [4], {"out_features": 2})(x), Tensor)
    assert_type(bh.nn.RemoteModule("w", Block, (4,), {"bias": True})(x), tuple[Tensor, int])
    assert_type(bh.nn.RemoteModule("w", Block, kwargs={"width": 4})(x), tuple[Tensor, int])
    assert_type(bh.nn.RemoteModule("w", make_block, (4,))(x), tuple[Tensor, int])
    assert_type(bh.nn.RemoteModule("w", lambda: nn.Linear(4, 2))(x), Tensor)
    assert_type(bh.nn.RemoteModule("w", nn.ReLU)(x), Tensor)
    assert_type(bh.nn.RemoteModule("w", make_module, (4,))(x, 1), Any)
    assert_type(layer.remote_parameters(), list[bh.RRef[nn.Parameter]])
    print(bh.nn.RemoteModule("w", Untyped)(1).shape)
    torch.optim.SGD(block.parameters(), lr=0.1)


def annotated(plain: bh.nn.RemoteModule, exact: bh.nn.RemoteModule[[Tensor], Tensor]) -> nn.Module:
    assert_type(plain(1, 2), Any)
    assert_type(plain.forward_async(1), bh.Future[Any])
    assert_type(exact(x), Tensor)
    plain = exact
    exact(1)  # error
    return plain


class Shown(bh.nn.RemoteModule[[Tensor], Tensor]):
    def extra_repr(self) -> str:
        return "shown"


def subclasses() -> None:
    assert_type(Shown("w", nn.Linear, (4, 2))(x), Tensor)


def splitting(model: Block) -> None:
    assert_type(bh.nn.split(model, {"layer": "w"}), Block)
    assert_type(bh.nn.gather(model), Block)
    bh.nn.split(model, ["layer"])  # error
    bh.nn.split(x, {"": "w"})  # error


def wrong_arguments() -> None:
    bh.nn.RemoteModule("w", nn.Linear, ("four", 2))  # error
    bh.nn.RemoteModule("w", nn.Linear, (4,))  # error
    bh.nn.RemoteModule("w", nn.Linear)  # error
    bh.nn.RemoteModule("w", Block, (4, True, 1))  # error
    bh.nn.RemoteModule("w", make_block, ("four",))  # error
    bh.nn.RemoteModule("w", int, (4,))  # error
    bh.nn.RemoteModule("w", nn.Linear, (4, 2))(1)  # error
    bh.nn.RemoteModule("w", nn.Linear, (4, 2))(x, x)  # error
    bh.nn.RemoteModule("w", nn.Linear, (4, 2)).forward_async("x")  # error
    bh.nn.RemoteModule("w", Block, (4,))(x, gain="high")  # error
