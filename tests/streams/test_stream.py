"""Streams: what iteration gives, with which gradients, and what ends when either end goes away."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import queue
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import backhaul as bh
from tools.fleet import Fleet

DEADLINE_SECONDS = 30.0


def mixed(seed: int, x: torch.Tensor, *, most: int = 20) -> Iterator[Any]:
    """Items of all kinds; some need gradients."""
    draw = random.Random(seed)
    for number in range(draw.randrange(most)):
        kind = draw.randrange(5)
        if kind == 0:
            yield number
        elif kind == 1:
            yield {"n": [number, "text"], "t": torch.full((2,), float(number))}
        elif kind == 2:
            yield x * number
        elif kind == 3:
            yield (x + number).sum(), number
        else:
            x = x * 2


async def mixed_later(seed: int, x: torch.Tensor, *, most: int = 20) -> AsyncIterator[Any]:
    for item in mixed(seed, x, most=most):
        await asyncio.sleep(0)
        yield item


def mixed_list(seed: int, x: torch.Tensor, *, most: int = 20) -> list[Any]:
    return list(mixed(seed, x, most=most))


def consume(items: Iterator[Any], x: torch.Tensor, step: bool) -> list[Any]:
    """What a program sees: the items, and the gradients of ``x`` after a pass for each item, or for all at once."""
    seen, losses = [], []
    for item in items:
        seen.append(tree_map_only(torch.Tensor, lambda t: (t.tolist(), t.requires_grad), item))
        tensors = [t for t in (item if isinstance(item, tuple) else (item,)) if isinstance(t, torch.Tensor)]
        losses += [t.sum() for t in tensors if t.requires_grad]
        if step and losses:
            losses.pop().backward(retain_graph=True)
    if losses:
        torch.stack(losses).sum().backward()
    return [seen, x.grad]


@pytest.mark.parametrize("make", [mixed, mixed_later, mixed_list])
def test_items_and_gradients(make: Callable[..., Any]) -> None:
    with bh.cluster(2) as (here, there):
        for seed in range(40):
            draw = random.Random(-seed)
            step = bool(draw.randrange(2))
            mine, theirs = (torch.arange(3.0, requires_grad=True) for _ in range(2))
            expected = consume(mixed(seed, mine), mine, step)
            with bh.stream("worker1", make, (seed, theirs), {"most": 20}, ahead=draw.randint(1, 9)) as found:
                assert repr(consume(found, theirs, step)) == repr(expected), f"seed {seed}"
                assert list(found) == []
        gc.collect()
        for worker in (here, there):
            with worker:
                counters = bh.get_debug_info()
                assert counters["num_pending_calls"] == 0, counters


weight = torch.ones(2, requires_grad=True)  # of the producer


def test_each_item_has_a_pass_of_its_own() -> None:
    """Without ``retain_graph``, as a loop does that trains."""
    weight.grad = None
    with bh.cluster(2), bh.stream("worker1", products, (6,)) as found:
        for item in found:
            item.square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0 * sum(number**2 for number in range(6))] * 2


def products(count: int) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield weight * number


# Credit.

made: list[int] = []


def counted(most: int) -> Iterator[int]:
    for number in range(most):
        made.append(number)
        yield number


@pytest.mark.parametrize("ahead", [1, 2, 3, 8])
def test_no_more_is_made_than_there_is_credit_for(ahead: int) -> None:
    made.clear()
    with bh.cluster(2), bh.stream("worker1", counted, (100,), ahead=ahead) as found:
        for taken, item in enumerate(found):
            assert item == taken
            assert len(made) <= taken + 1 + ahead
    assert len(made) == 100


def test_credit_that_makes_no_sense() -> None:
    with bh.cluster(2), pytest.raises(ValueError, match="ahead=0"):
        bh.stream("worker1", counted, (1,), ahead=0)


# Ends.

ends: queue.SimpleQueue[str] = queue.SimpleQueue()


def endless(what: str) -> Iterator[int]:
    try:
        yield from itertools.count()
    finally:
        ends.put(what)


async def endless_later(what: str) -> AsyncIterator[int]:
    try:
        for number in itertools.count():
            yield number
    finally:
        ends.put(what)


@pytest.mark.parametrize("make", [endless, endless_later])
def test_closing_ends_the_generator(make: Callable[..., Any]) -> None:
    with bh.cluster(2):
        with bh.stream("worker1", make, ("closed",)) as found:
            assert [next(found) for _ in range(20)] == list(range(20))
            assert "open" in repr(found)
        assert ends.get(timeout=DEADLINE_SECONDS) == "closed"
        assert next(found, None) is None
        assert "closed" in repr(found)
        found.close()  # again

        for number in bh.stream("worker1", make, ("dropped",)):
            if number == 3:
                break
        gc.collect()
        assert ends.get(timeout=DEADLINE_SECONDS) == "dropped"
    assert ends.empty()


def failing(count: int) -> Iterator[int]:
    try:
        yield from range(count)
        raise KeyError("after the items")
    finally:
        ends.put("failed")


async def failing_later(count: int) -> AsyncIterator[int]:
    for number in failing(count):
        yield number


@pytest.mark.parametrize("make", [failing, failing_later])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_an_error_comes_after_the_items_before_it(make: Callable[..., Any], count: int) -> None:
    with bh.cluster(2):
        found = bh.stream("worker1", make, (count,))
        assert [next(found) for _ in range(count)] == list(range(count))
        with pytest.raises(KeyError, match="after the items"):
            next(found)
        assert next(found, None) is None
    assert ends.get(timeout=DEADLINE_SECONDS) == "failed"


def test_functions_that_make_no_items() -> None:
    with bh.cluster(2):
        with pytest.raises(TypeError, match="returned int; a stream needs a generator"):
            next(bh.stream("worker1", abs, (-1,)))
        with pytest.raises(bh.errors.UnknownWorkerError):
            bh.stream("worker7", counted, (1,))
        with pytest.raises(ZeroDivisionError):
            next(bh.stream("worker1", fail, ()))


def fail() -> list[int]:
    raise ZeroDivisionError


# Waits.

gate = threading.Event()


def slow() -> Iterator[int]:
    yield 0
    assert gate.wait(DEADLINE_SECONDS)
    yield 1


def test_an_item_that_is_late() -> None:
    gate.clear()
    with bh.cluster(2), bh.stream("worker1", slow, timeout=0.05) as found:
        assert next(found) == 0
        with pytest.raises(TimeoutError):
            next(found)
        gate.set()
        assert _patiently(found) == 1
        assert next(found, None) is None


def _patiently(found: bh.RemoteIterator[int]) -> int:
    for _ in range(int(DEADLINE_SECONDS / 0.05)):
        try:
            return next(found)
        except TimeoutError:
            pass
    raise AssertionError


def nested(to: str) -> Iterator[int]:
    try:
        yield bh.rpc_sync(to, wait_until_cancelled)
    except bh.CallCancelledError:
        ends.put("cancelled")
        raise


def wait_until_cancelled() -> int:
    ends.put("waiting")
    while not bh.cancelled():
        pass
    return 0


def test_closing_cancels_what_the_generator_waits_for() -> None:
    with bh.cluster(3):
        found = bh.stream("worker1", nested, ("worker2",))
        assert ends.get(timeout=DEADLINE_SECONDS) == "waiting"
        found.close()
        assert ends.get(timeout=DEADLINE_SECONDS) == "cancelled"


def test_async_for_and_a_cancelled_task() -> None:
    async def take_all(found: bh.RemoteIterator[int]) -> list[int]:
        return [item async for item in found]

    async def main() -> None:
        assert await take_all(bh.stream("worker1", counted, (50,))) == list(range(50))
        gate.clear()
        found = bh.stream("worker1", slow)
        assert await anext(found) == 0
        task = asyncio.ensure_future(anext(found))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        assert await take_all(found) == [1]

    with bh.cluster(2):
        asyncio.run(main())


# Lost workers.


def with_trace(folder: str) -> Iterator[int]:
    try:
        yield from itertools.count()
    finally:
        (Path(folder) / "ended").touch()


def use_and_die(to: str, folder: str) -> None:
    assert next(bh.stream(to, with_trace, (folder,))) == 0
    os.kill(os.getpid(), signal.SIGKILL)


def exists(path: str) -> bool:
    return Path(path).exists()


@pytest.mark.may_leak  # the fork server
def test_either_end_is_killed(tmp_path: Path) -> None:
    with Fleet(2) as fleet, fleet.worker:
        found = bh.stream("worker2", itertools.count)
        assert [next(found) for _ in range(100)] == list(range(100))
        with pytest.raises(bh.PeerLostError):
            bh.rpc_sync("worker1", use_and_die, args=("worker2", str(tmp_path)))
        while not bh.rpc_sync("worker2", exists, args=(str(tmp_path / "ended"),)):
            pass  # a test that fails ends by its timeout
        fleet.signal("worker2", signal.SIGKILL)
        with pytest.raises(bh.PeerLostError) as caught:
            list(found)
        assert caught.value.worker == "worker2"
        assert next(found, None) is None
