"""However a launch is ended, all of its processes end within seconds, and what is said is the first cause, once. And
a program that goes on after an interrupt finds everything in order.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import backhaul as bh
from backhaul._launch.processes import _uninterrupted
from backhaul._transport.inproc import InprocEndpoint
from backhaul._transport.sockets.endpoint import SocketEndpoint

from . import remote_functions as remote
from .processes import run_processes
from .remote_functions import PATIENCE

PROGRAM = pathlib.Path(__file__).parent / "programs" / "interrupted.py"
SOON = 20.0  # seconds; much more than it takes, and much less than any timeout of the workers


def run(start_method: str, what: str, when: str, pause: float, how: str) -> tuple[int, str]:
    """Exit code and what was said. The pipe of the output is at its end only when every process has gone."""
    command = [sys.executable, PROGRAM, start_method, what]
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    try:
        while when and when not in parent.stdout.readline():
            pass
        time.sleep(pause)
        begun = time.monotonic()
        if how == "ctrl-c":
            os.killpg(parent.pid, signal.SIGINT)
        elif how == "twice":
            os.killpg(parent.pid, signal.SIGINT)
            time.sleep(0.05)
            os.killpg(parent.pid, signal.SIGINT)
        elif how == "terminate":
            parent.terminate()
        _, said = parent.communicate(timeout=PATIENCE)
        assert time.monotonic() - begun < SOON or not how
        return parent.returncode, said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
        assert parent.stderr is not None
        parent.stderr.close()


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("when", "pause", "how"), [("starting", 0.1, "ctrl-c"), ("starting", 0.6, "twice"), ("busy", 0.0, "ctrl-c")]
)
def test_ctrl_c(start_method: str, when: str, pause: float, how: str) -> None:
    code, said = run(start_method, "hang", when, pause, how)
    assert code == -signal.SIGINT, said
    assert said.count("Traceback") == 1, said
    assert said.rstrip().endswith("KeyboardInterrupt"), said


def test_an_interrupt_that_another_thread_takes_waits_until_a_process_is_started() -> None:
    started = []

    def start() -> None:
        with _uninterrupted():
            _thread.interrupt_main()
            time.sleep(0.01)
            started.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert started
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize(("when", "pause"), [("starting", 0.6), ("busy", 0.0)])
def test_the_parent_is_terminated(start_method: str, when: str, pause: float) -> None:
    code, said = run(start_method, "hang", when, pause, "terminate")
    assert code == -signal.SIGTERM
    assert "Traceback" not in said, said


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("raise", "ValueError: the first cause"),
        ("terminate", "WorkerFailedError: worker 'worker1' was killed by SIGTERM before it had a result"),
    ],
)
def test_one_worker_fails(what: str, cause: str) -> None:
    code, said = run("spawn", what, "", 0.0, "")
    assert code == 1
    lines = said.splitlines()
    causes = [line for line in lines if line.endswith(cause) and not line.startswith(" ")]
    assert len(causes) in (1, 2), said  # once more in the worker's own traceback
    assert "PeerLostError" not in said, said
    assert said.count("Traceback (most") <= 2, said


# Ctrl-C in the main thread of a program that goes on.

WEIGHT = torch.ones(2, requires_grad=True)
LARGE = torch.ones(300_000)
SECONDS = 4.0
LONGEST = 0.004  # seconds; some calls and steps take less

SENDER = """
import os, sys, time
print(flush=True)
for line in sys.stdin:
    time.sleep(float(line))
    os.kill(int(sys.argv[1]), 2)
"""
"""Another process, as a terminal is: what this one does has no influence on when the signal comes."""


@contextlib.contextmanager
def interrupting() -> Iterator[Callable[[float], None]]:
    """Gives what sends an interrupt to this process after so many seconds."""
    command = [sys.executable, "-SE", "-c", SENDER, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        sender.stdout.readline()

        def send(after: float) -> None:
            sender.stdin.write(f"{after}\n")
            sender.stdin.flush()

        yield send
        sender.stdin.close()


def call() -> None:
    for worker in ("w1", "w2"):
        assert bh.rpc_sync(worker, remote.identity, args=(7,), timeout=PATIENCE) == 7


def call_with_much() -> None:
    assert bh.rpc_sync("w1", torch.neg, args=(LARGE,), timeout=PATIENCE)[-1] == -1


def wait_for_futures() -> None:
    calls = [bh.rpc_async(f"w{1 + n % 2}", remote.identity, args=(n,), timeout=PATIENCE) for n in range(6)]
    assert [future.wait() for future in calls] == list(range(6))


def step() -> None:
    with bh.context() as ctx:
        y = bh.rpc_sync("w1", torch.mul, args=(WEIGHT, 2), timeout=PATIENCE)
        z = bh.rpc_sync("w2", torch.mul, args=(y, 3), timeout=PATIENCE)
        bh.backward(ctx, [z.sum()], timeout=PATIENCE)
        assert bh.get_gradients(ctx)[WEIGHT].tolist() == [6.0, 6.0]


def refer() -> None:
    there = bh.remote("w1", torch.neg, args=(WEIGHT,))
    assert there.to_here(timeout=PATIENCE).tolist() == [-1.0, -1.0]


def be_interrupted(rank: int, port: int, seed: int, company: bool) -> Any:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    bh.init(f"w{rank}", rank=rank, world_size=3, store=TCPStore("127.0.0.1", port, is_master=False))
    try:
        return None if rank else _be_interrupted(random.Random(seed), company)
    finally:
        bh.shutdown(timeout=PATIENCE)


def _be_interrupted(chance: random.Random, company: bool) -> Any:
    call()
    over, problems, count = threading.Event(), [], 0

    def keep_calling() -> None:
        try:
            while not over.is_set():
                call()
        except Exception as error:
            problems.append(repr(error))

    others = [threading.Thread(target=keep_calling) for _ in range(2 * company)]
    for thread in others:
        thread.start()
    with interrupting() as send, tempfile.TemporaryFile() as said:
        before = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end and not problems:
                what = chance.choice([call, call_with_much, wait_for_futures, step, refer])
                try:
                    send(chance.uniform(0, LONGEST))
                    while True:  # until it comes, for it does
                        what()
                except KeyboardInterrupt:
                    count += 1
                chance.choice([call, call_with_much, step])()
        finally:
            os.dup2(before, 2)
            os.close(before)
            over.set()
        said.seek(0)
        problems += said.read().decode().splitlines()  # of exceptions that were ignored
    for thread in others:
        thread.join()
    step()
    wanted = ("num_pending_calls", "num_autograd_contexts", "num_current_backward_passes")
    deadline = time.monotonic() + PATIENCE
    while any(bh.get_debug_info()[name] for name in wanted) and time.monotonic() < deadline:
        time.sleep(0.01)  # calls that were made and whose futures nobody got
    return count, problems, [bh.get_debug_info()[name] for name in wanted]


@pytest.mark.parametrize("company", [False, True])
def test_after_an_interrupt_everything_works(company: bool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (count, problems, left), *_ = run_processes(be_interrupted, 3, store.port, 1, company)
    assert not problems
    assert left == [0, 0, 0]
    assert count


# What may be interrupted, and when. The workers are in this process, so that nothing has to be told to another.


def socket_endpoint() -> SocketEndpoint:
    return SocketEndpoint(secret=b"of this test")


@pytest.fixture
def python_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=[InprocEndpoint, socket_endpoint])
def pair(request: pytest.FixtureRequest, python_handler: None) -> Iterator[None]:
    with bh.cluster(2, endpoints=request.param):
        yield


class Stuck:
    """Waits in a handler until somebody lets it go."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def __enter__(self) -> Stuck:
        handlers[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        del handlers[id(self)]


handlers: dict[int, Stuck] = {}


def be_stuck(number: int) -> torch.Tensor:
    handlers[number].begun.set()
    handlers[number].over.wait(PATIENCE)
    return torch.ones(2)


class StuckInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        StuckInBackward.number = number  # type: ignore[attr-defined]
        return x * 2

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * be_stuck(StuckInBackward.number), None  # type: ignore[attr-defined]


def call_stuck(number: int) -> None:
    bh.rpc_sync("worker1", be_stuck, args=(number,), timeout=0)


def call_stuck_within_a_deadline(number: int) -> None:
    with bh.deadline(PATIENCE):
        bh.rpc_sync("worker1", be_stuck, args=(number,), timeout=0)


def wait_for_a_stuck_future(number: int) -> None:
    bh.rpc_async("worker1", be_stuck, args=(number,), timeout=0).wait()


def wait_for_all_of_them(number: int) -> None:
    bh.wait_all([bh.rpc_async("worker1", be_stuck, args=(number,), timeout=0)])


def get_a_stuck_value(number: int) -> None:
    bh.remote("worker1", be_stuck, args=(number,), timeout=0).to_here(timeout=0)


def go_back_through_it(number: int) -> None:
    with bh.context() as ctx:
        y = bh.rpc_sync("worker1", StuckInBackward.apply, args=(WEIGHT, number))
        bh.backward(ctx, [y.sum()], timeout=0)


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize(
    "wait",
    [
        call_stuck,
        call_stuck_within_a_deadline,
        wait_for_a_stuck_future,
        wait_for_all_of_them,
        get_a_stuck_value,
        go_back_through_it,
    ],
)
def test_a_wait_is_interrupted_at_once(wait: Callable[[int], None]) -> None:
    with interrupting() as send, Stuck() as stuck:
        sender = threading.Thread(target=lambda: stuck.begun.wait(PATIENCE) and send(0.01))
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            wait(id(stuck))
        sender.join()
        assert not stuck.over.is_set()
    assert bh.rpc_sync("worker1", remote.identity, args=(7,)) == 7


class SlowToPickle:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work

    def __reduce__(self) -> Any:
        self.work()
        return int, ()


def pickle_it(work: Callable[[], Any]) -> None:
    bh.rpc_sync("worker1", remote.identity, args=(SlowToPickle(work),))


def call_back(work: Callable[[], Any]) -> None:
    future: bh.Future[None] = bh.Future()
    future.set_result(None)
    future.add_done_callback(lambda _: work())
    time.sleep(PATIENCE)  # what comes in a callback would be lost, so it comes after that


def call_back_then(work: Callable[[], Any]) -> None:
    future: bh.Future[None] = bh.Future()
    future.set_result(None)
    future.then(lambda _: work())
    time.sleep(PATIENCE)


def run_a_hook(work: Callable[[], Any]) -> None:
    with bh.context() as ctx:
        x = WEIGHT * 1
        x.register_hook(lambda grad: work())
        bh.backward(ctx, [bh.rpc_sync("worker1", torch.neg, args=(x,)).sum()])


def run_a_hook_of_a_leaf(work: Callable[[], Any]) -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda _: work())
    with bh.context() as ctx:
        bh.backward(ctx, [bh.rpc_sync("worker1", torch.neg, args=(leaf,)).sum()])


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("run", [pickle_it, call_back, call_back_then, run_a_hook, run_a_hook_of_a_leaf])
def test_the_users_own_code_is_interrupted_as_ever(run: Callable[[Callable[[], Any]], None]) -> None:
    begun, over = threading.Event(), threading.Event()

    def work() -> None:  # on a thread of the worker's, where hooks run there
        begun.set()
        over.wait(PATIENCE)

    with interrupting() as send:
        sender = threading.Thread(target=lambda: begun.wait(PATIENCE) and send(0.01))
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            run(work)
        sender.join()
    over.set()
    assert bh.rpc_sync("worker1", remote.identity, args=(7,)) == 7


def test_a_handler_of_the_users_is_left_alone() -> None:
    seen = []

    def handler(*_: object) -> None:
        seen.append(bh.rpc_sync("worker1", remote.identity, args=(7,)))

    before = signal.signal(signal.SIGINT, handler)
    try:
        with bh.cluster(2):
            bh.rpc_sync("worker1", signal.raise_signal, args=(signal.SIGINT,))
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [7]


@pytest.mark.usefixtures("python_handler")
def test_pythons_handler_is_given_back_and_taken_again() -> None:
    python = signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is python
    worker = bh.init("alone", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        ours = signal.getsignal(signal.SIGINT)
        assert ours is not python
        signal.signal(signal.SIGINT, python)  # as a notebook does before each cell
        assert bh.current_worker() is worker
        assert signal.getsignal(signal.SIGINT) is ours
    finally:
        bh.shutdown()
    assert signal.getsignal(signal.SIGINT) is python
