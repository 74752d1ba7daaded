"""Workers that join a running cluster, leave it, die and come back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import backhaul as bh
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.node import Node, describe, start_node
from backhaul._transport.base import EndpointFactory
from tests.cluster import remote_functions as remote
from tests.cluster.processes import DIED, run_processes
from tests.cluster.remote_functions import PATIENCE

SECRET = "of the joiners"
OPTIONS = bh.Options(timeout=PATIENCE, security=bh.Security(secret=SECRET))


@pytest.fixture
def store_port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.01)
    return found


def names() -> list[str]:
    return [info.name for info in bh.get_worker_infos()]


def start(name: str, number: int, others: Iterable[Node], endpoints: EndpointFactory, **more: Any) -> Node:
    endpoint = endpoints()
    own: WorkerRecord = describe(name, number, endpoint, bh.Options(), host="here")
    records = [other.peers.own.record for other in others]
    return start_node(own, [*records, own], endpoint, bh.Options())


def test_a_joiner_is_a_member_once_it_has_called(endpoints: EndpointFactory) -> None:
    with contextlib.ExitStack() as stack:
        first = start("first", 0, [], endpoints)
        stack.callback(first.shutdown, graceful=False, timeout=5)
        second = start("second", 1, [first], endpoints)
        stack.callback(second.shutdown, graceful=False, timeout=5)
        with second.worker:
            assert bh.rpc_sync("first", remote.whoami) == "first"
        with first.worker:
            assert bh.rpc_sync("second", remote.whoami) == "second"
            first.peers.dismiss(first.peers.find(1))
            with pytest.raises(bh.errors.UnknownWorkerError, match="has left"):
                bh.rpc_sync("second", remote.whoami)


def test_a_joiner_cannot_take_the_name_or_id_of_a_member(endpoints: EndpointFactory) -> None:
    with contextlib.ExitStack() as stack:
        first = start("first", 0, [], endpoints)
        stack.callback(first.shutdown, graceful=False, timeout=5)
        for name, number in (("first", 1), ("second", 0)):
            other = start(name, number, [], endpoints)
            stack.callback(other.shutdown, graceful=False, timeout=5)
            assert first.peers.admit(other.peers.own.record)
        assert [peer.info.name for peer in first.peers] == ["first"]


# Real processes. The first two find each other at a store; later ones join by address.

weight = torch.ones(2, requires_grad=True)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * weight * 3


def grads(ctx: int) -> list[float]:
    return bh.get_gradients(ctx)[weight].tolist()


def step(*workers: str) -> list[list[float]]:
    """Run forward and backward over these workers; return the gradients on each."""
    x = torch.ones(2, requires_grad=True)
    with bh.context() as ctx:
        y = x
        for name in workers:
            y = bh.rpc_sync(name, scale, args=(y,))
        bh.backward(ctx, [y.sum()])
        return [bh.get_gradients(ctx)[x].tolist(), *(bh.rpc_sync(name, grads, args=(ctx,)) for name in workers)]


def contexts() -> int:
    return bh.get_debug_info()["num_autograd_contexts"]


def founder(rank: int, store: TCPStore, **more: Any) -> None:
    bh.init(f"w{rank}", rank=rank, world_size=2, store=store, options=OPTIONS)
    store.set(f"address {rank}", bh.get_address())
    store.set(f"pid {rank}", str(os.getpid()))


def come_and_go(rank: int, port: int) -> Any:
    """w0 and w1 start; ``late`` joins; w0, the first, leaves; w1 and ``late`` go on and shut down together."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    found: dict[str, Any] = {}
    if rank < 2:
        founder(rank, store)
        events: list[Any] = []
        bh.on_membership(lambda event: events.append((event.kind, event.worker.name)))
        store.set(f"listening {rank}", "")
        if rank == 0:
            store.get("late is there")
            until(lambda: "late" in names())
            found["step"] = step("w1", "late")
            found["events"] = until(lambda: list(events))
            bh.leave(timeout=PATIENCE)
            store.set("first has left", "")
            return found
        store.get("first has left")
        found["names"] = names()
        with pytest.raises(bh.errors.UnknownWorkerError, match="has left"):
            bh.rpc_sync("w0", remote.whoami)
        found["step"] = step("late", "w1")
        found["events"] = until(lambda: len(events) == 2 and list(events))
        store.set("done", "")
    else:
        for other in range(2):
            store.get(f"listening {other}")
        bh.init("late", join=store.get("address 1").decode(), options=OPTIONS)
        found["me"] = bh.get_worker_info()
        found["called"] = [bh.rpc_sync(name, remote.whoami) for name in names()]
        store.set("late is there", "")
        store.get("first has left")
        found["names"] = names()
        store.get("done")
        found["contexts"] = until(lambda: contexts() == 0)
    bh.shutdown(timeout=PATIENCE)
    return found


def test_join_leave_and_shut_down(store_port: int) -> None:
    first, second, late = run_processes(come_and_go, 3, store_port)
    nine, three = [9.0, 9.0], [9.0, 9.0]
    assert first == {"step": [nine, three, three], "events": [("joined", "late")]}
    assert second == {
        "names": ["w1", "late"],
        "step": [nine, three, three],
        "events": [("joined", "late"), ("left", "w0")],
    }
    assert late == {
        "me": bh.WorkerInfo("late", 2),
        "called": ["w0", "w1", "late"],
        "names": ["w1", "late"],
        "contexts": True,
    }


def test_a_callback_that_raises_system_exit_gets_the_next_event(endpoints: EndpointFactory) -> None:
    seen: list[str] = []

    def leave(event: Any) -> None:
        seen.append(event.worker.name)
        raise SystemExit("leaving")

    with bh.cluster(["first", "second", "third"], endpoints=endpoints) as made:
        bh.on_membership(leave)
        for number, worker in enumerate(made[1:], 1):
            with worker:
                bh.leave()
            until(lambda number=number: len(seen) == number)
    assert seen == ["second", "third"]


def restart(rank: int, port: int, victim: int) -> Any:
    """One founder is killed while the other waits for it; a new process joins under its name."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    found: dict[str, Any] = {}
    if rank == victim:
        founder(rank, store)
        store.get("never")
    name, other = f"w{victim}", 1 - victim
    if rank == other:
        founder(rank, store)
        events: list[Any] = []
        bh.on_membership(lambda event: events.append((event.kind, event.worker.name)))
        waiting = bh.rpc_async(name, remote.wait_at, args=("never",), timeout=0)
        found["before"] = step(name)
        reference = bh.remote(name, torch.ones, args=(2,))
        assert reference.to_here().tolist() == [1, 1]
        x = torch.ones(2, requires_grad=True)
        with bh.context() as ctx:
            old = bh.rpc_sync(name, scale, args=(x,))
            os.kill(int(store.get(f"pid {victim}")), signal.SIGKILL)
            with pytest.raises(bh.PeerLostError) as caught:
                waiting.wait(PATIENCE)
            found["call"] = caught.value.worker, caught.value.function
            store.set("killed", "")
            store.get("back")
            found["again"] = bh.rpc_sync(name, remote.whoami), bh.get_worker_info(name).id
            with pytest.raises(bh.PeerLostError) as caught:  # its graph died with it
                bh.backward(ctx, [old.sum()])
            found["backward"] = caught.value.worker, caught.value.context == int(ctx), len(caught.value.messages)
        with pytest.raises(bh.PeerLostError) as caught:  # so did its values
            reference.to_here()
        assert caught.value.worker == name
        del reference
        assert bh.remote(name, torch.ones, args=(3,)).to_here().tolist() == [1, 1, 1]
        found["after"] = step(name)
        found["events"] = until(lambda: len(events) == 2 and list(events))
        found["contexts"] = until(lambda: contexts() == 0), until(lambda: bh.rpc_sync(name, contexts) == 0)
        store.set("done", "")
    else:
        store.get("killed")
        bh.init(name, join=store.get(f"address {other}").decode(), options=OPTIONS)
        store.set("back", "")
        found["step"] = step(f"w{other}")
        store.get("done")
    bh.shutdown(timeout=PATIENCE)
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_restarted_worker_takes_its_name_back(store_port: int, victim: int) -> None:
    results = run_processes(restart, 3, store_port, victim)
    assert results[victim] == DIED
    name, grad = f"w{victim}", [[3.0, 3.0], [3.0, 3.0]]
    assert results[1 - victim] == {
        "before": grad,
        "call": (name, "wait_at"),
        "again": (name, victim),
        "backward": (name, True, 1),
        "after": grad,
        "events": [("lost", name), ("joined", name)],
        "contexts": (True, True),
    }
    assert results[2] == {"step": grad}


def survive(rank: int, port: int) -> Any:
    """A founder is killed between the forward and the backward of a step, which waits for its replacement."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    found: Any = None
    if rank == 0:
        founder(rank, store)
        x = torch.ones(2, requires_grad=True)
        with bh.context(replay=bh.Replay(timeout=PATIENCE)) as ctx:
            y = bh.rpc_sync("w1", scale, args=(x,))
            os.kill(int(store.get("pid 1")), signal.SIGKILL)
            store.set("killed", "")
            bh.backward(ctx, [y.sum()])
            found = bh.get_gradients(ctx)[x].tolist(), bh.rpc_sync("w1", grads, args=(ctx,))
        store.set("done", "")
    elif rank == 1:
        founder(rank, store)
        store.get("never")
    else:
        store.get("killed")
        bh.init("w1", join=store.get("address 0").decode(), options=OPTIONS)
        store.get("done")
        found = until(lambda: contexts() == 0)
    bh.shutdown(timeout=PATIENCE)
    return found


def test_a_step_with_replay_waits_for_a_joiner(store_port: int) -> None:
    assert run_processes(survive, 3, store_port) == [([3.0, 3.0], [3.0, 3.0]), DIED, True]


def join_at_once(rank: int, port: int) -> Any:
    """Four workers join at the same time; two of them have the same name."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    if rank < 2:
        founder(rank, store)
        until(lambda: len(names()) == 5)
        found = names()
        for other in range(2, 6):
            store.get(f"tried {other}")
        store.set(f"seen {rank}", "")
        store.get(f"seen {1 - rank}")
        bh.shutdown(timeout=PATIENCE)
        return found
    addresses = [store.get(f"address {n}").decode() for n in (0, 1)]
    wanted = {2: "a", 3: "b", 4: "same", 5: "same"}[rank]
    store.set(f"here {rank}", "")
    for other in range(2, 6):
        store.get(f"here {other}")
    try:
        bh.init(wanted, join=addresses[rank % 2 :], options=OPTIONS)
    except bh.errors.RendezvousError as error:
        return str(error)
    finally:
        store.set(f"tried {rank}", "")
    until(lambda: len(names()) == 5)
    ids = {info.id for info in bh.get_worker_infos()}
    for n in range(2):
        store.get(f"seen {n}")
    bh.shutdown(timeout=PATIENCE)
    return len(ids)


def test_of_two_joiners_with_one_name_one_is_refused(store_port: int) -> None:
    *founders, a, b, one, other = run_processes(join_at_once, 6, store_port)
    assert sorted(founders[0]) == sorted(founders[1]) == ["a", "b", "same", "w0", "w1"]
    assert (a, b) == (5, 5)
    (refused,) = [text for text in (one, other) if text != 5]
    assert "'same'" in refused
    assert "already" in refused


def join_through_the_store(rank: int, port: int) -> Any:
    store = TCPStore("127.0.0.1", port, is_master=False)
    options = bh.Options(timeout=PATIENCE)  # the secret is in the store
    if rank == 2:
        store.get("killed")
        bh.init("w1", rank=1, world_size=2, store=store, join=True, options=options)
        found = bh.rpc_sync("w0", remote.whoami)
        store.set("back", "")
    else:
        bh.init(f"w{rank}", rank=rank, world_size=2, store=store, options=options)
        if rank == 1:
            store.get("never")
        pid = bh.rpc_sync("w1", os.getpid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: names() == ["w0"])
        store.set("killed", "")
        store.get("back")
        found = bh.rpc_sync("w1", remote.whoami)
    bh.shutdown(timeout=PATIENCE)
    return found


def test_a_worker_comes_back_through_the_store(store_port: int) -> None:
    assert run_processes(join_through_the_store, 3, store_port) == ["w1", DIED, "w0"]


def test_arguments_of_join_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BACKHAUL_SECRET", raising=False)
    quick = bh.Options(rendezvous_timeout=0.1, security=bh.Security(secret=SECRET))
    with pytest.raises(bh.errors.RendezvousError, match="nobody-is-here"):
        bh.init("x", join="unix:@nobody-is-here", options=quick)
    with pytest.raises(ValueError, match="secret"):
        bh.init("x", join="unix:@nobody-is-here")
    with pytest.raises(ValueError, match="name"):
        bh.init(join="unix:@nobody-is-here", options=quick)
    with pytest.raises(ValueError, match="address"):
        bh.init("x", join="nonsense", options=quick)


def test_leaving_waits_for_what_is_under_way(endpoints: EndpointFactory, gate_name: str) -> None:
    with bh.cluster(["a", "b", "c"], endpoints=endpoints) as (_, b, _c):
        call = bh.rpc_async("b", remote.wait_at, args=(gate_name, "in time"), timeout=0)
        assert remote.gate(f"{gate_name} reached").wait(PATIENCE)

        def leave() -> None:
            with b:
                bh.leave(timeout=PATIENCE)

        thread = threading.Thread(target=leave)
        thread.start()
        assert not b.closed
        remote.open_gate(gate_name)
        assert call.wait(PATIENCE) == "in time"
        thread.join()
        assert b.closed
        assert names() == ["a", "c"]
        with pytest.raises(bh.errors.UnknownWorkerError, match="has left"):
            bh.rpc_sync("b", remote.whoami)
        assert bh.rpc_sync("c", remote.whoami) == "c"


def hang(rank: int, port: int, trusted: bool) -> Any:
    """w2 hangs until it is lost. All members accept another worker in its place. Then w2 wakes and is refused."""
    soon = bh.Liveness(heartbeat_interval=0.1, suspect_after=0.4, lost_after=3.0)
    quick = bh.Options(timeout=PATIENCE, liveness=soon, security=bh.Security(secret=SECRET, trusted=trusted))
    store = TCPStore("127.0.0.1", port, is_master=False)
    if rank == 3:
        store.get("lost")
        bh.init("w2", join=store.get("address").decode(), options=quick)
        found: Any = [bh.rpc_sync(name, remote_name) for name in ("w0", "w1")]
        store.set("back", "")
    else:
        bh.init(f"w{rank}", rank=rank, world_size=3, store=store, options=quick)
        if rank == 2:
            store.set("pid", str(os.getpid()))
            try:
                bh.shutdown(timeout=PATIENCE)
            finally:
                store.set("woken and gone", "")
            return "gone"
        if rank == 0:
            store.set("address", bh.get_address())
            assert bh.rpc_sync("w2", remote_name) == "w2"
            os.kill(int(store.get("pid")), signal.SIGSTOP)
            until(lambda: names() == ["w0", "w1"])
            store.set("lost", "")
        store.get("back")
        found = bh.rpc_sync("w2", remote_name)
        if rank == 0:
            os.kill(int(store.get("pid")), signal.SIGCONT)
        store.get("woken and gone")
    bh.shutdown(timeout=PATIENCE)
    return found


@bh.expose
def remote_name() -> str:
    return bh.get_worker_info().name


@pytest.mark.parametrize("trusted", [True, False])
def test_a_worker_that_hangs_can_be_replaced(store_port: int, trusted: bool) -> None:
    assert run_processes(hang, 4, store_port, trusted) == ["w2", "w2", "gone", ["w0", "w1"]]


def test_members_that_do_not_answer_do_not_delay_a_joiner(endpoints: EndpointFactory) -> None:
    """It introduces itself to all members at the same time."""
    first = start("first", 0, [], endpoints)
    silent = [endpoints() for _ in range(8)]  # they listen, and no thread polls them
    try:
        records = [describe(f"s{n}", n + 1, end, bh.Options(), host="here") for n, end in enumerate(silent)]
        endpoint = endpoints()
        own = describe("late", 20, endpoint, bh.Options(), host="here")
        late = start_node(own, [*records, first.peers.own.record], endpoint, bh.Options())
        all_asked = threading.Barrier(len(records) + 1)
        asked = late.client.call

        def call(*args: Any, **more: Any) -> Any:
            all_asked.wait(PATIENCE)  # all are asked before any has answered
            return asked(args[0], args[1], None, None, 0.5, mode="internal")

        late.client.call = call  # type: ignore[method-assign]
        late.worker.run(late.membership.introduce, PATIENCE)
        assert [peer.info.name for peer in first.peers] == ["first", "late"]
        late.shutdown(graceful=False, timeout=5)
    finally:
        first.shutdown(graceful=False, timeout=5)
        for end in silent:
            end.close()
