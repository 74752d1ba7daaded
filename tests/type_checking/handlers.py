"""Functions, classes and modules that the programs call on other workers."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import backhaul as bh

T = TypeVar("T")


def power(x: Tensor, exponent: int) -> Tensor:
    return x.pow(exponent)


def scale(x: Tensor, factor: float = 2.0, *, bias: float = 0.0) -> Tensor:
    return x * factor + bias


def nothing() -> int:
    return 0


def count(*values: int, **named: int) -> int:
    return sum(values) + sum(named.values())


def pair(first: T, others: list[T]) -> dict[str, T]:
    return {"first": first, "last": others[-1]}


def maybe(x: int) -> str | None:
    return str(x) if x else None


def anything(x: Any) -> Any:
    return x


def overload_free(x, y=1):  # type: ignore[no-untyped-def]
    return x, y


async def later(x: Tensor, times: int) -> str:
    return str(x * times)


@bh.async_execution
def by_future(to: str, x: Tensor) -> bh.Future[Tensor]:
    return bh.rpc_async(to, power, (x, 2))


class Counter:
    def __init__(self, start: int, name: str = "") -> None:
        self.value = start
        self.name = name

    def add(self, amount: int, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    def split(self) -> tuple[int, str]:
        return self.value, self.name

    @classmethod
    def named(cls, name: str) -> Counter:
        return cls(0, name)

    @staticmethod
    def parse(text: str) -> int:
        return int(text)

    async def wait(self, seconds: float) -> bool:
        return seconds > 0

    def __call__(self, amount: int) -> bytes:
        return bytes(amount)


class Block(nn.Module):
    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias)

    def forward(self, x: Tensor, *, gain: float = 1.0) -> tuple[Tensor, int]:
        return self.layer(x) * gain, x.shape[0]


class Untyped(nn.Module):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return x


def make_block(width: int) -> Block:
    return Block(width)


def make_module(width: int) -> nn.Module:
    return Block(width)


x = torch.ones(2)
