"""Clusters that are started and shut down in different cells of a notebook."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

import backhaul as bh
from backhaul._launch.embedded import Cluster
from backhaul._transport.base import Endpoint, EndpointFactory
from backhaul._transport.inproc import InprocEndpoint
from backhaul._worker.worker import running_workers

from . import remote_functions as remote
from .remote_functions import PATIENCE

T = TypeVar("T")


def cell(function: Callable[..., T], *args: Any) -> T:
    """Run something as a cell does: what it sets in its context is lost afterwards."""
    return contextvars.copy_context().run(function, *args)


def whoami() -> str:
    return bh.get_worker_info().name


@pytest.fixture
def pair(endpoints: EndpointFactory) -> Iterator[Cluster]:
    """A cluster that is not started."""
    made = bh.cluster(["alice", "bob"], endpoints=endpoints)
    yield made
    made.shutdown(graceful=False)


def test_cells_use_a_cluster_that_another_has_started(pair: Cluster) -> None:
    assert cell(pair.start) is pair
    assert cell(whoami) == "alice"
    with bh.context() as ctx:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        bh.backward(ctx, [bh.rpc_sync("bob", torch.pow, args=(x, 2)).sum()])
        assert torch.equal(bh.get_gradients(ctx)[x], torch.tensor([2.0, 4.0]))
    assert bh.rpc_sync("bob", remote.whoami) == "bob"
    with pair.workers[1]:
        assert whoami() == "bob"
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(whoami).result(PATIENCE) == "alice", "also on threads of the program's"
    cell(pair.shutdown)
    assert running_workers() == []


def test_starting_twice_is_starting_once(pair: Cluster) -> None:
    workers = pair.start().workers
    assert pair.start().start().workers == workers == sorted(running_workers(), key=lambda worker: worker.info.id)
    assert bh.rpc_sync("bob", remote.whoami) == "bob"


def test_shutting_down_twice_is_shutting_down_once(pair: Cluster) -> None:
    pair.shutdown()  # it has not even begun
    pair.start()
    for _ in range(3):
        pair.shutdown()
    assert not pair.running


def test_a_cluster_may_be_started_again(pair: Cluster) -> None:
    before = pair.start().workers
    pair.shutdown()
    after = pair.start().workers
    assert not set(before) & set(after)
    assert bh.rpc_sync("bob", remote.whoami) == "bob"


def test_a_cluster_that_lost_a_worker_starts_anew(pair: Cluster) -> None:
    """``bh.shutdown`` ends the current worker alone."""
    pair.start()
    bh.shutdown(graceful=False)
    assert pair.start().running
    assert whoami() == "alice"
    assert bh.rpc_sync("bob", remote.whoami) == "bob"


def test_a_cell_that_is_run_again_starts_anew(endpoints: EndpointFactory) -> None:
    """``c = bh.cluster(2); c.start()``: nobody can shut the first one down any more."""
    made = []
    for _ in range(3):
        made.append(bh.cluster(2, endpoints=endpoints))
        made[-1].start()
        assert bh.rpc_sync("worker1", remote.whoami) == "worker1"
        assert running_workers() != []
        assert [one.running for one in made] == [False] * (len(made) - 1) + [True]
    assert len(running_workers()) == 2
    made[0].shutdown()
    assert bh.rpc_sync("worker1", remote.whoami) == "worker1", "that of an old one does nothing to the new one"
    made[-1].shutdown()


def test_a_cell_is_run_again_while_handlers_of_the_old_cluster_wait(gate_name: str) -> None:
    old = bh.cluster(2).start()
    future = bh.rpc_async("worker1", remote.wait_at, args=(gate_name,), timeout=0)
    assert remote.gate(f"{gate_name} reached").wait(PATIENCE)
    new = bh.cluster(2).start()
    with pytest.raises(bh.BackhaulError):
        future.wait(PATIENCE)
    assert (old.running, new.running) == (False, True)
    new.shutdown()


def test_nothing_has_to_refer_to_it() -> None:
    bh.cluster(2).start()
    assert bh.rpc_sync("worker1", remote.whoami) == "worker1"
    bh.cluster(1).start().shutdown()
    assert running_workers() == []


def test_a_with_goes_before_it_and_leaves_it_alone(pair: Cluster) -> None:
    pair.start()
    with bh.cluster(["carol", "dave"]):
        assert whoami() == "carol"
        assert pair.running
    assert whoami() == "alice"


def test_leaving_a_with_shuts_a_started_cluster_down(pair: Cluster) -> None:
    with pair.start() as workers:
        assert workers == pair.workers
        assert whoami() == "alice"
    assert not pair.running


def test_entering_twice_is_an_error(pair: Cluster) -> None:
    with pair, pytest.raises(RuntimeError) as caught:
        pair.__enter__()
    assert "alice, bob is entered already" in str(caught.value)
    with pair:  # one after the other is fine
        assert whoami() == "alice"
    pair.start()
    with pair, pytest.raises(RuntimeError), pair:
        pytest.fail("it was entered")


def test_a_decorated_function_has_a_cluster_of_its_own() -> None:
    @bh.cluster(2)
    def count(depth: int) -> int:
        here = len(running_workers())
        return here if not depth else count(depth - 1)

    assert count(0) == 2
    assert count(1) == 4
    assert running_workers() == []


def test_what_is_used_before_it_starts_says_what_to_do() -> None:
    pair = bh.cluster(2)
    assert "start()" in repr(pair)
    for use in (lambda: pair.workers, lambda: bh.rpc_sync("worker1", remote.whoami), lambda: bh.context().__enter__()):
        with pytest.raises(bh.errors.NotInitializedError) as caught:
            use()
        assert "start()" in str(caught.value)
    pair.start()
    pair.shutdown()
    for use in (lambda: pair.workers, lambda: bh.rpc_sync("worker1", remote.whoami)):
        with pytest.raises(bh.errors.NotInitializedError) as caught:
            use()
        assert "start()" in str(caught.value)


def test_a_start_that_fails_leaves_nothing_and_may_be_repeated() -> None:
    made: list[Endpoint] = []

    def make() -> Endpoint:
        if len(made) == 1:
            made.append(None)  # type: ignore[arg-type]
            raise OSError("no more of these")
        made.append(InprocEndpoint())
        return made[-1]

    pair = bh.cluster(2, endpoints=make)
    with pytest.raises(OSError):
        pair.start()
    assert (pair.running, running_workers()) == (False, [])
    assert pair.start().running
    pair.shutdown()


def test_a_handler_does_not_wait_for_itself(pair: Cluster) -> None:
    pair.start()
    with pytest.raises(bh.BackhaulError) as caught:
        bh.rpc_sync("bob", shut_down_all)
    assert "handler" in str(caught.value)
    assert pair.running


def shut_down_all() -> None:
    from backhaul._launch import embedded

    assert embedded._started is not None
    embedded._started.shutdown()


def test_a_forked_child_has_no_cluster(pair: Cluster) -> None:
    pair.start()
    child = os.fork()
    if not child:
        try:
            fine = (
                not pair.running and not running_workers() and bh.cluster(2).start().running and whoami() == "worker0"
            )
            os._exit(0 if fine else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert bh.rpc_sync("bob", remote.whoami) == "bob"


ENDS = {
    "as it is": "",
    "forgotten": "del cluster",
    "shut down": "cluster.shutdown()",
    "started anew": "cluster = bh.cluster(3).start()",
    "with a call": "future = bh.rpc_async('worker1', torch.ones, args=(2,))",
    "with a call that does not end": """
begun = threading.Event()
def wait():
    begun.set()
    threading.Event().wait()
future = bh.rpc_async('worker1', wait, timeout=0)
begun.wait()
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_may_end_without_a_word(end: str) -> None:
    program = f"""
import threading, torch, backhaul as bh
cluster = bh.cluster(2).start()
bh.rpc_sync("worker1", torch.ones, args=(2,))
{ENDS[end]}
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    if end == "with a call that does not end":
        (line,) = done.stderr.splitlines()
        assert line.startswith("worker 'worker1' closed while handlers still ran")
    else:
        assert done.stderr == ""
