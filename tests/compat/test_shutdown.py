"""A shutdown of the reference's kind does not wait for a worker that has crashed, whenever that was."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import TCPStore

from backhaul.compat import rpc
from backhaul.compat.rpc import api

from ..cluster.processes import DIED, run_processes
from ..cluster.remote_functions import PATIENCE

WORKERS = 3


@pytest.fixture
def store_port() -> Iterator[int]:
    """Of the store where the processes meet, beside their workers' own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def who_waits() -> set[str]:
    """At the leader: the workers that have come to the shutdown."""
    return {name for gathering in list(api._rounds.values()) for name in gathering.values}


def end_without(rank: int, port: int, path: str, victim: int, when: str, static: bool) -> Any:
    """All but one shut down; that one crashes before, or when the others wait for it."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=PATIENCE))
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=PATIENCE)
    size = WORKERS if static else None
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    store.set(f"there {rank}", "")
    store.wait([f"there {other}" for other in range(WORKERS)])
    others = [f"worker{other}" for other in range(WORKERS) if other != victim]
    if rank == victim:
        store.set("pid", str(os.getpid()))
        while when == "while they wait" and not set(others) <= rpc.rpc_sync("worker0", who_waits):
            pass
        crash()
    if when == "before":
        with pytest.raises(RuntimeError):  # once this has failed it is dead
            rpc.rpc_sync(f"worker{victim}", signal.pause, timeout=0)
    rpc.shutdown()
    return "ended", api._is_current_rpc_agent_set()


@pytest.mark.parametrize("victim", range(WORKERS))
@pytest.mark.parametrize("when", ["before", "while they wait"])
def test_of_a_group_of_known_size(store_port: int, tmp_path: Any, victim: int, when: str) -> None:
    found = run_processes(end_without, WORKERS, store_port, f"{tmp_path}/store", victim, when, True)
    assert found == [DIED if rank == victim else ("ended", False) for rank in range(WORKERS)]


@pytest.mark.parametrize("victim", range(WORKERS))
def test_of_a_group_that_changes(store_port: int, tmp_path: Any, victim: int) -> None:
    found = run_processes(end_without, WORKERS, store_port, f"{tmp_path}/store", victim, "before", False)
    assert found == [DIED if rank == victim else ("ended", False) for rank in range(WORKERS)]


def fail_to_end(rank: int, path: str) -> str:
    """The follower's shutdown fails while its handler of the leader's last call is running."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=PATIENCE)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    take_values, failed = api._broadcast_to_followers, threading.Event()

    def take_values_slowly(*args: Any) -> None:
        take_values(*args)
        failed.wait(PATIENCE)
        time.sleep(0.2)  # a worker that does not wait for its handlers has ended by then
        raise RuntimeError("failed at the follower")

    def fail() -> None:
        failed.set()
        raise RuntimeError("failed at its end")

    if rank == 1:
        api._broadcast_to_followers, api._delete_all_user_and_unforked_owner_rrefs = take_values_slowly, fail
    with pytest.raises(RuntimeError) as error:
        rpc.shutdown()
    return str(error.value)


def test_a_worker_whose_shutdown_failed_answers_first(tmp_path: Any) -> None:
    leader, follower = run_processes(fail_to_end, 2, f"{tmp_path}/store")
    assert "failed at the follower" in leader
    assert follower == "failed at its end"
