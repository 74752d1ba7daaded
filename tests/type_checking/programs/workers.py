"""Functions that run on many workers, steps, and futures."""

from __future__ import annotations

from typing import Any, assert_type

from torch import Tensor, nn

import backhaul as bh
from tests.type_checking.handlers import count, nothing, power, scale, x


def launched() -> None:
    assert_type(bh.launch(nothing, 2), list[int])
    assert_type(bh.launch(nothing, ["a", "b"], args=()), list[int])
    assert_type(bh.launch(power, 2, args=(x, 2), timeout=60, start_method="forkserver"), list[Tensor])
    assert_type(bh.launch(scale, 2, args=(x,)), list[Tensor])
    assert_type(bh.launch(scale, 2, args=(x,), kwargs={"bias": 1.0}), list[Tensor])
    assert_type(bh.launch(count, 2, kwargs={"a": 1}), list[int])
    assert_type(bh.launch(scale, 2, args=[x]), list[Tensor])
    assert_type(bh.launch(scale, 2, args=[x], kwargs={"bias": 1.0}), list[Tensor])
    bh.launch(power, 2)  # error
    bh.launch(power, 2, args=(x,))  # error
    bh.launch(power, 2, args=(x, "two"))  # error
    bh.launch(nothing, 2, args=(1,))  # error
    bh.launch(nothing, 2, start_method="fork")  # error


def on_ray() -> None:
    with bh.ray.start(2) as cluster:
        assert_type(cluster.run(nothing), list[int])
        assert_type(cluster.run(power, (x, 2)), list[Tensor])
        assert_type(cluster.run(scale, (x,), {"bias": 1.0}, on=["worker1"]), list[Tensor])
        assert_type(cluster.run(scale, [x]), list[Tensor])
        assert_type(cluster.run(count, kwargs={"a": 1}), list[int])
        cluster.run(power, (x, "two"))  # error
        cluster.run(power)  # error


def retried(model: nn.Module) -> None:
    assert_type(bh.retry_step(nothing, model), int)
    assert_type(bh.retry_step(power, model, (x, 2), attempts=2), Tensor)
    assert_type(bh.retry_step(scale, (model,), (x,), {"bias": 1.0}), Tensor)
    assert_type(bh.retry_step(scale, (model,), kwargs={"x": x}), Tensor)
    assert_type(bh.retry_step(scale, model, [x]), Tensor)
    bh.retry_step(power, model, (x, "two"))  # error
    bh.retry_step(power, model, (x,))  # error
    bh.retry_step(power, model)  # error


async def futures() -> None:
    one, two = bh.rpc_async("w", power, (x, 2)), bh.rpc_async("w", nothing)
    assert_type(await one, Tensor)
    assert_type(one.then(lambda done: str(done.value())), bh.Future[str])
    assert_type(bh.wait_all([one, one]), list[Tensor])
    assert_type(bh.wait_all([one, two]), list[Any])
    assert_type(bh.collect_all([two]).wait()[0].value(), int)
    bh.wait_all([x])  # error
    number: int = await one  # error
    print(number)
