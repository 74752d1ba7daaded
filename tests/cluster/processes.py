"""Plain processes that are no workers yet, for tests of ``init`` and of what happens when one is killed."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable
from typing import Any

from .remote_functions import PATIENCE

DIED = "died"


def run_processes(function: Callable[..., Any], count: int, *args: Any, patience: float = PATIENCE) -> list[Any]:
    """Call ``function(rank, *args)`` in each of ``count`` new processes; return the results by rank.

    ``DIED`` stands for a process that ended without a result. What any of them raised fails the test.
    """
    context = mp.get_context("forkserver")
    pipes, processes = [], []
    try:
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            pipes.append(ours)
            processes.append(context.Process(target=_run, args=(theirs, function, rank, args)))
            processes[-1].start()
            theirs.close()
        return _collect(pipes, patience)
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.kill()
            process.join()
            process.close()


def _collect(pipes: list[multiprocessing.connection.Connection], patience: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + patience
    while missing := [rank for rank in range(len(pipes)) if rank not in results]:
        ready = multiprocessing.connection.wait([pipes[rank] for rank in missing], max(deadline - time.monotonic(), 0))
        assert ready, f"no news from processes {missing}; so far: {results}"
        for rank in missing:
            if pipes[rank] in ready:
                try:
                    fine, results[rank] = pickle.loads(pipes[rank].recv_bytes())
                    assert fine, f"process {rank}: {results[rank]}"
                except EOFError:
                    results[rank] = DIED
    return [results[rank] for rank in range(len(pipes))]


def _run(
    pipe: multiprocessing.connection.Connection,
    function: Callable[..., Any],
    rank: int,
    args: tuple[Any, ...],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "BACKHAUL_SECRET"):
        os.environ.pop(name, None)
    try:
        answer = True, function(rank, *args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
