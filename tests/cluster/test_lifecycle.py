"""How workers start and end: ``init`` in all its forms, and ``shutdown`` whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, Store, TCPStore

import backhaul as bh
from backhaul._rpc.node import Node
from backhaul._transport.base import EndpointFactory
from backhaul._transport.sockets.addresses import parse
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._wire.messages import Kind
from backhaul.compat import rpc
from backhaul.compat.rpc import constants

from . import remote_functions as remote
from .processes import DIED, run_processes
from .remote_functions import PATIENCE, gate

PROGRAMS = pathlib.Path(__file__).parent / "programs"
SHORT = bh.Options(rendezvous_timeout=0.5)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are not under torchrun, whatever runs them."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "BACKHAUL_SECRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def alone() -> Iterator[bh.Worker]:
    """This process as the only worker of a cluster."""
    yield bh.init("alone", rank=0, world_size=1, store=HashStore())
    bh.shutdown()


@pytest.fixture
def store_port() -> Iterator[int]:
    """A store that outlives every worker."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


# Rendezvous.


def meet(rank: int, world_size: int, **how: Any) -> dict[str, Any]:
    """Start, call every worker, shut down."""
    name = f"{'abc'[rank]}{rank}"
    worker = bh.init(name, rank=rank, world_size=world_size, **how)
    assert worker is bh.current_worker()
    found = {
        "me": bh.get_worker_info(),
        "everyone": bh.get_worker_infos(),
        "heard": [bh.rpc_sync(info, remote.whoami) for info in bh.get_worker_infos()],
        "schemes": [address.partition(":")[0] for address in worker.endpoint.addresses],
    }
    bh.shutdown()
    assert worker.closed
    return found


def check_rendezvous(found: list[dict[str, Any]], *schemes: str) -> None:
    infos = [bh.WorkerInfo(f"{'abc'[rank]}{rank}", rank) for rank in range(len(found))]
    for rank, seen in enumerate(found):
        assert seen["me"] == infos[rank]
        assert seen["everyone"] == infos
        assert seen["heard"] == [info.name for info in infos]
        assert seen["schemes"] == list(schemes)


def meet_everywhere(rank: int, folder: str, port: int, tcp_port: int) -> list[dict[str, Any]]:
    """One rendezvous after the other, each at another store or with another method."""
    client = TCPStore("127.0.0.1", port, is_master=False)
    file = FileStore(f"{folder}/store", 3)
    return [
        meet(rank, 3, store=client),
        meet(rank, 3, store=client, options=bh.Options(transport="tcp")),  # a second time on the same store
        meet(rank, 3, store=file),
        meet(rank, 3, store=file, options=bh.Options(bind="127.0.0.1")),
        meet(rank, 3, options=bh.Options(init_method=f"file://{folder}/method", transport="unix")),
        meet(
            rank, 3, options=bh.Options(init_method=f"tcp://127.0.0.1:{tcp_port}", security=bh.Security(secret="ours"))
        ),
    ]


def test_stores_and_init_methods(tmp_path: pathlib.Path, store_port: int) -> None:
    found = run_processes(meet_everywhere, 3, str(tmp_path), store_port, free_port())
    for seen, schemes in zip(
        zip(*found, strict=True),
        (["unix"], ["tcp"], ["unix"], ["unix", "tcp"], ["unix"], ["unix"]),
        strict=True,
    ):
        check_rendezvous(list(seen), *schemes)


def test_a_cluster_of_one(alone: bh.Worker) -> None:
    assert bh.current_worker() is alone
    assert bh.get_worker_infos() == [alone.info] == [bh.WorkerInfo("alone", 0)]
    assert bh.rpc_sync("alone", remote.whoami) == "alone"
    assert bh.rpc_async(0, remote.whoami).wait() == "alone"


def test_under_torchrun(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    subprocess.run(
        [*command, PROGRAMS / "under_torchrun.py", tmp_path],
        check=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "before": ["NotInitializedError", None],
            "nothing to shut down": None,
            "names": ["worker0", "worker1"],
            "me": f"worker{rank}",
            "sum": [1.0 + rank] * 2,
            "served": ["worker0", "worker1"],
            "after": ["NotInitializedError", f"worker{rank}"],
            "again": "again0",
        }


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_ranks_that_do_not_come_are_named(kind: str, tmp_path: pathlib.Path) -> None:
    stores: dict[str, Callable[[], Store]] = {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), 4),
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    with pytest.raises(bh.errors.RendezvousError, match=r"\b1, 2, 3\b"):
        bh.init("early", rank=0, world_size=4, store=stores[kind](), options=SHORT)
    with pytest.raises(bh.errors.RendezvousError, match=r"\b0\b"):
        bh.init("early", rank=1, world_size=2, store=HashStore(), options=SHORT)
    with pytest.raises(bh.errors.NotInitializedError):
        bh.current_worker()
    bh.init("now", rank=0, world_size=1, store=HashStore())  # a failed start does not prevent the next
    bh.shutdown()


@pytest.mark.parametrize("way", ["env", "tcp", "file", "compat"])
def test_ranks_that_do_not_come_are_named_without_a_store(
    way: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "RENDEZVOUS_TIMEOUT", SHORT.rendezvous_timeout)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def start(rank: int) -> None:
        """A new address each time."""
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        method = {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/{rank}"}.get(way, "env://")
        if way == "compat":
            rpc.init_rpc("early", rank=rank, world_size=9)
        else:
            options = bh.Options(init_method=method, rendezvous_timeout=SHORT.rendezvous_timeout)
            bh.init("early", rank=rank, world_size=9, options=options)

    with pytest.raises(bh.errors.RendezvousError, match=r"8 of 9 did not come: ranks 1-8$"):
        start(0)
    missing = "8 of 9 did not come: ranks 0, 2-8$" if way == "file" else r"store at 127.*: rank 0, .* did not come"
    with pytest.raises(bh.errors.RendezvousError, match=missing):
        start(1)
    with pytest.raises(bh.errors.NotInitializedError):
        bh.current_worker()
    rpc._open_rendezvous = None


def come_alone(rank: int, method: str) -> str:
    options = bh.Options(init_method=method, rendezvous_timeout=0.5)
    try:
        bh.init("lost", rank=1, world_size=2, options=options)
    except bh.errors.RendezvousError:
        return "refused"
    return "met"


def test_a_store_that_nobody_serves() -> None:
    assert come_alone(0, f"tcp://127.0.0.1:{free_port()}") == "refused"


def test_an_init_method_that_cannot_work(tmp_path: pathlib.Path) -> None:
    """In another process, because no thread of the process runs while torch waits for the file."""
    assert run_processes(come_alone, 1, f"file://{tmp_path}/no/such/folder/store", patience=20) == ["refused"]


def take_a_name(rank: int, port: int, names: list[str]) -> Any:
    store = TCPStore("127.0.0.1", port, is_master=False)
    try:
        bh.init(names[rank], rank=rank, world_size=len(names), store=store)
    except bh.errors.RendezvousError as error:
        return error.worker, str(error)
    bh.shutdown()
    return None


def test_a_name_taken_twice(store_port: int) -> None:
    for worker, message in run_processes(take_a_name, 3, store_port, ["same", "other", "same"]):
        assert worker == "same"
        assert "0 and 2" in message


def test_init_twice(alone: bh.Worker) -> None:
    with pytest.raises(RuntimeError, match="alone"):
        bh.init("second", rank=0, world_size=1, store=HashStore())
    assert bh.current_worker() is alone
    assert bh.rpc_sync("alone", remote.whoami) == "alone"


def test_init_again_after_shutdown_on_the_same_store() -> None:
    store, seen = HashStore(), []
    for name in ("first", "second", "first"):
        worker = bh.init(name, rank=0, world_size=1, store=store)
        assert bh.rpc_sync(name, remote.whoami) == name
        seen.append(worker.incarnation)
        bh.shutdown()
    assert len(set(seen)) == 3


def test_arguments_of_init_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    for wrong in (
        {},
        {"rank": 0},
        {"world_size": 1},
        {"rank": 0, "world_size": 1},  # no address
        {"store": store},
        {"store": store, "rank": 0},
        {"store": store, "rank": 1, "world_size": 1},
        {"store": store, "rank": -1, "world_size": 1},
        {"store": store, "rank": 0, "world_size": 0},
        {"store": store, "rank": 0, "world_size": 1, "options": bh.Options(security=bh.Security(secret=""))},
    ):
        with pytest.raises(ValueError):
            bh.init("name", **wrong)
    for name in ("", "two words", "ü", "x" * 129, 5):
        with pytest.raises(ValueError):
            bh.init(name, rank=0, world_size=1, store=store)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK"):
        bh.init("name", world_size=1)


# Secrets.


def test_listening_beyond_loopback_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for bind in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="secret"):
            bh.init("open", rank=0, world_size=1, store=HashStore(), options=bh.Options(bind=bind))
    with pytest.raises(ValueError, match="easy to guess"):
        bh.init(
            "open",
            rank=0,
            world_size=1,
            store=HashStore(),
            options=bh.Options(bind="0.0.0.0", security=bh.Security(secret="given")),
        )
    given = bh.Options(bind="0.0.0.0", security=bh.Security(secret="given", allow_plain=True))
    worker = bh.init("guarded", rank=0, world_size=1, store=HashStore(), options=given)
    assert [address.partition(":")[0] for address in worker.endpoint.addresses] == ["unix", "tcp"]
    bh.shutdown()
    monkeypatch.setenv("BACKHAUL_SECRET", "from the environment")
    bh.init(
        "guarded",
        rank=0,
        world_size=1,
        store=HashStore(),
        options=bh.Options(bind="0.0.0.0", security=bh.Security(allow_plain=True)),
    )
    bh.shutdown()


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_a_wrong_secret_is_refused_and_named(way: str, caplog: pytest.LogCaptureFixture) -> None:
    where = {"unix": True} if way == "unix" else {"unix": False, "bind": "127.0.0.1"}
    known = iter([b"one", b"one", b"another"])
    with bh.cluster(["alice", "bob", "mallory"], endpoints=lambda: SocketEndpoint(secret=next(known), **where)) as (
        _,
        _,
        mallory,
    ):
        assert bh.rpc_sync("bob", remote.whoami) == "bob"
        for call in (bh.rpc_sync, bh.rpc_async):
            with pytest.raises(bh.errors.AuthenticationError) as caught:
                call("mallory", remote.whoami)
            assert caught.value.worker == "mallory"
            assert isinstance(caught.value, ConnectionError)
        with mallory:
            with pytest.raises(bh.errors.AuthenticationError) as caught:
                bh.rpc_sync("bob", remote.whoami)
            assert caught.value.worker == "bob"
        assert bh.rpc_sync("bob", remote.whoami) == "bob"
    assert any("refused" in message and way in message for message in caplog.messages)


def call_with_secret(rank: int, port: int, secrets: list[str]) -> Any:
    os.environ["BACKHAUL_SECRET"] = secrets[rank]
    store = TCPStore("127.0.0.1", port, is_master=False)
    bh.init(f"w{rank}", rank=rank, world_size=2, store=store)
    try:
        return bh.rpc_sync(1 - rank, remote.whoami)
    except bh.errors.AuthenticationError as error:
        return "refused", error.worker
    finally:
        store.set(f"{secrets} {rank}", "")
        store.get(f"{secrets} {1 - rank}")  # stay until the other has been refused
        bh.shutdown()  # does not wait for a worker that it cannot talk to


def test_secrets_of_two_processes(store_port: int) -> None:
    assert run_processes(call_with_secret, 2, store_port, ["same", "same"]) == ["w1", "w0"]
    assert run_processes(call_with_secret, 2, store_port, ["one", "other"]) == [("refused", "w1"), ("refused", "w0")]


def test_a_stranger_without_a_secret_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    options = bh.Options(transport="tcp")
    worker = bh.init("alone", rank=0, world_size=1, store=HashStore(), options=options)
    try:
        family, where = parse(worker.endpoint.addresses[0])
        for greeting in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"BACKHAUL" + bytes(200)):
            with socket.socket(family) as stranger:
                stranger.settimeout(PATIENCE)
                stranger.connect(where)
                me = f"tcp:127.0.0.1:{stranger.getsockname()[1]}"
                stranger.sendall(greeting)
                answer = _read_all(stranger)
            assert len(answer) < 100  # a greeting at most, and a refusal
            assert any("refused" in message and me in message for message in caplog.messages)
        assert bh.rpc_sync("alone", remote.whoami) == "alone"
    finally:
        bh.shutdown()


def _read_all(sock: socket.socket) -> bytes:
    found = b""
    try:
        while data := sock.recv(4096):
            found += data
    except ConnectionResetError:
        pass
    return found


# Without a worker.


def test_calls_without_a_worker() -> None:
    actions: list[Callable[[], Any]] = [
        lambda: bh.rpc_sync("anyone", remote.whoami),
        lambda: bh.rpc_async("anyone", remote.whoami),
        bh.get_worker_info,
        bh.get_worker_infos,
        bh.current_worker,
    ]
    for action in actions:
        with pytest.raises(bh.errors.NotInitializedError):
            action()
    bh.init("gone", rank=0, world_size=1, store=HashStore())
    for action in actions[2:]:
        action()
    bh.shutdown()
    for action in actions:
        with pytest.raises(bh.errors.NotInitializedError, match="gone") as caught:
            action()
        assert caught.value.worker == "gone"
    assert bh.shutdown() is None


def test_several_workers_and_none_is_current() -> None:
    def ask() -> Any:
        with pytest.raises(bh.errors.NotInitializedError, match="worker0, worker1"):
            bh.get_worker_info()
        with pytest.raises(bh.errors.NotInitializedError):
            bh.shutdown()

    with bh.cluster(2), ThreadPoolExecutor(1) as thread:  # a new thread has no current worker
        thread.submit(ask).result(PATIENCE)


# Clusters inside this process.


def test_a_cluster_takes_names_or_a_number() -> None:
    with bh.cluster(3) as workers:
        assert [worker.name for worker in workers] == ["worker0", "worker1", "worker2"]
    with bh.cluster(["x", "y"]) as workers:
        assert [worker.name for worker in workers] == ["x", "y"]
    for wrong in (0, -1, [], ["x", "x"], ["not a name"]):
        with pytest.raises(ValueError), bh.cluster(wrong):
            pass


def test_64_workers_in_one_process(endpoints: EndpointFactory) -> None:
    with bh.cluster(64, endpoints=endpoints) as workers:
        for worker in workers:
            with worker:
                around = [(worker.info.id + step) % 64 for step in (1, 7, 32)]
                assert [bh.rpc_sync(to, remote.whoami) for to in around] == [f"worker{to}" for to in around]


def test_an_exception_closes_the_cluster_without_waiting(endpoints: EndpointFactory, gate_name: str) -> None:
    futures = []
    with (  # noqa: PT012
        pytest.raises(KeyError),
        bh.cluster(2, options=bh.Options(shutdown_timeout=0.1), endpoints=endpoints) as workers,
    ):
        futures.append(bh.rpc_async("worker1", remote.wait_at, args=(gate_name,), timeout=0))
        assert gate(f"{gate_name} reached").wait(PATIENCE)
        raise KeyError
    assert all(worker.closed for worker in workers)
    with pytest.raises(bh.errors.NotInitializedError):
        futures[0].wait(PATIENCE)


# Graceful shutdown.

NAMES = ["alice", "bob", "carol"]


def shut_down(worker: bh.Worker, **how: Any) -> None:
    with worker:
        bh.shutdown(**how)


class Signs:
    """The frames of a graceful shutdown that were seen."""

    def __init__(self) -> None:
        self.ready = threading.Event()  # a worker other than the leader has called shutdown
        self.count = threading.Event()  # all workers have, and the leader asks for tallies

    def note(self, kind: Kind) -> None:
        if kind is Kind.READY:
            self.ready.set()
        elif kind is Kind.COUNT:
            self.count.set()


@pytest.fixture
def signs(when_sent: Callable[[Callable[[Kind], None]], None]) -> Signs:
    made = Signs()
    when_sent(made.note)
    return made


def test_shutdown_waits_for_everyones_work(endpoints: EndpointFactory, signs: Signs, gate_name: str) -> None:
    """Also for calls that lead to other calls, on workers that were idle for long."""
    seen: list[str] = []
    with (
        bh.cluster(NAMES, endpoints=endpoints) as workers,
        ThreadPoolExecutor(3) as threads,
    ):
        plain = bh.rpc_async("bob", remote.wait_at, args=(gate_name, "plain"))
        onward = bh.rpc_async("carol", wait_and_bounce, args=(gate_name,))
        later = bh.rpc_async("bob", wait_and_bounce_later, args=(gate_name,))
        coroutine = bh.rpc_async("carol", wait_and_bounce_awaiting, args=(gate_name,))
        callback = plain.then(lambda _: bh.rpc_sync("carol", remote.whoami))
        with workers[1]:  # no thread waits for this call
            bh.rpc_async("carol", remote.wait_at, args=(gate_name, "carol")).then(
                lambda done: seen.append(bh.rpc_sync(done.value(), remote.whoami))
            )
        ended = [threads.submit(shut_down, worker, timeout=PATIENCE) for worker in workers]
        assert signs.count.wait(PATIENCE)
        assert bh.rpc_sync("bob", remote.whoami) == "bob"  # is still served
        assert not any(end.done() for end in ended)
        remote.open_gate(gate_name)
        for end in ended:
            end.result(PATIENCE)
        assert plain.value() == "plain"
        assert onward.value() == ["carol", "alice"] * 5 + ["carol"]
        assert (later.value(), coroutine.value()) == (10, 10)
        assert callback.value() == "carol"
        assert seen == ["carol"]
        assert all(worker.closed for worker in workers)


def wait_and_bounce(name: str) -> list[str]:
    remote.wait_at(name)
    return remote.bounce(["alice", "carol"], 10)


@bh.async_execution
def wait_and_bounce_later(name: str) -> bh.Future[int]:
    remote.wait_at(name)
    return remote.bounce_by_callback(["alice", "bob"], 10)


async def wait_and_bounce_awaiting(name: str) -> int:
    await bh.rpc_async("alice", remote.wait_at, args=(name,))
    return await remote.bounce_by_await(["alice", "carol"], 10)


def test_shutdown_names_the_workers_that_have_not_called_it(endpoints: EndpointFactory, signs: Signs) -> None:
    with (
        bh.cluster(NAMES, endpoints=endpoints) as (alice, bob, carol),
        ThreadPoolExecutor(1) as thread,
    ):
        waiting = thread.submit(shut_down, carol, timeout=PATIENCE)
        assert signs.ready.wait(PATIENCE)
        with pytest.raises(bh.errors.ShutdownTimeoutError) as caught:
            shut_down(alice, timeout=1.0)
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.worker, caught.value.waiting_for) == ("alice", ("bob",))
        assert alice.closed
        waiting.result(PATIENCE)  # the leader is gone, so no worker can say when all are done
        assert not bob.closed
        with bob, pytest.raises(bh.PeerLostError) as lost:
            bh.rpc_sync("alice", remote.whoami)
        assert lost.value.worker == "alice"
        shut_down(alice)  # once is enough


def test_shutdown_names_the_workers_that_are_still_at_work(endpoints: EndpointFactory, gate_name: str) -> None:
    with bh.cluster(NAMES, endpoints=endpoints) as workers, ThreadPoolExecutor(2) as threads:
        with workers[2]:
            stuck = bh.rpc_async("bob", remote.wait_at, args=(gate_name, "at last"), timeout=0)
        others = [threads.submit(shut_down, worker, timeout=PATIENCE) for worker in workers[1:]]
        with pytest.raises(bh.errors.ShutdownTimeoutError) as caught:
            shut_down(workers[0], timeout=1.0)
        assert "bob" in caught.value.waiting_for
        assert "alice" not in caught.value.waiting_for
        remote.open_gate(gate_name)
        for other in others:
            other.result(PATIENCE)
        assert stuck.done()
        assert all(worker.closed for worker in workers)


def test_a_worker_that_waits_for_the_leader_says_so(endpoints: EndpointFactory) -> None:
    with bh.cluster(NAMES, endpoints=endpoints) as (_, bob, _):
        with pytest.raises(bh.errors.ShutdownTimeoutError) as caught:
            shut_down(bob, timeout=0.1)
        assert (caught.value.worker, caught.value.waiting_for) == ("bob", ("alice",))
        assert bob.closed
        assert bh.rpc_sync("carol", remote.whoami) == "carol"


def test_a_handler_that_never_ends_does_not_delay_shutdown(endpoints: EndpointFactory, gate_name: str) -> None:
    with bh.cluster(2, endpoints=endpoints) as (_, other):
        stuck = bh.rpc_async("worker1", remote.wait_at, args=(gate_name,), timeout=0)
        assert gate(f"{gate_name} reached").wait(PATIENCE)
        shut_down(other, graceful=False, timeout=0.1)
        assert other.closed
        with pytest.raises(bh.PeerLostError) as caught:
            stuck.wait(PATIENCE)
        assert (caught.value.worker, caught.value.function) == ("worker1", "wait_at")
        with pytest.raises(bh.PeerLostError):
            bh.rpc_sync("worker1", remote.whoami)


def test_shutdown_is_idempotent(endpoints: EndpointFactory) -> None:
    with bh.cluster(2, endpoints=endpoints) as workers, ThreadPoolExecutor(16) as threads:
        assert bh.rpc_sync("worker1", remote.whoami) == "worker1"
        for end in [threads.submit(shut_down, worker) for worker in workers for _ in range(8)]:
            end.result(PATIENCE)
        for worker in workers:
            shut_down(worker)
            shut_down(worker, graceful=False)
            assert worker.closed


def test_shutdown_of_a_closed_worker_does_not_touch_the_others(endpoints: EndpointFactory) -> None:
    for count in (2, 3):
        with bh.cluster(count, endpoints=endpoints) as (first, *others):
            shut_down(first, graceful=False)
            for graceful in (True, False):
                shut_down(first, graceful=graceful, timeout=0.1)
            assert not any(worker.closed for worker in others)


def test_calls_under_way_fail_when_their_worker_is_closed(endpoints: EndpointFactory, gate_name: str) -> None:
    with bh.cluster(2, endpoints=endpoints) as (own, other), ThreadPoolExecutor(1) as thread:
        by_future = bh.rpc_async("worker1", remote.wait_at, args=(gate_name,), timeout=0)

        def call() -> None:
            with own:
                bh.rpc_sync("worker1", remote.wait_at, args=(f"{gate_name} of the thread",), timeout=0)

        by_thread = thread.submit(call)
        assert gate(f"{gate_name} of the thread reached").wait(PATIENCE)
        bh.shutdown(graceful=False)
        with pytest.raises(bh.errors.NotInitializedError) as caught:
            by_future.wait(PATIENCE)
        assert caught.value.worker == "worker0"
        with pytest.raises(bh.errors.NotInitializedError) as caught:
            by_thread.result(PATIENCE)
        assert caught.value.worker == "worker0"
        remote.open_gates(gate_name)
        with other:
            assert bh.rpc_sync("worker1", remote.whoami) == "worker1"


def test_a_closed_worker_is_not_replaced_by_another(endpoints: EndpointFactory) -> None:
    with bh.cluster(2, endpoints=endpoints):
        bh.shutdown(graceful=False)
        for action in (bh.get_worker_info, lambda: bh.rpc_sync("worker1", remote.whoami)):
            with pytest.raises(bh.errors.NotInitializedError) as caught:
                action()
            assert caught.value.worker == "worker0"


def test_a_call_that_races_with_shutdown_names_the_closed_worker(endpoints: EndpointFactory) -> None:
    """Each call works or says that its own worker was closed, never that the other one was lost."""

    def call_until_closed(own: bh.Worker, started: threading.Event, over: threading.Event) -> Any:
        with own:
            while True:
                last = over.is_set()
                try:
                    assert bh.rpc_sync("worker1", remote.whoami) == "worker1"
                    assert bh.rpc_async("worker1", remote.whoami).wait(20) == "worker1"
                except Exception as error:
                    return error
                finally:
                    started.set()
                if last:
                    return "it still works"

    for _ in range(10):
        over = threading.Event()
        with bh.cluster(2, endpoints=endpoints) as (own, _), ThreadPoolExecutor(4) as threads:
            started = [threading.Event() for _ in range(4)]
            ends = [threads.submit(call_until_closed, own, event, over) for event in started]
            assert all(event.wait(PATIENCE) for event in started)
            bh.shutdown(graceful=False)
            over.set()
            for end in ends:
                assert type(end.result(PATIENCE)) is bh.errors.NotInitializedError, end.result()


def test_a_worker_that_ends_connects_to_nobody(endpoints: EndpointFactory) -> None:
    """Its own threads hear of the channels that it closes, and some connect to workers whose channel is lost."""
    with bh.cluster(2, endpoints=endpoints) as (own, _):
        assert bh.rpc_sync("worker1", remote.whoami) == "worker1"
        peers = own.part(Node).peers
        other, lost = peers.find("worker1"), threading.Event()
        peers.on_lost(lambda *_: lost.set())
        peers.connections.close()
        assert lost.wait(PATIENCE)
        with pytest.raises(bh.PeerLostError) as caught:
            peers.channel_to(other, PATIENCE)
        assert caught.value.worker == "worker1"
        bh.shutdown(graceful=False)


def test_no_thread_survives_shutdown(endpoints: EndpointFactory, signs: Signs) -> None:
    """Neither after a graceful shutdown nor when the leader is closed at once. Repeated: threads come and go."""
    for _ in range(60):
        signs.ready.clear()
        with bh.cluster(NAMES, endpoints=endpoints) as (alice, _, carol), ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(shut_down, carol, timeout=PATIENCE)
            assert signs.ready.wait(PATIENCE)
            shut_down(alice, graceful=False)
            with pytest.raises(bh.errors.WorkersLostError):
                waiting.result(PATIENCE)
        assert [t.name for t in threading.enumerate() if t.name.startswith("backhaul")] == []


# Shutdown from a handler.


@bh.async_execution
def shut_down_in_callback(**how: Any) -> bh.Future[None]:
    return bh.rpc_async("alice", remote.whoami).then(lambda _: bh.shutdown(**how))


async def shut_down_in_coroutine(**how: Any) -> None:
    bh.shutdown(**how)


FROM_WITHIN = pytest.mark.parametrize(
    "function", [bh.shutdown, shut_down_in_callback, shut_down_in_coroutine], ids=lambda f: f.__name__
)


@FROM_WITHIN
@pytest.mark.usefixtures("workers")
def test_graceful_shutdown_from_a_handler_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(bh.BackhaulError) as caught:
        bh.rpc_sync("bob", function, kwargs={"timeout": 1.0})
    assert type(caught.value) is bh.BackhaulError
    assert caught.value.worker == "bob"
    assert caught.value.__cause__.worker == "bob"
    assert bh.rpc_sync("bob", remote.whoami) == "bob"


@FROM_WITHIN
@pytest.mark.usefixtures("workers")
def test_a_handler_may_close_its_worker_at_once(function: Callable[..., Any]) -> None:
    with pytest.raises(bh.PeerLostError) as caught:
        bh.rpc_sync("bob", function, kwargs={"graceful": False})
    assert caught.value.worker == "bob"
    assert bh.rpc_sync("carol", remote.whoami) == "carol"


# Workers that are lost.


@pytest.mark.parametrize("lost", [0, 1])
def test_shutdown_does_not_wait_for_a_worker_that_is_closed_at_once(
    endpoints: EndpointFactory, signs: Signs, lost: int
) -> None:
    with (
        bh.cluster(NAMES, endpoints=endpoints) as workers,
        ThreadPoolExecutor(2) as threads,
    ):
        rest = [worker for worker in workers if worker is not workers[lost]]
        ended = [threads.submit(shut_down, worker, timeout=PATIENCE) for worker in rest]
        assert signs.ready.wait(PATIENCE)
        assert not any(end.done() for end in ended)
        shut_down(workers[lost], graceful=False)
        for end in ended:
            if lost == 0:  # nobody has said that all are done
                with pytest.raises(bh.errors.WorkersLostError) as caught:
                    end.result(PATIENCE)
                assert caught.value.worker == "alice"
                assert "alice" in caught.value.reasons
            else:
                end.result(PATIENCE)
        assert all(worker.closed for worker in workers)


def lose_one(rank: int, port: int, victim: int, how: str, serves: bool) -> str:
    """All workers shut down except the victim, which dies while they wait."""
    bh.init(f"w{rank}", rank=rank, world_size=3, store=TCPStore("127.0.0.1", port, is_master=False))
    if rank != victim:
        bh.rpc_async(victim, remote.open_gate, args=(f"{rank} is ready",))  # it may die before it answers
        try:
            bh.serve(timeout=PATIENCE) if serves else bh.shutdown(timeout=PATIENCE)
        except bh.errors.WorkersLostError as error:
            return f"lost w{victim}" if f"w{victim}" in error.reasons else str(error)
        return "ended in good order"
    for other in {0, 1, 2} - {victim}:
        remote.wait_at(f"{other} is ready")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return "returned without shutdown"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["killed", "returned"])
def test_shutdown_does_not_wait_for_a_lost_process(store_port: int, victim: int, how: str) -> None:
    expected = ["lost w0" if victim == 0 else "ended in good order"] * 3
    expected[victim] = DIED if how == "killed" else "returned without shutdown"
    assert run_processes(lose_one, 3, store_port, victim, how, False) == expected


@pytest.mark.parametrize("victim", [0, 1])
def test_who_serves_hears_of_every_lost_process(store_port: int, victim: int) -> None:
    expected = [f"lost w{victim}"] * 3
    expected[victim] = DIED
    assert run_processes(lose_one, 3, store_port, victim, "killed", True) == expected


def test_who_serves_returns_when_all_are_done(endpoints: EndpointFactory) -> None:
    with bh.cluster(NAMES, endpoints=endpoints) as (_, bob, carol), ThreadPoolExecutor(2) as threads:
        serving = [threads.submit(worker.run, bh.serve) for worker in (bob, carol)]
        assert [bh.rpc_sync(name, remote.whoami) for name in NAMES] == NAMES
        assert not any(each.done() for each in serving)
        bh.shutdown()
        assert [each.result(PATIENCE) for each in serving] == [None, None]
        with pytest.raises(bh.errors.NotInitializedError):
            bh.serve()


def test_a_worker_that_leaves_or_comes_back_is_not_lost(endpoints: EndpointFactory) -> None:
    with bh.cluster(NAMES, endpoints=endpoints) as (alice, bob, carol), ThreadPoolExecutor(1) as threads:
        assert [bh.rpc_sync(name, remote.whoami) for name in NAMES] == NAMES
        with bob:
            bh.leave()
        serving = threads.submit(carol.run, bh.serve)
        shut_down(alice)
        assert serving.result(PATIENCE) is None


def meet_one_that_is_stopped(rank: int, port: int, acquainted: bool) -> Any:
    """Worker 1 is stopped by the operating system while worker 0 shuts down."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    bh.init(f"w{rank}", rank=rank, world_size=3, store=store)
    if rank == 1:
        store.set("pid", str(os.getpid()))
        store.get("over")
    elif rank == 0:
        pid = int(store.get("pid"))
        if acquainted:
            assert bh.rpc_sync(1, os.getpid) == pid
        os.kill(pid, signal.SIGSTOP)
        try:
            bh.shutdown(timeout=1.0)
        except bh.errors.ShutdownTimeoutError as error:
            return error.waiting_for
        finally:
            store.set("over", "")
            os.kill(pid, signal.SIGCONT)
    with contextlib.suppress(bh.errors.WorkersLostError):  # once w0 has given up, w1 cannot reach it
        bh.shutdown(timeout=PATIENCE)
    return "ended in time"


@pytest.mark.parametrize("acquainted", [True, False])
def test_shutdown_ends_in_time_though_a_process_hangs(store_port: int, acquainted: bool) -> None:
    found = run_processes(meet_one_that_is_stopped, 3, store_port, acquainted)
    assert found == [("w1",), "ended in time", "ended in time"]


# Asyncio.


def test_a_program_in_asyncio() -> None:
    """Workers start, call and stop inside tasks."""

    async def ask(number: int) -> int:
        return await bh.rpc_async("alone", remote.identity, args=(number,))

    async def main() -> list[Any]:
        bh.init("alone", rank=0, world_size=1, store=HashStore())
        answers = await asyncio.gather(*(ask(n) for n in range(50)), return_exceptions=True)
        failures = await asyncio.gather(bh_failure(), return_exceptions=True)
        bh.shutdown()
        return [answers, [type(failure) for failure in failures]]

    async def bh_failure() -> None:
        await bh.rpc_async("alone", remote.fail_in_coroutine, args=("alone",))

    assert asyncio.run(main()) == [list(range(50)), [remote.PlainError]]
