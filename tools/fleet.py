"""Worker processes that can be killed, stopped and replaced. A worker in the calling process drives them.

Unlike the processes of ``launch``, they run no program. Each serves until the driver ends it, and a new process can
take the name of one that is gone. Only ``meet`` uses internals of the cluster for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import multiprocessing as mp
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

import msgspec
import torch

from backhaul._options import Options
from backhaul._rpc.api import rpc_async, rpc_sync
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.futures import Future
from backhaul._rpc.node import Node, describe, start_node
from backhaul._rpc.several_futures import wait_all
from backhaul._sim.random_steps import forget_states
from backhaul._transport.sockets.addresses import host_identity
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._worker.worker import Worker, current_worker
from backhaul.errors import PeerLostError
from backhaul.testing.snapshots import take_snapshot

COUNTED = (
    "num_autograd_contexts",
    "num_current_backward_passes",
    "num_plain_records",
    "num_pending_calls",
    "num_owner_rrefs",
    "num_forks",
    "num_user_rrefs",
)
"""Counters that are 0 if nothing is left."""

DRIVER = "driver"
_PROCESS_SECONDS = 60.0  # in which a process must start or end


@dataclasses.dataclass(frozen=True)
class Exam:
    """What a worker holds at one moment.

    Attributes:
        left: Counters of ``COUNTED`` that are not 0.
        threads: The number of threads.
        sockets: The number of descriptors of sockets.
        descriptors: The number of other descriptors.
        segments: The number of files in ``/dev/shm``.
        shm_bytes: Bytes of shared memory that the worker has created.
        shm_lent: The number of its slots that other workers use.
        rss: Bytes of resident memory that the worker shares with no other process.
        futures: The number of futures that are not done; -1 if they were not counted.
    """

    left: dict[str, int]
    threads: int
    sockets: int
    descriptors: int
    segments: int
    shm_bytes: int
    shm_lent: int
    rss: int
    futures: int = -1


def examine(thorough: bool = False) -> Exam:
    """Inspect the current worker. With ``thorough``, collect garbage first and count futures."""
    worker = current_worker()
    futures = -1
    if thorough:
        futures = _undone()
    seen = take_snapshot()
    sockets = sum("socket:[" in text for _, text in seen.descriptors)
    return Exam(
        {name: count for name in COUNTED if (count := worker.counters[name]())},
        len(seen.threads),
        sockets,
        len(seen.descriptors) - sockets,
        len(seen.segments),
        worker.counters["shm_bytes"](),
        worker.counters["shm_lent"](),
        _memory(),
        futures,
    )


def _undone() -> int:
    """The number of futures of this process that are not done."""
    gc.collect()
    # Use type(): some objects warn when their __class__ is read.
    return sum(issubclass(type(thing), Future) and not thing.done() for thing in gc.get_objects())


def _memory() -> int:
    if _trim is not None:
        _trim(0)  # memory that the allocator keeps for later does not count
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it


# How a worker becomes known to the others, here without a leader and without a store.


def meet(record: WorkerRecord) -> None:
    """Add a worker to the peers of the current one. It replaces an earlier worker of its name."""
    problem = current_worker().part(Node).peers.admit(record)
    if problem:
        raise RuntimeError(problem)


def _start(
    name: str, number: int, secret: bytes, options: Options, epoch: int
) -> tuple[WorkerRecord, Callable[[list[WorkerRecord]], Node]]:
    """The record of a worker, and a function that starts the worker, given the records of the others."""
    endpoint = SocketEndpoint(
        secret=secret,
        unix=options.transport != "tcp",
        bind=options.bind or ("127.0.0.1" if options.transport == "tcp" else None),
        limit=options.limits.frame_bytes,
        shm_bytes=options.shm_bytes,
    )
    own = msgspec.structs.replace(describe(name, number, endpoint, options, host=host_identity()), epoch=epoch)
    return own, lambda records: start_node(own, [*records, own], endpoint, options)


# The other processes.

_pipe: Connection | None = None  # to the process that started this one
_has_died = False


def die(how: signal.Signals = signal.SIGKILL) -> None:
    """Kill or stop this process, once. Tell the process that started it the time."""
    global _has_died
    if not _has_died and _pipe is not None:
        _has_died = True
        _pipe.send(time.monotonic())
        os.kill(os.getpid(), how)


def _live(pipe: Connection, name: str, number: int, secret: bytes, options: Options, epoch: int) -> None:  # noqa: PLR0917
    global _pipe
    _pipe = pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    gc.freeze()  # so that a collection visits only objects of the worker
    own, start = _start(name, number, secret, options, epoch)
    pipe.send(own)
    with contextlib.suppress(EOFError, OSError):
        node = start(pipe.recv())
        pipe.send("up")
        pipe.recv()
        node.shutdown(graceful=False, timeout=2.0)
    sys.stderr.flush()
    os._exit(0)


class _Member:
    """A worker process, as the driver sees it."""

    def __init__(self, name: str, number: int, secret: bytes, options: Options, epoch: int = 0) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["backhaul._public", "tools.fleet"])
        self.name = name
        self.number = number
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_live, args=(theirs, name, number, secret, options, epoch), name=f"fleet-{name}", daemon=True
        )
        self.process.start()
        theirs.close()
        self.record: WorkerRecord = self._receive()
        self.died_at: float | None = None

    def _receive(self) -> WorkerRecord:
        if not self.pipe.poll(_PROCESS_SECONDS):
            raise TimeoutError(f"process {self.name} did not start within {_PROCESS_SECONDS:g} s; see its output")
        received: WorkerRecord = self.pipe.recv()
        return received

    def start(self, records: list[WorkerRecord]) -> None:
        self.pipe.send(records)
        self._receive()

    def died(self, timeout: float = 0.0) -> float | None:
        """When the process called ``die``; None if it has not."""
        with contextlib.suppress(EOFError, OSError):
            if self.died_at is None and self.pipe.poll(timeout):
                self.died_at = self.pipe.recv()
        return self.died_at

    def remove(self) -> None:
        """Kill the process, also if it has stopped or ended, and free what belongs to it."""
        self.died()
        self.process.kill()
        self.process.join(_PROCESS_SECONDS)
        self.process.close()
        self.pipe.close()


class Fleet:
    """Worker processes ``worker1`` and so on, and the worker ``driver`` in this process. A context manager; inside, the
    driver is the current worker.

    Only one thread may call methods that change the fleet.

    Args:
        workers: The number of processes.
        options: The options of all workers.
    """

    def __init__(self, workers: int = 3, options: Options | None = None) -> None:
        self._options = options or Options()
        self._secret = secrets.token_bytes(32)
        self._names = {number: f"worker{number}" for number in range(1, workers + 1)}
        self._members: dict[str, _Member] = {}
        self._epoch = 0  # how many workers were replaced
        self._undone = 0  # futures that this process had before
        self._node: Node | None = None

    def __enter__(self) -> Fleet:
        self._undone = _undone()
        try:
            own, start = _start(DRIVER, 0, self._secret, self._options, 0)
            for number, name in self._names.items():
                self._members[name] = _Member(name, number, self._secret, self._options)
            records = [own, *(member.record for member in self._members.values())]
            for member in self._members.values():
                member.start([record for record in records if record.name != member.name])
            self._node = start(records[1:])
        except BaseException:
            self._remove_all()
            raise
        self._node.worker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._node is not None
        self._node.worker.__exit__(kind, error, trace)
        for member in self._members.values():
            with contextlib.suppress(OSError):
                member.pipe.send("end")
        self._node.shutdown(graceful=False, timeout=5.0)
        self._remove_all()
        forget_states()

    def _remove_all(self) -> None:
        for member in self._members.values():
            member.remove()
        self._members.clear()

    @property
    def worker(self) -> Worker:
        """The driver."""
        assert self._node is not None
        return self._node.worker

    @property
    def names(self) -> list[str]:
        """The names of the worker processes that were not removed."""
        return sorted(self._members)

    def number(self, name: str) -> int:
        """The id of a worker."""
        return 0 if name == DRIVER else self._members[name].number

    def pid(self, name: str) -> int:
        """The process id of a worker."""
        pid = self._members[name].process.pid
        assert pid is not None
        return pid

    def signal(self, name: str, what: signal.Signals) -> float:
        """Send a signal to a worker. Returns the time."""
        os.kill(self.pid(name), what)
        return time.monotonic()

    def died(self, name: str, timeout: float = 0.0) -> float | None:
        """When a worker called ``die``; None if it does not within ``timeout`` seconds."""
        return self._members[name].died(timeout)

    def remove(self, name: str) -> None:
        """Kill a worker, if it still runs, and remove it from the fleet."""
        self._members.pop(name).remove()

    def replace(self, name: str) -> None:
        """Start a new worker in place of one that was removed."""
        (number,) = (number for number, known in self._names.items() if known == name)
        self._epoch += 1
        member = _Member(name, number, self._secret, self._options, self._epoch)
        try:
            member.start([self.worker.part(Node).peers.own.record, *(m.record for m in self._members.values())])
            meet(member.record)
            for other in self._members:
                with contextlib.suppress(PeerLostError):  # it has died too, and what replaces it gets all records
                    rpc_sync(other, meet, args=(member.record,))
        except BaseException:
            member.remove()
            raise
        self._members[name] = member

    def exams(self, *, thorough: bool = False) -> dict[str, Exam]:
        """Inspect all workers."""
        asked = [rpc_async(name, examine, args=(thorough,)) for name in self._members]
        found = wait_all(asked)
        del asked
        return {DRIVER: examine(thorough), **dict(zip(self._members, found, strict=True))}

    def leftovers(self, *, timeout: float, ignored: tuple[str, ...] = ()) -> list[str]:
        """What is still left after ``timeout`` seconds, although nothing runs. Returns earlier if nothing is left."""
        forget_states()
        for name in self._members:
            rpc_sync(name, forget_states)
        deadline = time.monotonic() + timeout
        for pause in _pauses():
            left = []
            for name, exam in self.exams(thorough=True).items():
                counts = {what: n for what, n in exam.left.items() if what not in ignored}
                # A reference that is left may have a future that waits for its value.
                own = exam.futures - (self._undone if name == DRIVER else 0)
                waiting = own if len(counts) == len(exam.left) else 0
                counts |= {"futures": waiting} if waiting > 0 else {}
                counts |= {"shm_lent": exam.shm_lent} if exam.shm_lent else {}
                left += [f"{name} {what} {n}" for what, n in counts.items()]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(pause)
        raise AssertionError


def _pauses() -> Iterator[float]:
    pause = 0.02
    while True:
        yield pause
        pause = min(pause * 2, 0.5)
