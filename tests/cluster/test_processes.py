"""Workers as processes: what ``launch`` returns, how it fails, and that no process is left."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import backhaul as bh
from backhaul.testing.snapshots import take_snapshot

from . import remote_functions as remote
from .remote_functions import PATIENCE, Counter, Network, PlainError
from .values import assert_same

PROGRAMS = pathlib.Path(__file__).parent / "programs"


def launch(function: Callable[..., Any], workers: Any, *args: Any, **options: Any) -> list[Any]:
    """The fast way; a worker that hangs fails the test with its name."""
    return bh.launch(function, workers, args=args, timeout=PATIENCE, start_method="forkserver", **options)


# Results.


def report(base: int, *, scale: int) -> dict[str, Any]:
    """Call every worker, this one included, in every way there is."""
    me, everyone = bh.get_worker_info(), bh.get_worker_infos()
    add_base = lambda x: x * scale + base  # noqa: E731
    network, x = Network(), torch.arange(3.0)
    return {
        "me": me,
        "everyone": everyone,
        "pids": [bh.rpc_sync(to, os.getpid) for to in everyone],
        "names": bh.wait_all([bh.rpc_async(to.name, remote.whoami) for to in everyone]),
        "lambda": [bh.rpc_sync(to.id, add_base, args=(n,)) for n, to in enumerate(everyone)],
        "tensors": [bh.rpc_sync(to, torch.add, args=(x, 1)) for to in everyone],
        "modules": [torch.equal(bh.rpc_sync(to, network, args=(x,)), network(x)) for to in everyone],
        "scripted": [bh.rpc_sync(to, remote.scripted, args=(x, 2)).tolist() for to in everyone],
        "methods": [bh.rpc_sync(to, Counter(n).add, args=(1,)) for n, to in enumerate(everyone)],
        "later": [bh.rpc_sync(to, remote.add_through, args=(me.name, x, 1)).tolist() for to in everyone],
        "coroutines": [bh.rpc_sync(to, remote.gather, args=(me.name, 3)) for to in everyone],
        "nested": bh.rpc_sync(everyone[0], remote.bounce, args=([info.name for info in everyone], 5)),
    }


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_results_come_back_by_rank(start_method: Any) -> None:
    names = ["trainer", "left", "right"]
    found = bh.launch(report, names, args=(7,), kwargs={"scale": 10}, timeout=PATIENCE, start_method=start_method)
    infos = [bh.WorkerInfo(name, n) for n, name in enumerate(names)]
    assert [result["me"] for result in found] == infos
    pids = found[0]["pids"]
    assert len({*pids, os.getpid()}) == 4
    x = torch.arange(3.0)
    for result in found:
        assert result["everyone"] == infos
        assert result["pids"] == pids
        assert result["names"] == names
        assert result["lambda"] == [7, 17, 27]
        assert_same(result["tensors"], [x + 1] * 3)
        assert result["modules"] == [True] * 3
        assert result["scripted"] == [(x * 4).tolist()] * 3
        assert result["methods"] == [1, 2, 3]
        assert result["later"] == [(x + 2).tolist()] * 3
        assert result["coroutines"] == [[0, 1, 2]] * 3
        assert result["nested"] == [*names, *names]


def test_results_of_every_kind() -> None:
    assert launch(remote.identity, 1, {"a": [1, None]}) == [{"a": [1, None]}]
    base = torch.arange(1 << 18)
    ((whole, part, network),) = launch(share_memory, 1, base)
    assert torch.equal(whole, base)
    part.zero_()
    assert whole[:10].sum() == 0
    assert network.tied()
    shift = 3
    assert launch(lambda x: x + shift, 2, 4) == [7, 7]
    assert launch(Counter(4).add, 1, 5) == [9]


def share_memory(base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Network]:
    return base, base[:10], Network()


def torchrun_variables() -> list[str | None]:
    return [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")]


def test_variables_of_torchrun() -> None:
    assert launch(torchrun_variables, 2) == [[str(rank), str(rank), "2", "127.0.0.1"] for rank in range(2)]
    assert launch(torchrun_variables, 2, torchrun_variables=False) == [[None] * 4] * 2


def test_options_reach_every_worker() -> None:
    found = launch(look_at_options, 2, options=bh.Options(timeout=5, threads=3, transport="tcp"))
    assert found == [(5, 3, "tcp")] * 2


def look_at_options() -> tuple[float, int, str]:
    options = bh.current_worker().options
    (address,) = bh.current_worker().endpoint.addresses
    return options.timeout, options.threads, address.partition(":")[0]


def test_300_nested_calls_between_two_processes() -> None:
    chain, _ = launch(bounce_far, ["alice", "bob"])
    assert chain == ["bob", "alice"] * 150 + ["bob"]


def bounce_far() -> list[str] | None:
    if bh.get_worker_info().id != 0:
        return None
    return bh.rpc_sync("bob", remote.bounce, args=(["alice", "bob"], 300))


def test_the_very_first_calls_of_many_threads() -> None:
    """Many threads at once make everything that is made at its first use."""
    assert launch(call_from_many_threads, 2) == [[f"worker{1 - rank}"] * 32 for rank in range(2)]


def call_from_many_threads() -> list[str]:
    sys.setswitchinterval(1e-6)
    other, start = 1 - bh.get_worker_info().id, threading.Barrier(32)

    def call(_: int) -> str:
        start.wait(PATIENCE)
        return bh.rpc_sync(other, remote.whoami)

    with ThreadPoolExecutor(32) as threads:
        return list(threads.map(call, range(32)))


def test_a_worker_that_has_returned_serves_the_others() -> None:
    names = [f"worker{n}" for n in range(3)]
    assert launch(return_early, 3) == [None, "early", names * 20]


def return_early() -> Any:
    """Worker 2 calls the others once the function of worker 1 has returned."""
    rank = bh.get_worker_info().id
    if rank == 1:
        try:
            return "early"
        finally:
            remote.open_gate("worker 1 has returned")
    if rank == 2:
        bh.rpc_sync(1, remote.wait_at, args=("worker 1 has returned",))
        return [bh.rpc_sync(to, remote.whoami) for to in (0, 1, 2) * 20]
    return None


def work_longer_than(seconds: float) -> int | None:
    if bh.get_worker_info().id:
        return None
    end = time.monotonic() + seconds
    calls = 0
    while time.monotonic() < end:
        assert bh.rpc_sync("worker1", remote.whoami)
        calls += 1
    return calls


def test_workers_that_are_done_serve_for_as_long_as_it_takes() -> None:
    calls, _ = launch(work_longer_than, 2, 1.0, options=bh.Options(shutdown_timeout=0.2))
    assert calls > 0


# Failures.


def fail_in(culprit: int, how: Callable[[], Any]) -> None:
    """One fails; one waits for it in a call, one in shutdown, one in a handler."""
    rank = bh.get_worker_info().id
    if rank == culprit:
        bh.rpc_sync((rank + 2) % 4, remote.wait_at, args=("the last waits",))
        how()
    elif rank == (culprit + 1) % 4:
        bh.rpc_sync(culprit, remote.wait_at, args=("never",), timeout=0)
    elif rank == (culprit + 2) % 4:
        bh.rpc_async((rank + 1) % 4, open_and_wait, args=(rank,), timeout=0)


def open_and_wait(back: int) -> None:
    bh.rpc_sync(back, remote.open_gate, args=("the last waits",))
    remote.wait_at("never")


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_first_failure_comes_back_with_type_and_traceback(culprit: int) -> None:
    with pytest.raises(PlainError) as caught:
        launch(fail_in, 4, culprit, remote.fail_plainly)
    assert caught.value.code == 7
    cause = caught.value.__cause__
    assert isinstance(cause, bh.errors.RemoteTraceback)
    assert cause.worker == f"worker{culprit}"
    assert "in fail_in" in cause.text
    assert "in fail_plainly" in cause.text


def test_an_error_of_launch_keeps_nothing_open() -> None:
    """Although an error keeps the frames that it passed through alive."""
    before = take_snapshot()
    with pytest.raises(PlainError) as caught:
        launch(remote.fail_plainly, 1)
    assert caught.value.__traceback__ is not None
    assert take_snapshot().beyond(before) == []


def test_a_failure_that_cannot_be_rebuilt_is_described() -> None:
    with pytest.raises(bh.RemoteError) as caught:
        launch(fail_in, 4, 1, remote.fail_awkwardly)
    assert caught.value.type_name == f"{remote.__name__}.AwkwardError"
    assert caught.value.worker == "worker1"
    assert "in fail_awkwardly" in caught.value.__cause__.text


def test_a_failure_on_the_way_back_names_all_workers_it_crossed() -> None:
    with pytest.raises(PlainError) as caught:
        launch(fail_across, ["a", "b", "c"])
    assert caught.value.__cause__.worker == "a"
    for name in ("'b'", "'c'", "fail_far_away", "fail_plainly"):
        assert name in caught.value.__cause__.text


def fail_across() -> None:
    if bh.get_worker_info().name == "a":
        bh.rpc_sync("b", remote.fail_far_away, args=("c",))


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(("how", "code", "word"), [(be_killed, -signal.SIGKILL, "SIGKILL"), (leave, 3, "3")])
def test_a_process_that_dies_is_named(culprit: int, how: Callable[[], None], code: int, word: str) -> None:
    with pytest.raises(bh.errors.WorkerFailedError) as caught:
        launch(fail_in, 4, culprit, how)
    assert (caught.value.worker, caught.value.exitcode) == (f"worker{culprit}", code)
    assert word in str(caught.value)


def test_a_process_that_dies_is_named_before_errors_that_follow() -> None:
    with pytest.raises(bh.errors.WorkerFailedError) as caught:
        launch(translate_the_loss, 2)
    assert caught.value.worker == "worker1"


def translate_the_loss() -> None:
    """The error of the other worker follows from the death."""
    if bh.get_worker_info().id == 0:
        with pytest.raises(bh.PeerLostError) as caught:
            bh.rpc_sync("worker1", be_killed)
        assert (caught.value.worker, caught.value.function) == ("worker1", "be_killed")
        raise PlainError("no worker left", 1)


def test_a_handler_that_kills_its_process_fails_the_call() -> None:
    with pytest.raises(bh.errors.WorkerFailedError) as caught:
        launch(call_what_kills, 2)
    assert (caught.value.worker, caught.value.exitcode) == ("worker1", 3)


def call_what_kills() -> None:
    if bh.get_worker_info().id == 0:
        bh.rpc_sync("worker1", leave)


def test_a_result_that_cannot_travel() -> None:
    with pytest.raises(bh.errors.SerializationError) as caught:
        launch(return_lock_in_one, 2)
    assert "'worker1'" in str(caught.value)
    assert "lock" in str(caught.value)
    assert caught.value.path.endswith("['bad'][0]")


def return_lock_in_one() -> Any:
    return remote.return_lock() if bh.get_worker_info().id == 1 else None


def test_arguments_that_cannot_travel() -> None:
    with pytest.raises(TypeError, match="lock"):
        launch(remote.identity, 2, threading.Lock())


def test_launch_times_out_and_names_the_workers_that_are_at_work() -> None:
    with pytest.raises(TimeoutError, match="worker1"):
        bh.launch(wait_for_ever, 2, timeout=1.0, start_method="forkserver")


def wait_for_ever() -> None:
    remote.wait_at("never")


class ArrivesLate:
    """An argument that the second worker can read only once a file is there."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        deadline = time.monotonic() + PATIENCE
        while os.environ.get("RANK") == "1" and not self.path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def whoami_with(_: ArrivesLate) -> str:
    return bh.get_worker_info().name


def test_launch_names_workers_that_are_slow_to_start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker starts only after it was named."""
    said = tmp_path / "said"
    messages = []

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            if messages[-1] == "waits for workers to start: second":
                said.touch()

    reader = Reader()
    logging.getLogger("backhaul").addHandler(reader)
    monkeypatch.setattr("backhaul._launch.processes._NOTICE_SECONDS", 0.5)
    try:
        names = launch(whoami_with, ["first", "second"], ArrivesLate(said))
    finally:
        logging.getLogger("backhaul").removeHandler(reader)
    assert names == ["first", "second"]
    assert said.exists()


def test_wrong_numbers_and_names_of_workers() -> None:
    for wrong in (0, -1, [], ["a", "a"], ["no spaces"], [""]):
        with pytest.raises(ValueError):
            launch(remote.whoami, wrong)


# Modules that only one process has.


def only_here() -> types.ModuleType:
    """A module that no other process can import."""
    module = types.ModuleType("only_here")
    sys.modules["only_here"] = module
    source = "class OnlyHereError(Exception): pass\ndef function(): raise OnlyHereError('mine')\nclass Thing: pass"
    exec(source, module.__dict__)
    return module


def fail_as_only_here() -> None:
    only_here().function()


def return_only_here() -> Any:
    return only_here().Thing()


def use_what_others_lack() -> dict[str, Any] | None:
    if bh.get_worker_info().id != 0:
        return None
    found: dict[str, Any] = {}
    with pytest.raises(bh.RemoteError) as caught:
        bh.rpc_sync("worker1", fail_as_only_here)
    found["exception"] = caught.value.type_name, caught.value.worker, caught.value.__cause__.worker
    with pytest.raises(bh.errors.SerializationError) as unread:
        bh.rpc_sync("worker1", return_only_here)
    found["result"] = unread.value.worker
    mine = only_here()
    with pytest.raises(bh.errors.FunctionNotFoundError) as missing:
        bh.rpc_sync("worker2", mine.function)
    found["function"] = missing.value.worker, missing.value.function
    with pytest.raises(bh.errors.SerializationError) as unknown:
        bh.rpc_sync("worker2", remote.identity, args=(mine.Thing(),))
    found["argument"] = unknown.value.worker
    found["still works"] = [bh.rpc_sync(to, remote.whoami) for to in (1, 2)]
    return found


def test_what_only_one_process_can_import() -> None:
    found, *_ = launch(use_what_others_lack, 3)
    assert found == {
        "exception": ("only_here.OnlyHereError", "worker1", "worker1"),
        "result": "worker1",
        "function": ("worker2", "only_here:function"),
        "argument": "worker2",
        "still works": ["worker1", "worker2"],
    }


# Scripts, run as a user would.


def run_program(name: str, *args: str) -> Any:
    """What the program prints."""
    command = [sys.executable, PROGRAMS / name, *args]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=100).stdout)


def test_64_workers_start_call_around_and_stop() -> None:
    expected = [[f"worker{(rank + step) % 64}" for step in (1, 2, 8, 32)] for rank in range(64)]
    assert run_program("many_workers.py", "64") == expected


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_functions_of_main_run_in_the_main_of_the_other_worker(start_method: str) -> None:
    assert run_program("main_functions.py", start_method) == {
        "there": ["first", "lambda", "closure", "future", "coroutine"],
        "here": [],
        "argument keeps its class": True,
        "result keeps its class": "mine!",
        "another process": True,
        "exception": "inside",
        "launch keeps the class of a result": "worker1",
        "launch keeps the class of an exception": ["inside", "worker1"],
    }


CALLER = """
import sys, backhaul as bh

factor = 3

class Pair:
    def __init__(self, left, right):
        self.left, self.right = left, right

    def total(self):
        return (self.left + self.right) * factor

def combine(pair):
    return Pair(pair.total(), bh.get_worker_info().name)

bh.init("caller", rank=0, world_size=2, options=bh.Options(init_method=sys.argv[1]))
found = bh.rpc_sync("other", combine, args=(Pair(1, 2),))
print(type(found).__name__, found.left, found.right, bh.rpc_sync("other", Pair(2, 3).total))
bh.shutdown()
"""
OTHER = """
import sys, backhaul as bh

bh.init("other", rank=1, world_size=2, options=bh.Options(init_method=sys.argv[1]))
bh.shutdown()
"""


def test_functions_of_main_travel_by_value_to_another_program(tmp_path: pathlib.Path) -> None:
    where = f"file://{tmp_path}/store"
    running = [
        subprocess.Popen([sys.executable, "-c", program, where], stdout=subprocess.PIPE, text=True)
        for program in (CALLER, OTHER)
    ]
    try:
        printed = [process.communicate(timeout=PATIENCE)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert printed == ["Pair 9 other 15\n", ""]
    assert [process.returncode for process in running] == [0, 0]


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_workers_end_when_their_parent_is_killed(start_method: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, PROGRAMS / "orphans.py", start_method], stdout=subprocess.PIPE, text=True
    )
    watched: list[int] = []
    try:
        pids = {int(parent.stdout.readline()) for _ in range(3)}  # twice from worker 1, which serves two calls
        watched += [os.pidfd_open(pid) for pid in pids]
        parent.kill()
        parent.wait(PATIENCE)
        for fd in watched:
            assert select.select([fd], [], [], PATIENCE)[0], "a worker outlives its parent"
        # No process is left: it would hold the other end of the pipe open.
        rest, _ = parent.communicate(timeout=PATIENCE)
        assert rest == ""
    finally:
        parent.kill()
        parent.wait(PATIENCE)
        parent.stdout.close()
        for fd in watched:
            os.close(fd)
