"""``rpc_sync``, ``rpc_async`` and ``remote``: arguments and results."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar, assert_type

import torch
from torch import Tensor, nn

import backhaul as bh
from tests.type_checking.handlers import (
    Counter,
    anything,
    by_future,
    count,
    later,
    maybe,
    nothing,
    overload_free,
    pair,
    power,
    scale,
    x,
)

T = TypeVar("T")


def results() -> None:
    assert_type(bh.rpc_sync("w", power, (x, 2)), Tensor)
    assert_type(bh.rpc_sync(1, power, args=(x, 2)), Tensor)
    assert_type(bh.rpc_sync(bh.get_worker_info("w"), power, (x, 2), timeout=3), Tensor)
    assert_type(bh.rpc_sync("w", power, (x, 2), None, 3.0, retry=bh.Retry()), Tensor)
    assert_type(bh.rpc_async("w", power, (x, 2)), bh.Future[Tensor])
    assert_type(bh.rpc_async("w", power, (x, 2)).wait(), Tensor)
    assert_type(bh.remote("w", power, (x, 2)), bh.RRef[Tensor])
    assert_type(bh.remote("w", power, (x, 2)).to_here(), Tensor)
    assert_type(bh.rpc_sync("w", nothing), int)
    assert_type(bh.rpc_sync("w", nothing, ()), int)
    assert_type(bh.rpc_sync("w", maybe, (1,)), str | None)
    assert_type(bh.rpc_sync("w", print, ("a", 1)), None)


def defaults_and_any_number() -> None:
    assert_type(bh.rpc_sync("w", scale, (x,)), Tensor)
    assert_type(bh.rpc_sync("w", scale, (x, 3.0)), Tensor)
    assert_type(bh.rpc_async("w", count), bh.Future[int])
    assert_type(bh.rpc_async("w", count, (1, 2, 3)), bh.Future[int])
    assert_type(bh.remote("w", Counter, (1,)), bh.RRef[Counter])
    assert_type(bh.remote("w", Counter, (1, "a")), bh.RRef[Counter])


def keywords_and_lists_are_not_checked() -> None:
    assert_type(bh.rpc_sync("w", scale, (x,), {"bias": 1.0}), Tensor)
    assert_type(bh.rpc_sync("w", scale, (x,), kwargs={"bias": 1.0}), Tensor)
    assert_type(bh.rpc_sync("w", scale, kwargs={"x": x}), Tensor)
    assert_type(bh.rpc_async("w", scale, [x]), bh.Future[Tensor])
    assert_type(bh.rpc_async("w", scale, [x], {"bias": 1.0}, 3.0), bh.Future[Tensor])
    assert_type(bh.remote("w", dict[str, int], kwargs={"a": 1}), bh.RRef[dict[str, int]])
    assert_type(bh.rpc_sync("w", later, [x, 2]), str)
    assert_type(bh.rpc_sync("w", later, (x,), {"times": 2}), str)
    assert_type(bh.rpc_async("w", later, kwargs={"x": x, "times": 2}), bh.Future[str])


def exposed_names() -> None:
    assert_type(bh.rpc_sync("w", "power", (x, 2)), Any)
    assert_type(bh.rpc_async("w", "power", [x], {"exponent": 2}), bh.Future[Any])


def results_that_come_later() -> None:
    assert_type(bh.rpc_sync("w", later, (x, 2)), str)
    assert_type(bh.rpc_async("w", later, (x, 2)), bh.Future[str])
    assert_type(bh.remote("w", later, (x, 2)), bh.RRef[str])
    assert_type(bh.rpc_sync("w", by_future, ("v", x)), Tensor)
    assert_type(bh.rpc_async("w", by_future, ("v", x)), bh.Future[Tensor])
    assert_type(bh.rpc_sync("w", Counter(1).wait, (0.5,)), bool)


def other_callables() -> None:
    assert_type(bh.rpc_sync("w", pair, (1, [2])), dict[str, int])
    assert_type(bh.rpc_sync("w", Counter(1), (2,)), bytes)
    assert_type(bh.rpc_sync("w", Counter(1).add, (2,)), int)
    assert_type(bh.rpc_sync("w", Counter.add, (Counter(1), 2)), int)
    assert_type(bh.rpc_sync("w", Counter.named, ("a",)), Counter)
    assert_type(bh.rpc_sync("w", Counter.parse, ("1",)), int)
    assert_type(bh.rpc_sync("w", functools.partial(power, x), (2,)), Tensor)
    assert_type(bh.rpc_sync("w", lambda: 3), int)
    assert_type(bh.rpc_sync("w", lambda a, b: a + b, (1, 2)), int)
    assert_type(bh.rpc_sync("w", len, ([1],)), int)
    assert_type(bh.rpc_sync("w", operator.add, (1, 2)), Any)  # error: pyright (it finds int)
    assert_type(bh.rpc_sync("w", anything, (1,)), Any)
    assert_type(bh.rpc_sync("w", overload_free, (1, 2)), Any)  # error: pyright (it looks into the function)


def functions_of_torch() -> None:
    assert_type(bh.rpc_sync("w", torch.add, (x, 3)), Tensor)
    assert_type(bh.rpc_sync("w", torch.ones, (2,)), Tensor)
    assert_type(bh.rpc_sync("w", torch.zeros, ((2, 3),)), Tensor)
    assert_type(bh.rpc_sync("w", torch.cat, ([x, x],)), Tensor)
    assert_type(bh.rpc_sync("w", torch.matmul, (x, x)), Tensor)
    assert_type(bh.rpc_sync("w", torch.nn.functional.relu, (x,)), Tensor)
    assert_type(bh.rpc_sync("w", Tensor.sum, (x,)), Tensor)
    assert_type(bh.remote("w", nn.Linear, (4, 2)), bh.RRef[nn.Linear])
    assert_type(bh.remote("w", torch.ones, args=(2,), kwargs={"requires_grad": True}), bh.RRef[Tensor])


def arguments_of_unknown_types(
    numbers: tuple[int, ...],
    values: tuple[Any, ...],
    names: dict[str, Any] | None,
    positional: tuple[Any, ...] | list[Any] | None,
    function: Callable[..., T],
    given: Any,
) -> T:
    assert_type(bh.rpc_sync("w", count, numbers), int)
    assert_type(bh.rpc_sync("w", power, values), Tensor)
    assert_type(bh.rpc_sync("w", power, given), Tensor)
    assert_type(bh.rpc_sync("w", power, (given, given), names), Tensor)
    assert_type(bh.rpc_sync("w", given, (1,)), Any)
    return bh.rpc_sync("w", function, positional, names)


def wrong_arguments() -> None:
    bh.rpc_sync("w", power, (x, "two"))  # error
    bh.rpc_sync("w", power, ("x", 2))  # error
    bh.rpc_async("w", power, (x,))  # error
    bh.rpc_async("w", power, (x, 2, 3))  # error
    bh.remote("w", power, (x, 2.5))  # error
    bh.rpc_sync("w", power)  # error
    bh.rpc_async("w", power)  # error
    bh.remote("w", Counter)  # error
    bh.rpc_sync("w", power, x)  # error
    bh.rpc_sync("w", nothing, (1,))  # error
    bh.rpc_sync("w", scale, (x, "two"))  # error
    bh.rpc_sync("w", count, (1, "2"))  # error
    bh.remote("w", Counter, ("one",))  # error
    bh.rpc_sync("w", Counter(1), ("one",))  # error
    bh.rpc_sync("w", Counter(1).add, ("one",))  # error
    bh.rpc_sync("w", pair, (1, ["a"]))  # error
    bh.rpc_sync("w", later, (x, "two"))  # error
    bh.rpc_async("w", by_future, ("v", 1))  # error
    bh.remote("w", nn.Linear, ("four", 2))  # error
    bh.rpc_sync("w", torch.mm, (x, 3))  # error
    bh.rpc_sync("w", 3, (x,))  # error
    bh.rpc_sync(x, power, (x, 2))  # error
    bh.remote("w", "power", (x, 2))  # error
    bh.rpc_sync("w", power, (x, 2), retries=3)  # error


def wrong_results() -> None:
    number: int = bh.rpc_sync("w", power, (x, 2))  # error
    number = bh.rpc_async("w", power, (x, 2)).wait()  # error
    number = bh.rpc_sync("w", maybe, (1,))  # error
    print(number)
