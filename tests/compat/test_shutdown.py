"""``shutdown`` of ``backhaul.compat.rpc`` does not wait for crashed workers."""

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
    """The port of a store for the test processes. The workers use another store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def waiting_workers() -> set[str]:
    """The workers that have called ``shutdown``. Runs on the leader."""
    return {name for gathering in list(api._rounds.values()) for name in gathering.values}


def shut_down_or_crash(rank: int, port: int, path: str, victim: int, when: str, static: bool) -> Any:
    """All workers but one shut down. That one crashes before, or while the others wait for it."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=PATIENCE))
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=PATIENCE)
    size = WORKERS if static else None
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    store.set(f"started {rank}", "")
    store.wait([f"started {other}" for other in range(WORKERS)])
    others = [f"worker{other}" for other in range(WORKERS) if other != victim]
    if rank == victim:
        store.set("pid", str(os.getpid()))
        while when == "while they wait" and not set(others) <= rpc.rpc_sync("worker0", waiting_workers):
            pass
        crash()
    if when == "before":
        with pytest.raises(RuntimeError):  # fails when the victim has crashed
            rpc.rpc_sync(f"worker{victim}", signal.pause, timeout=0)
    rpc.shutdown()
    return "ended", api._is_current_rpc_agent_set()


@pytest.mark.parametrize("victim", range(WORKERS))
@pytest.mark.parametrize("when", ["before", "while they wait"])
def test_a_crash_in_a_static_group(store_port: int, tmp_path: Any, victim: int, when: str) -> None:
    found = run_processes(shut_down_or_crash, WORKERS, store_port, f"{tmp_path}/store", victim, when, True)
    assert found == [DIED if rank == victim else ("ended", False) for rank in range(WORKERS)]


def shut_down_without_a_round(rank: int, path: str) -> str:
    """The leader has crashed. The others find that out when they wait for all calls to end, and not before."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=PATIENCE)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
    if rank == 0:
        signal.pause()
    api._wait_all_workers = lambda timeout: set()
    rpc.rpc_async("worker0", crash)
    rpc.shutdown()
    return "ended"


def test_a_leader_whose_crash_is_noticed_last(tmp_path: Any) -> None:
    assert run_processes(shut_down_without_a_round, WORKERS, f"{tmp_path}/store") == [DIED, "ended", "ended"]


@pytest.mark.parametrize("victim", range(WORKERS))
def test_a_crash_in_a_dynamic_group(store_port: int, tmp_path: Any, victim: int) -> None:
    found = run_processes(shut_down_or_crash, WORKERS, store_port, f"{tmp_path}/store", victim, "before", False)
    assert found == [DIED if rank == victim else ("ended", False) for rank in range(WORKERS)]


def fail_to_shut_down(rank: int, path: str) -> str:
    """The shutdown of the follower fails while the handler of the leader's last call runs."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=PATIENCE)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    accept_values, failed = api._broadcast_to_followers, threading.Event()

    def accept_values_slowly(*args: Any) -> None:
        accept_values(*args)
        failed.wait(PATIENCE)
        time.sleep(0.2)  # by then, a worker that does not wait for its handlers has ended
        raise RuntimeError("the follower's handler failed")

    def fail() -> None:
        failed.set()
        raise RuntimeError("the follower's shutdown failed")

    if rank == 1:
        api._broadcast_to_followers, api._delete_all_user_and_unforked_owner_rrefs = accept_values_slowly, fail
    with pytest.raises(RuntimeError) as error:
        rpc.shutdown()
    return str(error.value)


def test_a_worker_whose_shutdown_failed_sends_its_last_reply(tmp_path: Any) -> None:
    leader, follower = run_processes(fail_to_shut_down, 2, f"{tmp_path}/store")
    assert "the follower's handler failed" in leader
    assert follower == "the follower's shutdown failed"
