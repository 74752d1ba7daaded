"""Workers that stop without a word: what waits for them fails in time and says why, and nothing else does."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import backhaul as bh
from backhaul._rpc.liveness.failure_detector import FailureDetector
from backhaul._rpc.node import Node
from backhaul._transport.base import ConnectTimeoutError
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._worker.worker import current_worker

from ..cluster import remote_functions as remote
from ..cluster.processes import DIED, run_processes
from ..cluster.remote_functions import PATIENCE

QUICK = bh.Options(timeout=PATIENCE, liveness=bh.Liveness(heartbeat_interval=0.1, suspect_after=1.5, lost_after=3.0))
# Heartbeats are so rare that only a worker that is asked for them shows in time whether it is alive.
QUIET = bh.Options(
    timeout=PATIENCE,
    liveness=bh.Liveness(heartbeat_interval=0.1, suspect_after=1.5, lost_after=3.0, quiet_above=0.01),
)
SLOW = bh.Options(
    timeout=PATIENCE, liveness=bh.Liveness(heartbeat_interval=0.1, suspect_after=0.4, lost_after=PATIENCE)
)


@pytest.fixture
def store_port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def start(rank: int, size: int, port: int, options: bh.Options, transport: Any = "auto") -> None:
    options = bh.Options(**{name: getattr(options, name) for name in options.__slots__} | {"transport": transport})
    store = TCPStore("127.0.0.1", port, is_master=False)
    bh.init(f"w{rank}", rank=rank, world_size=size, store=store, options=options)


def until(condition: Callable[[], Any]) -> Any:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came to be so"
        time.sleep(0.01)
    return found


def suspects() -> int:
    return bh.get_debug_info()["num_suspected_peers"]


def stop(worker: str) -> int:
    pid = bh.rpc_sync(worker, os.getpid)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: states_of(pid) == {"T"})  # until one of its threads gets to run that, others may still answer
    return pid


def states_of(pid: int) -> set[str]:
    """Those of a process's threads."""
    return {stat.read_text().rpartition(") ")[2][0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")}


# In calls.


def call_one_that_stops(rank: int, port: int, transport: str, options: bh.Options = QUICK) -> Any:
    start(rank, 3, port, options, transport)
    try:
        if rank:
            return None
        waiting = [bh.rpc_async("w1", remote.wait_at, args=(f"never {n}",), timeout=0) for n in range(3)]
        fine = bh.rpc_async("w2", remote.wait_at, args=("fine", "fine"), timeout=0)
        pid = stop("w1")
        found: dict[str, Any] = {}
        try:
            bh.rpc_sync("w1", remote.whoami, timeout=0)
        except bh.PeerLostError as error:
            found["by wait"] = error.worker, error.function, error.reason
        for future in waiting:
            with pytest.raises(bh.PeerLostError) as caught:
                future.wait(PATIENCE)
            assert (caught.value.worker, caught.value.function) == ("w1", "wait_at")
        found["fine"] = fine.done()
        bh.rpc_sync("w2", remote.open_gate, args=("fine",))
        found["fine later"] = fine.wait(PATIENCE)
        os.kill(pid, signal.SIGCONT)
        found["again"] = bh.rpc_sync("w1", remote.whoami)  # a new channel is opened
        bh.rpc_sync("w1", remote.open_gates, args=("never",))
        return found
    finally:
        bh.shutdown(timeout=PATIENCE)


@pytest.mark.parametrize(("transport", "options"), [("unix", QUICK), ("tcp", QUICK), ("unix", QUIET)])
def test_calls_to_a_stopped_worker_fail_and_no_others(store_port: int, transport: str, options: bh.Options) -> None:
    found, *_ = run_processes(call_one_that_stops, 3, store_port, transport, options)
    worker, function, reason = found.pop("by wait")
    assert (worker, function) == ("w1", "whoami")
    assert reason.startswith("no sign of life for ")
    assert found == {"fine": False, "fine later": "fine", "again": "w1"}


told = threading.Event()


def wait_to_be_told() -> None:
    until(bh.cancelled)
    told.set()


def was_told() -> bool:
    return told.wait(PATIENCE)


def call_and_end(rank: int, port: int, how: int) -> Any:
    start(rank, 3, port, QUICK)
    try:
        if rank == 1:
            bh.rpc_async("w0", wait_to_be_told, timeout=0)
            bh.rpc_sync("w0", remote.identity, args=(1,))  # the other has come before
            bh.rpc_sync("w2", remote.open_gate, args=(str(os.getpid()),))
            os.kill(os.getpid(), how)
        elif rank == 2:
            pid = until(lambda: [name for name in remote._gates if name.isdigit()])[0]
            found = bh.rpc_sync("w0", was_told)
            if how == signal.SIGSTOP:
                os.kill(int(pid), signal.SIGCONT)
            return found
        return None
    finally:
        bh.shutdown(timeout=PATIENCE)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_what_runs_for_a_lost_worker_is_cancelled(store_port: int, how: int) -> None:
    _, _, found = run_processes(call_and_end, 3, store_port, how)
    assert found


def send_to_one_that_stops(rank: int, port: int) -> Any:
    """The channel is full when the peer is lost: a thread is in the middle of a frame."""
    start(rank, 2, port, QUICK, "tcp")
    try:
        if rank:
            return None
        pid = stop("w1")
        with pytest.raises(bh.PeerLostError) as caught:
            bh.rpc_sync("w1", remote.identity, args=(torch.ones(8 << 20),), timeout=0)
        os.kill(pid, signal.SIGCONT)
        return caught.value.reason
    finally:
        bh.shutdown(timeout=PATIENCE)


def test_a_send_that_is_under_way_fails_too(store_port: int) -> None:
    found, _ = run_processes(send_to_one_that_stops, 2, store_port)
    assert "no sign of life" in found


def suspect_for_a_while(rank: int, port: int) -> Any:
    start(rank, 2, port, SLOW)
    if rank:
        bh.shutdown(timeout=PATIENCE)
        return None
    log = Log()
    waiting = bh.rpc_async("w1", remote.wait_at, args=("a while", "over"), timeout=0)
    assert suspects() == 0
    pid = stop("w1")
    until(suspects)
    with pytest.raises(bh.CallTimeoutError) as caught:
        bh.rpc_sync("w1", remote.whoami, timeout=0.1)
    os.kill(pid, signal.SIGCONT)
    until(lambda: not suspects())
    bh.rpc_sync("w1", remote.open_gate, args=("a while",))
    value = waiting.wait(PATIENCE)
    bh.shutdown(timeout=PATIENCE)
    return str(caught.value), value, log.lines


class Log(logging.Handler):
    """Keeps what the detector says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("backhaul").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_one_that_goes_on_in_time_was_only_suspected(store_port: int) -> None:
    (text, value, lines), _ = run_processes(suspect_for_a_while, 2, store_port)
    assert "suspected" in text
    assert "no sign of life" in text
    assert value == "over"
    said = [line for line in lines if "'w1'" in line]
    assert len(said) == 2, lines
    assert "is suspected" in said[0]
    assert "alive after all" in said[1]


def count_heartbeats(rank: int, port: int) -> Any:
    """How many heartbeats an idle worker sends in its next ticks, in a mesh of five workers."""
    liveness = bh.Liveness(heartbeat_interval=0.02, suspect_after=1.0, lost_after=PATIENCE, quiet_above=0.1)
    start(rank, 5, port, bh.Options(timeout=PATIENCE, liveness=liveness))
    for other in range(5):
        bh.rpc_sync(other, remote.whoami)
    heartbeats = current_worker().part(Node).heartbeat
    detector, beats = heartbeats._detector, []

    def tick(*args: Any) -> Any:
        report = FailureDetector.tick(detector, *args)
        beats.append(len(report.beat))
        return report

    detector.tick = tick  # type: ignore[method-assign]
    until(lambda: len(beats) >= 150)
    channels = len(heartbeats._watches)
    bh.shutdown(timeout=PATIENCE)
    return channels, sum(beats[50:150])


def test_an_idle_mesh_sends_few_heartbeats(store_port: int) -> None:
    """At the full rate each channel would get one in each of the hundred ticks."""
    for channels, beats in run_processes(count_heartbeats, 5, store_port):
        assert channels >= 4
        assert beats <= 10 * channels


# All at once, and long waits.


def be_stopped_as_a_whole(rank: int, port: int) -> Any:
    store = TCPStore("127.0.0.1", port, is_master=False)
    start(rank, 3, port, QUICK)
    for other in range(3):
        bh.rpc_sync(other, remote.whoami)
    waiting = bh.rpc_async((rank + 1) % 3, remote.wait_at, args=(f"whole {rank}", "held"), timeout=0)
    store.set(f"pid {rank}", str(os.getpid()))
    store.get("continued")
    bh.rpc_sync((rank + 1) % 3, remote.open_gate, args=(f"whole {rank}",))
    value = waiting.wait(PATIENCE)
    bh.shutdown(timeout=PATIENCE)
    return value


def test_a_cluster_that_is_stopped_as_a_whole_goes_on(store_port: int) -> None:
    store = TCPStore("127.0.0.1", store_port, is_master=False)

    def stop_all() -> None:
        pids = [int(store.get(f"pid {rank}")) for rank in range(3)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2 * QUICK.liveness.lost_after)  # what is tested is that this time does not count
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        store.set("continued", "")

    thread = threading.Thread(target=stop_all)
    thread.start()
    try:
        assert run_processes(be_stopped_as_a_whole, 3, store_port) == ["held"] * 3
    finally:
        thread.join()


def wait_long(rank: int, port: int) -> Any:
    start(rank, 2, port, QUICK)
    value = bh.rpc_sync("w1", sleep, args=(2 * QUICK.liveness.lost_after,)) if rank == 0 else None
    traffic = bh.get_debug_info()["bytes_sent"]
    time.sleep(3 * QUICK.liveness.heartbeat_interval)
    same = bh.get_debug_info()["bytes_sent"] == traffic
    bh.shutdown(timeout=PATIENCE)
    return value, same


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


def test_a_worker_that_only_takes_long_is_not_suspected(store_port: int) -> None:
    """And its heartbeats are not counted as what programs send."""
    assert run_processes(wait_long, 2, store_port) == [("rested", True), (None, True)]


def be_deaf_to_heartbeats(rank: int, port: int) -> Any:
    options = bh.Options(timeout=PATIENCE, liveness=bh.Liveness(heartbeat_interval=0)) if rank else QUICK
    start(rank, 2, port, options)
    value = bh.rpc_sync("w1", sleep, args=(2 * QUICK.liveness.lost_after,)) if rank == 0 else None
    bh.shutdown(timeout=PATIENCE)
    return value


def test_a_worker_without_heartbeats_is_not_suspected(store_port: int) -> None:
    assert run_processes(be_deaf_to_heartbeats, 2, store_port) == ["rested", None]


# Large messages.


def send_much(rank: int, port: int, transport: str, warm: bool) -> Any:
    """What both workers say of each other while one receives the other's message."""
    watchful = bh.Options(
        timeout=PATIENCE,
        shm_bytes=0,
        liveness=bh.Liveness(heartbeat_interval=0.05, suspect_after=1.0, lost_after=PATIENCE),
    )
    start(rank, 2, port, watchful, transport)
    log = Log()
    if rank == 0:
        if warm:  # else the other has one thread, which reads
            bh.rpc_sync("w1", remote.whoami)
        much = torch.empty(1 << 30, dtype=torch.uint8)
        assert bh.rpc_sync("w1", torch.numel, args=(much,)) == 1 << 30
    bh.shutdown(timeout=PATIENCE)
    return log.lines


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_bytes_that_arrive_are_a_sign_of_life(store_port: int, transport: str, warm: bool) -> None:
    assert run_processes(send_much, 2, store_port, transport, warm) == [[], []]


# In backward.


class Stall(torch.autograd.Function):
    """Its backward is reached, and goes no further."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        remote.wait_at("backward")
        return grad


weight = torch.ones(3, requires_grad=True)


def stall(x: torch.Tensor) -> torch.Tensor:
    return Stall.apply(x * weight)


def through(to: str, x: torch.Tensor) -> torch.Tensor:
    return bh.rpc_sync(to, stall, args=(x,)) * 2


def double(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def contexts() -> int:
    return bh.get_debug_info()["num_autograd_contexts"]


def go_back_through_one_that_stops(rank: int, port: int, how: str, options: bh.Options) -> Any:
    """w0 drives, w2 is in between, w1 is reached and stopped or killed; another pass over w2 alone goes on."""
    start(rank, 3, port, options)
    if rank:
        bh.shutdown(timeout=PATIENCE)
        return contexts_left()
    pid = bh.rpc_sync("w1", os.getpid)

    def strike() -> None:
        bh.rpc_sync("w1", wait_for_gate, args=("backward reached",))
        os.kill(pid, signal.SIGSTOP if how == "stop" else signal.SIGKILL)

    thread = threading.Thread(target=strike)
    thread.start()
    x = torch.ones(3, requires_grad=True)
    with bh.context() as ctx:
        loss = bh.rpc_sync("w2", through, args=("w1", x)).sum()
        with pytest.raises(bh.PeerLostError) as caught:
            bh.backward(ctx, [loss], timeout=0)
    thread.join()
    error = caught.value
    assert error.context == int(ctx)
    with bh.context() as ctx:
        bh.backward(ctx, [bh.rpc_sync("w2", double, args=(x,)).sum()])
        grads = bh.get_gradients(ctx)[x].tolist()
    until(lambda: contexts() == 0 and bh.rpc_sync("w2", contexts) == 0)
    if how == "stop":
        os.kill(pid, signal.SIGCONT)
        bh.rpc_sync("w1", remote.open_gate, args=("backward",))
    found = error.worker, error.pass_number, len(error.messages), error.message in error.messages, error.reason, grads
    bh.shutdown(timeout=PATIENCE)
    return found


def contexts_left() -> str:
    return "ended"


def wait_for_gate(name: str) -> None:
    assert remote.gate(name).wait(PATIENCE)


@pytest.mark.parametrize(("how", "options"), [("stop", QUICK), ("kill", QUICK), ("stop", QUIET)])
def test_a_pass_over_a_lost_worker_fails_and_names_everything(store_port: int, how: str, options: bh.Options) -> None:
    found, other, last = run_processes(go_back_through_one_that_stops, 3, store_port, how, options)
    worker, number, count, named, reason, grads = found
    assert (worker, number, count, named) == ("w1", 1, 1, True)
    assert ("no sign of life" in reason) == (how == "stop")
    assert grads == [1.0] * 3
    assert (other, last) == (DIED if how == "kill" else "ended", "ended")


# Connecting.


def test_a_deaf_address_fails_in_time_and_one_where_nobody_is_at_once() -> None:
    endpoint = SocketEndpoint(secret=b"ours", unix=True)
    try:
        with socket.socket(socket.AF_UNIX) as listener, socket.socket() as tcp:
            listener.bind("\0backhaul-test-deaf")
            listener.listen()
            tcp.bind(("127.0.0.1", 0))
            tcp.listen()
            for address in ("unix:@backhaul-test-deaf", f"tcp:127.0.0.1:{tcp.getsockname()[1]}"):
                with pytest.raises(ConnectTimeoutError):
                    endpoint.connect(address, timeout=0.2)
            gone = f"tcp:127.0.0.1:{tcp.getsockname()[1]}"
        for address in ("unix:@backhaul-test-deaf", gone):
            with pytest.raises(ConnectionError) as caught:
                endpoint.connect(address, timeout=1000)
            assert not isinstance(caught.value, TimeoutError)
    finally:
        endpoint.close()


def test_a_crowded_address_is_waited_for() -> None:
    """The kernel refuses more than fit into a Unix socket's queue, which says nothing of who listens there."""
    endpoint = SocketEndpoint(secret=b"ours", unix=True)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0backhaul-test-crowded")
            listener.listen(0)
            for sock in waiting:
                sock.setblocking(False)
                try:
                    sock.connect("\0backhaul-test-crowded")
                except BlockingIOError:
                    break
            with pytest.raises(ConnectTimeoutError):
                endpoint.connect("unix:@backhaul-test-crowded", timeout=0.2)
    finally:
        for sock in waiting:
            sock.close()
        endpoint.close()
