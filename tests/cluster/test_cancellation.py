"""Calls that are cancelled, at each stage; and that nothing stays of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul._rpc.node import Node
from backhaul._wire.messages import Kind
from backhaul.testing.faults import Faults

from . import remote_functions as remote
from .remote_functions import PATIENCE, gate, open_gate, wait_at

seen: dict[str, Any] = {}


def until(condition: Callable[[], Any]) -> None:
    """Something is going to be true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def reached(name: str) -> None:
    assert gate(f"{name} reached").wait(PATIENCE)


def assert_cancelled(future: bh.Future[Any]) -> None:
    assert future.done()
    with pytest.raises(bh.CallCancelledError) as caught:
        future.wait()
    assert isinstance(caught.value, CancelledError)
    assert caught.value.worker == "bob"
    assert not future.cancel()


def assert_idle(workers: list[bh.Worker]) -> None:
    """Nothing is pending or under way anywhere."""
    for worker in workers:
        idleness = worker.part(Node).client.idleness
        until(lambda idleness=idleness: idleness.idle)


# Stages.


def test_before_it_was_sent(workers: list[bh.Worker]) -> None:
    ran: list[int] = seen.setdefault("unsent", [])
    Faults(lambda call: [call.label], delay={"_note_run": 0.05}).install(workers[0].part(Node).client)
    future = bh.rpc_async("bob", _note_run)
    assert future.cancel()
    assert_cancelled(future)
    assert bh.rpc_sync("bob", _note_run) is None  # takes as long
    assert len(ran) == 1
    seen.clear()
    assert_idle(workers)


def _note_run() -> None:
    seen["unsent"].append(1)


def test_while_it_waits_for_a_thread(workers: list[bh.Worker], gate_name: str) -> None:
    bob = workers[1].part(Node)
    tasks: list[Any] = []
    submit = workers[1].thread_pool.submit
    try:
        # All of bob's requests wait from here on, as if all his threads were busy.
        keep = bob.server._on_request
        workers[1].on_frame(Kind.REQUEST, lambda channel, frame: tasks.append(keep(channel, frame)), check=None)
        future = bh.rpc_async("bob", wait_at, args=(gate_name,))
        until(lambda: tasks)
        assert future.cancel()
        until(lambda: any(call.cancelled for call in bob.server.under_way))
    finally:
        workers[1].on_frame(Kind.REQUEST, keep, check=None)
        for task in tasks:
            submit(task)
    assert_cancelled(future)
    assert_idle(workers)
    assert bob.server.dropped == 1
    assert not gate(f"{gate_name} reached").is_set()


def test_a_function_that_runs_is_told_and_its_result_discarded(workers: list[bh.Worker], gate_name: str) -> None:
    future = bh.rpc_async("bob", _watch, args=(gate_name,))
    reached(gate_name)
    assert future.cancel()
    assert_cancelled(future)
    open_gate(gate_name)
    until(lambda: gate_name in seen)
    assert seen.pop(gate_name) == (True, 0.0)
    assert_idle(workers)


def _watch(name: str) -> bh.RRef[int]:
    wait_at(name)
    until(bh.cancelled)
    seen[name] = bh.cancelled(), bh.time_left()
    return bh.RRef(1)  # must not stay


def test_a_coroutine_is_cancelled(workers: list[bh.Worker], gate_name: str) -> None:
    future = bh.rpc_async("bob", _sleep_long, args=(gate_name,))
    reached(gate_name)
    assert future.cancel()
    assert_cancelled(future)
    until(lambda: gate_name in seen)
    assert seen.pop(gate_name) == "cancelled"
    assert_idle(workers)


async def _sleep_long(name: str) -> None:
    try:
        gate(f"{name} reached").set()
        await asyncio.sleep(PATIENCE)
    except asyncio.CancelledError:
        seen[name] = "cancelled"
        raise


@pytest.mark.parametrize("kind", ["rpc_sync", "rpc_async", "asyncio", "future", "to_here", "later"])
def test_what_it_waits_for_is_cancelled_too(workers: list[bh.Worker], gate_name: str, kind: str) -> None:
    function = {"asyncio": _nest_async, "later": _nest_later}.get(kind, _nest)
    future = bh.rpc_async("bob", function, args=(kind, gate_name))
    reached(gate_name)
    assert future.cancel()
    assert_cancelled(future)
    until(lambda: gate_name in seen)
    assert seen.pop(gate_name) is bh.CallCancelledError
    if kind not in ("future", "to_here"):  # carol was asked, and told
        until(lambda: f"{gate_name} carol" in seen)
        assert seen.pop(f"{gate_name} carol")
    open_gate(gate_name)
    assert_idle(workers)


def _nest(kind: str, name: str) -> None:
    try:
        if kind == "rpc_sync":
            bh.rpc_sync("carol", _tell_cancelled, args=(name,), timeout=0)
        elif kind == "rpc_async":
            bh.rpc_async("carol", _tell_cancelled, args=(name,)).wait()
        elif kind == "to_here":
            bh.remote(bh.get_worker_info(), wait_at, args=(name,)).to_here()
        else:
            gate(f"{name} reached").set()
            bh.Future().wait()
    except Exception as error:
        seen[name] = type(error)


async def _nest_async(kind: str, name: str) -> None:
    try:
        await bh.rpc_async("carol", _tell_cancelled, args=(name,))
    except asyncio.CancelledError:
        seen[name] = bh.CallCancelledError
        raise
    except bh.CallCancelledError as error:  # the call was faster
        seen[name] = type(error)


@bh.async_execution
def _nest_later(kind: str, name: str) -> bh.Future[Any]:
    def note(done: bh.Future[Any]) -> None:
        try:
            done.value()
        except Exception as error:
            seen[name] = type(error)

    return bh.rpc_async("carol", _tell_cancelled, args=(name,)).then(note)


def _tell_cancelled(name: str) -> None:
    gate(f"{name} reached").set()
    until(bh.cancelled)
    seen[f"{name} carol"] = True


def test_after_its_reply(workers: list[bh.Worker]) -> None:
    future = bh.rpc_async("bob", remote.identity, args=(3,))
    assert future.wait() == 3
    assert not future.cancel()
    assert future.wait() == 3
    assert not bh.Future().cancel()


# Who cancels.


def test_a_call_that_is_given_up_is_cancelled(workers: list[bh.Worker], gate_name: str) -> None:
    for call in (bh.rpc_sync, lambda *args, **more: bh.rpc_async(*args, **more).wait()):
        with pytest.raises(bh.CallTimeoutError):
            call("bob", _tell_cancelled, args=(gate_name,), timeout=0.05)
        until(lambda: f"{gate_name} carol" in seen)
        assert seen.pop(f"{gate_name} carol")
    assert_idle(workers)


def test_a_task_that_is_cancelled_cancels_what_it_awaits(workers: list[bh.Worker], gate_name: str) -> None:
    async def main() -> None:
        future = bh.rpc_async("bob", _tell_cancelled, args=(gate_name,)).then(lambda done: done.value())
        task = asyncio.ensure_future(_await(future))
        await asyncio.to_thread(reached, gate_name)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(bh.CallCancelledError):
            await future

    asyncio.run(main())
    until(lambda: f"{gate_name} carol" in seen)
    assert seen.pop(f"{gate_name} carol")
    assert_idle(workers)


async def _await(future: bh.Future[Any]) -> Any:
    return await future


def test_an_interrupt_cancels(workers: list[bh.Worker], gate_name: str) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        reached(gate_name)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        bh.rpc_sync("bob", _tell_cancelled, args=(gate_name,))
    thread.join()
    until(lambda: f"{gate_name} carol" in seen)
    assert seen.pop(f"{gate_name} carol")
    assert_idle(workers)


def lose_channel(workers: list[bh.Worker]) -> None:
    """What alice sends to bob goes through another channel from now on."""
    channel = workers[0].part(Node).peers.find("bob").channel
    assert channel is not None
    channel.abort("the test says so")


@pytest.mark.parametrize("kind", ["function", "coroutine", "rpc_sync", "rpc_async", "asyncio", "future", "later"])
def test_the_loss_of_its_channel_cancels(workers: list[bh.Worker], gate_name: str, kind: str) -> None:
    calls: dict[str, Any] = {"function": _watch, "coroutine": _sleep_long, "asyncio": _nest_async, "later": _nest_later}
    nested = kind not in ("function", "coroutine")
    future = bh.rpc_async("bob", calls.get(kind, _nest), args=(kind, gate_name) if nested else (gate_name,))
    reached(gate_name)
    lose_channel(workers)
    with pytest.raises(bh.PeerLostError):
        future.wait(PATIENCE)
    open_gate(gate_name)
    until(lambda: gate_name in seen)
    wanted = {"function": (True, 0.0), "coroutine": "cancelled"}
    assert seen.pop(gate_name) == wanted.get(kind, bh.CallCancelledError)
    if nested and kind != "future":
        until(lambda: f"{gate_name} carol" in seen)
        assert seen.pop(f"{gate_name} carol")
    assert_idle(workers)
    assert bh.rpc_sync("bob", remote.identity, args=(3,)) == 3


def test_what_waits_for_a_thread_when_its_channel_is_lost_is_dropped(workers: list[bh.Worker], gate_name: str) -> None:
    bob = workers[1].part(Node)
    limit = workers[1].options.threads
    running = [bh.rpc_async("bob", _spin, args=(f"{gate_name} {n}",)) for n in range(limit)]
    for n in range(limit):
        reached(f"{gate_name} {n}")
    queued = [bh.rpc_async("bob", _note, args=(gate_name,)) for _ in range(50)]
    until(lambda: len(bob.server.under_way) + seen.get(gate_name, 0) == limit + 50)  # one that waits long runs anyway
    lose_channel(workers)
    for future in running:
        with pytest.raises(bh.PeerLostError):
            future.wait(PATIENCE)
    answered = 0
    for future in queued:
        try:
            future.wait(PATIENCE)
            answered += 1
        except bh.PeerLostError:
            pass
    assert_idle(workers)
    ran = seen.pop(gate_name, 0)
    assert bob.server.dropped + ran == 50
    assert answered <= ran
    assert bob.server.dropped


def _spin(name: str) -> None:
    gate(f"{name} reached").set()
    until(bh.cancelled)


def _note(name: str) -> None:
    seen[name] = seen.get(name, 0) + 1


def test_others_may_wait_for_what_a_lost_caller_made(workers: list[bh.Worker], gate_name: str) -> None:
    made = bh.remote("bob", wait_at, args=(gate_name, 5))
    reached(gate_name)
    bh.rpc_sync("carol", _keep, args=(gate_name, made))
    lose_channel(workers)
    assert made._created is not None
    until(made._created.done)  # who asks before gets the value when it is there
    with pytest.raises(bh.PeerLostError):
        made.to_here(PATIENCE)
    open_gate(gate_name)
    assert bh.rpc_sync("carol", _fetch, args=(gate_name,)) == 5
    del made
    assert_idle(workers)
    with workers[1]:
        until(lambda: gc.collect() >= 0 and bh.get_debug_info()["num_owner_rrefs"] == 0)


def _keep(name: str, made: bh.RRef[int]) -> None:
    seen[name] = made


def _fetch(name: str) -> Any:
    return seen.pop(name).to_here(PATIENCE)


def test_all_of_many(workers: list[bh.Worker], gate_name: str) -> None:
    futures = [bh.rpc_async("bob", _tell_cancelled, args=(gate_name,)) for _ in range(20)]
    assert bh.collect_all(futures).cancel()
    for future in futures:
        assert_cancelled(future)
    assert_idle(workers)
    assert bh.get_debug_info()["num_calls_cancelled"] == 20
    seen.clear()


# What stays.


def test_references_of_a_cancelled_call_do_not_stay(workers: list[bh.Worker], gate_name: str) -> None:
    mine, theirs = bh.RRef(torch.ones(1)), bh.remote("carol", dict)
    assert theirs.to_here() == {}
    futures = [bh.rpc_async("bob", _keep_references, args=(gate_name, mine, theirs)) for _ in range(4)]
    futures += [bh.rpc_async("bob", _watch, args=(f"{gate_name} {n}",)) for n in range(4)]
    reached(gate_name)
    assert all([future.cancel() for future in futures])
    open_gate(gate_name)
    for n in range(4):
        open_gate(f"{gate_name} {n}")
    assert_idle(workers)
    del mine, theirs, futures
    for worker in workers:
        with worker:
            until(lambda: gc.collect() >= 0 and bh.get_debug_info()["num_owner_rrefs"] == 0)
            until(lambda: bh.get_debug_info()["num_user_rrefs"] == 0)
    seen.clear()


def _keep_references(name: str, mine: bh.RRef[Any], theirs: bh.RRef[Any]) -> Any:
    wait_at(name)
    return mine, theirs, bh.RRef(1)


def test_a_value_that_nobody_waits_for_is_said_to_be_so(workers: list[bh.Worker], gate_name: str) -> None:
    made = bh.remote("bob", _sleep_long, args=(gate_name,), timeout=0.1)
    with pytest.raises((bh.CallTimeoutError, bh.CallCancelledError)):
        made.to_here(timeout=PATIENCE)
    until(lambda: seen.pop(gate_name, None) == "cancelled")
    del made
    assert_idle(workers)
    with workers[1]:
        until(lambda: gc.collect() >= 0 and bh.get_debug_info()["num_owner_rrefs"] == 0)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_gradients_are_those_of_the_calls_that_were_not_cancelled(
    workers: list[bh.Worker], gate_name: str, mode: Any
) -> None:
    w = torch.ones(3, requires_grad=True)
    with bh.context() as ctx:
        x = w * 2
        future = bh.rpc_async("bob", _scale, args=(gate_name, x))
        reached(gate_name)
        assert future.cancel()
        y = bh.rpc_sync("bob", torch.mul, args=(x, 3))
        open_gate(gate_name)
        bh.backward(ctx, [y.sum() + x.sum()], mode=mode, timeout=20)
        assert torch.equal(bh.get_gradients(ctx)[w], torch.full((3,), 8.0))
    assert_idle(workers)
    for worker in workers:
        with worker:
            until(lambda: bh.get_debug_info()["num_autograd_contexts"] == 0)


def _scale(name: str, x: torch.Tensor) -> torch.Tensor:
    wait_at(name)
    return x * 100


def test_a_backward_pass_of_a_handler_is_aborted(workers: list[bh.Worker], gate_name: str) -> None:
    future = bh.rpc_async("bob", _stuck_backward, args=(gate_name,))
    reached(gate_name)
    assert future.cancel()
    until(lambda: gate_name in seen)
    assert seen.pop(gate_name) is bh.CallCancelledError
    open_gate(gate_name)
    assert_idle(workers)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        wait_at(ctx.name)
        return grad, None


def _wait_in_backward(x: torch.Tensor, name: str) -> torch.Tensor:
    return _Wait.apply(x, name)  # type: ignore[no-any-return, no-untyped-call]


def _stuck_backward(name: str) -> None:
    with bh.context() as ctx:
        y = bh.rpc_sync("carol", _wait_in_backward, args=(torch.ones(1, requires_grad=True), name))
        with contextlib.suppress(bh.CallCancelledError):
            bh.backward(ctx, [y.sum()])
            return
        seen[name] = bh.CallCancelledError
