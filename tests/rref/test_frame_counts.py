"""How many frames an operation on references takes: one request and one reply, and notices where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import backhaul as bh

from ..frames import Frames, frames  # noqa: F401


class Value:
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def look_at(rref: bh.RRef[Any]) -> str:
    return rref.owner_name()


def read(rref: bh.RRef[torch.Tensor]) -> float:
    return rref.local_value().sum().item()


def give_back(rref: bh.RRef[Any]) -> bh.RRef[Any]:
    return rref


def make() -> bh.RRef[list[int]]:
    return bh.RRef([1])


def ask(rref: bh.RRef[Value]) -> torch.Tensor:
    return rref.rpc_sync().double(torch.ones(2))  # type: ignore[no-any-return]


def made(rref: bh.RRef[Any]) -> None:
    """Wait until the value is there."""
    assert rref._created is not None
    rref._created.wait()


def operation(name: str) -> tuple[Callable[[], object], int]:
    """The operation, and how many frames of notices it takes at most."""
    x = torch.ones(3)
    own, there = bh.RRef(torch.ones(3)), bh.remote("worker1", torch.ones, args=(3,))
    third, value, own_value = bh.remote("worker2", torch.ones, args=(3,)), bh.remote("worker1", Value), bh.RRef(Value())
    for rref in (there, third, value):
        made(rref)
    return {
        "to its owner": (lambda: bh.rpc_sync("worker1", read, args=(there,)), 0),
        "in a list to its owner": (lambda: bh.rpc_sync("worker1", len, args=([there, there],)), 0),
        "from its owner": (lambda: bh.rpc_sync("worker1", look_at, args=(own,)), 0),
        "from its owner, which is called back": (lambda: bh.rpc_sync("worker1", ask, args=(own_value,)), 0),
        "to another worker": (lambda: bh.rpc_sync("worker1", look_at, args=(third,)), 2),  # a fork, and its release
        "to its owner and back": (lambda: bh.rpc_sync("worker1", give_back, args=(there,)), 1),  # the release
        "as a result": (lambda: bh.rpc_sync("worker1", make), 1),
        "method": (lambda: value.rpc_sync().double(x), 0),
        "asynchronous method": (lambda: value.rpc_async().double(x).wait(), 0),
        "method whose result stays": (lambda: made(value.remote().double(x)), 1),
        "copy": (there.to_here, 0),
        "value that is made": (lambda: made(bh.remote("worker1", torch.ones, args=(3,))), 1),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "to its owner",
        "in a list to its owner",
        "from its owner",
        "from its owner, which is called back",
        "to another worker",
        "to its owner and back",
        "as a result",
        "method",
        "asynchronous method",
        "method whose result stays",
        "copy",
        "value that is made",
    ],
)
def test_one_message_to_a_worker(frames: Frames, name: str) -> None:  # noqa: F811
    run, notices = operation(name)
    found = frames.of(run)
    calls = 2 if name.endswith("called back") else 1
    released = found.pop("NOTICES", 0)
    assert found == {"REQUEST": calls, "REPLY": calls}
    assert bool(notices) == bool(released)
    assert released <= notices
