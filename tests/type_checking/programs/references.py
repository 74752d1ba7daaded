"""References: the value, and its methods."""

from __future__ import annotations

from typing import Any, assert_type

from torch import Tensor, nn

import backhaul as bh
from tests.type_checking.handlers import Counter, x


def values(counter: bh.RRef[Counter]) -> None:
    assert_type(bh.RRef(Counter(1)), bh.RRef[Counter])
    assert_type(counter.to_here(), Counter)
    assert_type(counter.to_here(timeout=3), Counter)
    assert_type(counter.local_value(), Counter)
    assert_type(counter.owner(), bh.WorkerInfo)
    counter.to_here().add("one")  # error


def waiting_calls(counter: bh.RRef[Counter], layer: bh.RRef[nn.Linear], tensor: bh.RRef[Tensor]) -> None:
    assert_type(counter.rpc_sync().add(1), int)
    assert_type(counter.rpc_sync(timeout=3).add(1, times=2), int)
    assert_type(counter.rpc_sync().split(), tuple[int, str])
    assert_type(layer.rpc_sync().forward(x), Tensor)
    assert_type(tensor.rpc_sync().sum(), Tensor)
    counter.rpc_sync().add("one")  # error
    counter.rpc_sync().add(1, often=2)  # error
    counter.rpc_sync().subtract(1)  # error
    layer.rpc_sync().forward(1)  # error


def calls_that_do_not_wait(counter: bh.RRef[Counter]) -> None:
    assert_type(counter.rpc_async().add(1), bh.Future[Any])
    assert_type(counter.rpc_async().add("not checked"), bh.Future[Any])
    assert_type(counter.remote().split(), bh.RRef[Any])
    total: bh.Future[int] = counter.rpc_async().add(1)
    assert_type(total.wait(), int)
    counter.rpc_async()(1)  # error
    counter.remote().add(1).wait()  # error


def references_travel(counter: bh.RRef[Counter]) -> None:
    def use(counter: bh.RRef[Counter], amount: int) -> int:
        return counter.rpc_sync().add(amount)

    assert_type(bh.rpc_sync("w", use, (counter, 1)), int)
    bh.rpc_sync("w", use, (counter.to_here(), 1))  # error
    bh.rpc_sync("w", use, (bh.RRef(1), 1))  # error
