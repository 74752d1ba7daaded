"""However a launch is ended, all of its processes end within seconds, and what is said is the first cause, once. And
a program that goes on after an interrupt finds everything in order.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import backhaul as bh

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


# Exceptions that handlers of signals raise, at any point of what the main thread does.

WEIGHT = torch.ones(2, requires_grad=True)
LARGE = torch.ones(300_000)
SECONDS = 4.0
LONGEST = 0.004  # seconds; some calls and steps take less


class Interrupt(BaseException):
    """What a handler raises."""


def interrupt(*_: object) -> None:
    raise Interrupt


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


def interrupted(what: Callable[[], None], after: float) -> bool:
    """Do something again and again until an interrupt comes; whether it was raised, and not lost in a destructor."""
    try:
        signal.setitimer(signal.ITIMER_REAL, after)
        for _ in range(50):
            what()
        return False
    except Interrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def works(what: Callable[[], None]) -> None:
    """A channel that an interrupt has torn is opened again; the peer may use the old one until it has heard of that."""
    for left in reversed(range(3)):
        try:
            what()
            return
        except bh.PeerLostError:
            if not left:
                raise


def be_interrupted(rank: int, port: int, seed: int, company: bool) -> Any:
    bh.init(f"w{rank}", rank=rank, world_size=3, store=TCPStore("127.0.0.1", port, is_master=False))
    try:
        if rank:
            return None
        call()
        chance, over, problems = random.Random(seed), threading.Event(), []
        signal.signal(signal.SIGALRM, interrupt)

        def keep_calling() -> None:
            try:
                while not over.is_set():
                    works(call)
            except Exception as error:
                problems.append(repr(error))

        others = [threading.Thread(target=keep_calling) for _ in range(2 * company)]
        for thread in others:
            thread.start()
        count, end = 0, time.monotonic() + SECONDS
        while time.monotonic() < end and not problems:
            what = chance.choice([call, call_with_much, wait_for_futures, step])
            with contextlib.suppress(bh.PeerLostError):  # of a channel that was torn just before
                count += interrupted(what, chance.uniform(1e-6, LONGEST))
            works(chance.choice([call, call_with_much, step]))
        over.set()
        for thread in others:
            thread.join()
        works(step)
        wanted = ("num_pending_calls", "num_autograd_contexts", "num_current_backward_passes")
        deadline = time.monotonic() + PATIENCE
        while any(bh.get_debug_info()[name] for name in wanted) and time.monotonic() < deadline:
            time.sleep(0.01)  # calls that were made and whose futures nobody got
        return count, problems, [bh.get_debug_info()[name] for name in wanted]
    finally:
        bh.shutdown(timeout=PATIENCE)


@pytest.mark.parametrize("company", [False, True])
def test_after_an_interrupt_everything_works(company: bool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (count, problems, left), *_ = run_processes(be_interrupted, 3, store.port, 1, company)
    assert not problems
    assert left == [0, 0, 0]
    assert count
