"""Calls that are made again: against a worker whose channel breaks, that is killed, or that comes back as another."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import msgspec
import pytest
import torch

import backhaul as bh
from backhaul._rpc.calls.pending_call import Pending
from backhaul._rpc.node import Node, describe, start_node
from backhaul._transport.inproc import InprocEndpoint
from backhaul.testing.faults import Faults

from . import remote_functions as remote
from .remote_functions import PATIENCE

QUICK = bh.Retry(attempts=4, backoff=0.01)


def last_word(pending: Pending) -> list[str]:
    return [pending.label.rpartition(".")[2]]


def lose(worker: bh.Worker, *names: str, times: int) -> None:
    Faults(last_word, lose=names, times=times).install(worker.part(Node).client)


WAYS: dict[str, Any] = {
    "sync": bh.rpc_sync,
    "async": lambda *args, **more: bh.rpc_async(*args, **more).wait(PATIENCE),
}


@pytest.mark.parametrize("way", [*WAYS, "remote"])
def test_a_call_is_made_again_and_says_so(workers: list[bh.Worker], way: str, caplog: pytest.LogCaptureFixture) -> None:
    lose(workers[0], "identity", times=3)
    with caplog.at_level(logging.WARNING, logger="backhaul"):
        if way == "remote":
            made = bh.remote("bob", remote.identity, args=(7,), retry=QUICK)
            assert made._created is not None
            made._created.wait(PATIENCE)
            assert made.to_here() == 7
        else:
            assert WAYS[way]("bob", remote.identity, args=(7,), retry=QUICK) == 7
    told = [record.getMessage() for record in caplog.records if "trying again" in record.getMessage()]
    assert len(told) == 3
    assert "identity on worker" in told[0]
    assert "attempt 1 of 4" in told[0]
    assert bh.get_debug_info()["num_retries"] == 3


@pytest.mark.parametrize("way", ["sync", "async"])
def test_the_last_error_says_how_many_attempts_were_made(workers: list[bh.Worker], way: str) -> None:
    lose(workers[0], "identity", times=100)
    with pytest.raises(bh.PeerLostError) as caught:
        WAYS[way]("bob", remote.identity, args=(7,), retry=QUICK)
    assert caught.value.__notes__ == ["4 attempts were made, of 4 allowed"]
    with pytest.raises(bh.PeerLostError):
        WAYS[way]("bob", remote.identity, args=(7,))
    assert bh.get_debug_info()["num_retries"] == 3


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("way", ["sync", "async"])
def test_what_the_function_raises_is_not_tried_again(way: str) -> None:
    with pytest.raises(ZeroDivisionError):
        WAYS[way]("bob", remote.raise_it, args=(ZeroDivisionError(),), retry=QUICK)
    with pytest.raises(bh.errors.UnknownWorkerError):
        WAYS[way]("nobody", remote.identity, args=(1,), retry=QUICK)
    assert bh.get_debug_info()["num_retries"] == 0


@pytest.mark.parametrize("way", ["sync", "async"])
def test_all_attempts_have_the_time_of_the_call(workers: list[bh.Worker], way: str) -> None:
    lose(workers[0], "identity", times=10_000)
    forever = bh.Retry(attempts=10_000, backoff=0.01, longest=0.01)
    over = bh.PeerLostError, bh.CallTimeoutError  # the latter if the time ends just before an attempt
    with pytest.raises(over) as caught:
        WAYS[way]("bob", remote.identity, args=(7,), retry=forever, timeout=0.1)
    assert caught.value.__notes__
    with bh.deadline(0.1), pytest.raises(over):
        WAYS[way]("bob", remote.identity, args=(7,), retry=forever)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_an_attempt_that_takes_too_long_is_made_again_if_asked_for(workers: list[bh.Worker], way: str) -> None:
    late = Faults(last_word, delay={"identity": PATIENCE})
    late.install(workers[0].part(Node).client)
    patient = bh.Retry(attempts=3, timeout=0.05, backoff=0, on=(bh.CallTimeoutError,))
    with pytest.raises(bh.CallTimeoutError) as caught:
        WAYS[way]("bob", remote.identity, args=(7,), retry=patient)
    assert caught.value.timeout == 0.05
    assert caught.value.__notes__ == ["3 attempts were made, of 3 allowed"]


def test_cancelling_ends_the_attempts(workers: list[bh.Worker]) -> None:
    lose(workers[0], "identity", times=100)
    slow = bh.Retry(attempts=100, backoff=PATIENCE, longest=PATIENCE)
    future = bh.rpc_async("bob", remote.identity, args=(7,), retry=slow, timeout=0)
    assert future.cancel()
    with pytest.raises(bh.CallCancelledError):
        future.wait(PATIENCE)
    assert not future.cancel()
    assert not workers[0].part(Node).client.idleness._others, "a shutdown would wait for the end of the pause"


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_gradients_are_those_of_the_attempt_that_worked(workers: list[bh.Worker], way: str, mode: Any) -> None:
    w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    x = w * w
    (x.exp() + x).sum().backward()
    expected, w.grad = w.grad, None
    lose(workers[0], "exp", times=2)
    with bh.context() as ctx:
        x = w * w
        y = WAYS[way]("bob", torch.exp, args=(x,), retry=QUICK)
        bh.backward(ctx, [(y + x).sum()], mode=mode, timeout=30)
        assert torch.equal(bh.get_gradients(ctx)[w], expected)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_gradients_after_a_channel_broke_under_way(workers: list[bh.Worker], mode: Any, gate_name: str) -> None:
    """The first attempt arrived, and its worker recorded it; the channel broke before the reply."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    with bh.context() as ctx:
        x = w * 3
        future = bh.rpc_async("bob", _slow_square, args=(gate_name, x), retry=QUICK)
        assert remote.gate(f"{gate_name} reached").wait(PATIENCE)
        channel = workers[0].part(Node).peers.find("bob").channel
        assert channel is not None
        channel.close()
        remote.open_gate(gate_name)
        y = future.wait(PATIENCE)
        bh.backward(ctx, [(y + x).sum()], mode=mode, timeout=30)
        assert torch.equal(bh.get_gradients(ctx)[w], 18 * w.detach() + 3)
    assert bh.get_debug_info()["num_retries"] == 1


def _slow_square(name: str, x: torch.Tensor) -> torch.Tensor:
    remote.wait_at(name)
    return x * x


def test_a_worker_that_came_back_under_its_name_is_found() -> None:
    with bh.cluster(["alice", "bob"]) as (alice, bob):
        node, options = alice.part(Node), bh.Options()
        bob.part(Node).shutdown(graceful=False, timeout=5)
        future = bh.rpc_async("bob", os.getpid, retry=bh.Retry(attempts=1000, backoff=0.01, longest=0.05))
        # Its successor, with another incarnation and address.
        endpoint = InprocEndpoint()
        own = msgspec.structs.replace(describe("bob", 1, endpoint, options, host="this process"), epoch=1)
        again = start_node(own, [node.peers.own.record, own], endpoint, options)
        try:
            assert node.peers.admit(own) == ""
            assert future.wait(PATIENCE) == os.getpid()
        finally:
            again.shutdown(graceful=False, timeout=5)
        node.shutdown(graceful=False, timeout=5)


def _die_under_retries() -> Any:
    if bh.get_worker_info().id == 1:
        time.sleep(PATIENCE)
    pid = bh.rpc_sync("worker1", os.getpid)
    future = bh.rpc_async("worker1", time.sleep, args=(PATIENCE,), retry=QUICK)
    os.kill(pid, signal.SIGKILL)
    try:
        future.wait(PATIENCE)
    except bh.PeerLostError as error:
        bh.shutdown(graceful=False)
        return error.__notes__
    return None


def test_a_worker_that_was_killed_and_does_not_come_back() -> None:
    with pytest.raises(bh.errors.WorkerFailedError) as caught:
        bh.launch(_die_under_retries, 2, timeout=PATIENCE, start_method="forkserver")
    assert caught.value.worker == "worker1"


def test_a_shutdown_ends_what_waits_to_be_made_again() -> None:
    with bh.cluster(1, options=bh.Options(shutdown_timeout=5)) as (worker,):
        lose(worker, "identity", times=100)
        slow = bh.Retry(attempts=100, backoff=PATIENCE, longest=PATIENCE)
        future = bh.rpc_async("worker0", remote.identity, args=(7,), retry=slow, timeout=0)
        worker.part(Node).shutdown(graceful=False, timeout=5)
        with pytest.raises(bh.errors.NotInitializedError):
            future.wait(PATIENCE)
