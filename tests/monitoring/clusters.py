"""A cluster of processes that works until it is told to stop: worker 0 makes steps over the others."""

from __future__ import annotations

import contextlib
import io
import multiprocessing as mp
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import backhaul as bh
from backhaul._monitoring.monitor import Monitor, open_endpoint
from tests.cluster.hosts import Host

SECRET = "a secret of twenty-four characters"
SECONDS = 60.0  # no test waits longer
STEP_SECONDS = 0.02  # between two steps
T = TypeVar("T")
weight = torch.ones(64, requires_grad=True)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def until(look: Callable[[], T]) -> T:
    """What ``look`` returns, once that is true."""
    deadline = time.monotonic() + SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
    return found


@dataclass
class RunningCluster:
    """The processes, by worker name."""

    processes: dict[str, Any]
    pipes: dict[str, multiprocessing.connection.Connection]
    addresses: dict[str, str]
    dashboard: str  # where its page is, with the token; empty if there is none

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def ask(self, name: str, question: str) -> Any:
        """Have the program of a worker answer."""
        self.pipes[name].send(question)
        return self.answer(name)

    def answer(self, name: str) -> Any:
        """What the program of a worker says."""
        assert self.pipes[name].poll(SECONDS), f"{name} does not answer"
        return self.pipes[name].recv()

    def monitor(self, secret: str = SECRET) -> Monitor:
        addresses = tuple(self.addresses.values())
        return Monitor(open_endpoint(secret.encode(), addresses), addresses)


@contextlib.contextmanager
def running(
    folder: Path, size: int = 3, *, options: bh.Options | None = None, hosts: Sequence[Host] = ()
) -> Iterator[RunningCluster]:
    """Start a cluster. The files that it leaves for monitors are in ``folder``. ``hosts``: where the workers run, in
    turn; empty: on this one.
    """
    context = mp.get_context("forkserver")
    names = [f"worker{rank}" for rank in range(size)]
    processes, pipes, addresses, dashboard = {}, {}, {}, ""
    try:
        for rank, name in enumerate(names):
            pipes[name], theirs = context.Pipe()
            host = hosts[rank % len(hosts)] if hosts else None
            processes[name] = context.Process(target=_work, args=(rank, size, str(folder), options, theirs, host))
            processes[name].start()
            theirs.close()
        for name in names:
            assert pipes[name].poll(SECONDS), f"{name} did not start"
            addresses[name], shown = pipes[name].recv()
            dashboard = dashboard or shown
        yield RunningCluster(processes, pipes, addresses, dashboard)
    finally:
        for name in names:
            with contextlib.suppress(OSError, KeyError):
                pipes[name].close()
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(process.pid, signal.SIGCONT)
            process.join(10)
            process.kill()
            process.join()
            process.close()


def _work(rank: int, size: int, folder: str, options: bh.Options | None, pipe: Any, host: Host | None) -> None:
    if host is not None:
        host.enter()
    os.environ["BACKHAUL_SECRET"] = SECRET
    os.environ["BACKHAUL_RUNTIME_DIR"] = folder
    os.environ["BACKHAUL_DASHBOARD_TOKEN"] = "the-token-of-these-tests"
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}.store", size)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        worker = bh.init(rank=rank, world_size=size, store=store, options=options)
    pipe.send((bh.get_address(), printed.getvalue().strip().rpartition(" ")[2]))
    others = [f"worker{each}" for each in range(1, size)]
    with contextlib.suppress(EOFError, OSError):
        while True:
            if pipe.poll(STEP_SECONDS if rank == 0 else None):
                question = pipe.recv()
                if question == "world":
                    pipe.send([info.name for info in bh.get_worker_infos()])
                elif question == "observed":
                    pipe.send(worker.observer is not None)
                elif question == "end":
                    bh.shutdown()
                    pipe.send("ended")
                    return
            if rank == 0:
                _make_step(others)
    bh.shutdown(graceful=False)


def _make_step(others: list[str]) -> None:
    """One call to each worker that can be reached, and one pass back through all of them."""
    results = []
    for name in others:
        with contextlib.suppress(bh.BackhaulError):
            results.append(bh.rpc_sync(name, scale, args=(torch.ones(64, requires_grad=True),), timeout=5.0).sum())
    if results:
        with contextlib.suppress(bh.BackhaulError):
            torch.stack(results).sum().backward()
