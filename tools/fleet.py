"""Worker processes that can be killed, stopped and replaced, driven by a worker of the calling process.

Unlike those of ``launch`` they are no program's: each serves until it is told to end, and one that is gone can be
followed by another of its name. What that takes of the layers below is in ``meet``, and nowhere else.
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

from backhaul._rpc.api import rpc_async, rpc_sync
from backhaul._rpc.cluster.membership_table import WorkerRecord
from backhaul._rpc.futures import Future, wait_all
from backhaul._rpc.node import Node, describe, start_node
from backhaul._sim.random_steps import forget_states
from backhaul._transport.sockets.addresses import host_identity
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._types import Options
from backhaul._worker.worker import Worker, current_worker
from backhaul.testing.snapshots import take_snapshot

COUNTED = (
    "num_autograd_contexts",
    "num_current_backward_passes",
    "num_pending_calls",
    "num_owner_rrefs",
    "num_forks",
    "num_user_rrefs",
)
"""Counters that are 0 where nothing is left."""

DRIVER = "driver"
_PATIENCE = 60.0  # seconds for a process to start or to end


@dataclasses.dataclass(frozen=True)
class Exam:
    """What a worker holds at one moment.

    Attributes:
        left: Counters that should be 0 and are not.
        threads: How many.
        sockets: How many descriptors of sockets.
        descriptors: How many others.
        segments: Files in ``/dev/shm``.
        shm_bytes: Shared memory it has made.
        shm_lent: Slots of it that others use.
        rss: Bytes of memory that are its own: resident, and not of shared files.
        futures: Futures that are not done; -1 if they were not counted.
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
    """Look at the current worker. ``thorough``: collect garbage before, and count futures."""
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
    """Futures of this process that are not done."""
    gc.collect()
    # By type: some objects warn when they are asked for their class.
    return sum(issubclass(type(thing), Future) and not thing.done() for thing in gc.get_objects())


def _memory() -> int:
    if _trim is not None:
        _trim(0)  # what the allocator keeps for later is not held by anybody
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


# The seam: how a worker becomes known to the others, here without a leader or a store.


def meet(record: WorkerRecord) -> None:
    """Know a worker from now on, in the place of one that had its name."""
    problem = current_worker().part(Node).peers.admit(record)
    if problem:
        raise RuntimeError(problem)


def _start(
    name: str, number: int, secret: bytes, options: Options, epoch: int
) -> tuple[WorkerRecord, Callable[[list[WorkerRecord]], Node]]:
    """A worker's record, and what makes the worker once the others' are known."""
    endpoint = SocketEndpoint(
        secret=secret,
        unix=options.transport != "tcp",
        bind=options.bind or ("127.0.0.1" if options.transport == "tcp" else None),
        limit=options.max_frame_bytes,
        shm_bytes=options.shm_bytes,
    )
    own = msgspec.structs.replace(describe(name, number, endpoint, options, host=host_identity()), epoch=epoch)
    return own, lambda records: start_node(own, [*records, own], endpoint, options)


# The other processes.

_pipe: Connection | None = None  # to the process that started this one
_struck = False


def die(how: signal.Signals = signal.SIGKILL) -> None:
    """End or stop this process, once, and let the one that started it know when."""
    global _struck
    if not _struck and _pipe is not None:
        _struck = True
        _pipe.send(time.monotonic())
        os.kill(os.getpid(), how)


def _live(pipe: Connection, name: str, number: int, secret: bytes, options: Options, epoch: int) -> None:  # noqa: PLR0917
    global _pipe
    _pipe = pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    gc.freeze()  # so that collecting costs only what the worker has made
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
    """One of the other processes, as the first sees it."""

    def __init__(self, name: str, number: int, secret: bytes, options: Options, epoch: int = 0) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tools.fleet"])
        self.name = name
        self.number = number
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_live, args=(theirs, name, number, secret, options, epoch), name=f"fleet-{name}", daemon=True
        )
        self.process.start()
        theirs.close()
        self.record: WorkerRecord = self._hear()
        self.died_at: float | None = None

    def _hear(self) -> WorkerRecord:
        if not self.pipe.poll(_PATIENCE):
            raise TimeoutError(f"process {self.name} does not come up")
        heard: WorkerRecord = self.pipe.recv()
        return heard

    def start(self, records: list[WorkerRecord]) -> None:
        self.pipe.send(records)
        self._hear()

    def died(self, patience: float = 0.0) -> float | None:
        """When it said that it dies, if it did."""
        with contextlib.suppress(EOFError, OSError):
            if self.died_at is None and self.pipe.poll(patience):
                self.died_at = self.pipe.recv()
        return self.died_at

    def bury(self) -> None:
        """End it, however it is."""
        self.died()
        self.process.kill()
        self.process.join(_PATIENCE)
        self.process.close()
        self.pipe.close()


class Fleet:
    """Worker processes ``worker1`` and so on, and the worker ``driver`` in this process, which is current inside.

    Methods are for one thread, but for those that only look.

    Args:
        workers: How many processes.
        options: For all of them.
    """

    def __init__(self, workers: int = 3, options: Options | None = None) -> None:
        self._options = options or Options()
        self._secret = secrets.token_bytes(32)
        self._names = {number: f"worker{number}" for number in range(1, workers + 1)}
        self._members: dict[str, _Member] = {}
        self._epoch = 0  # how often a worker was replaced
        self._undone = 0  # futures that others in this process have left
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
            self._bury_all()
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
        self._bury_all()
        forget_states()

    def _bury_all(self) -> None:
        for member in self._members.values():
            member.bury()
        self._members.clear()

    @property
    def worker(self) -> Worker:
        """The driver."""
        assert self._node is not None
        return self._node.worker

    @property
    def names(self) -> list[str]:
        """Those of the other processes that have not been buried."""
        return sorted(self._members)

    def number(self, name: str) -> int:
        """A worker's id."""
        return 0 if name == DRIVER else self._members[name].number

    def pid(self, name: str) -> int:
        """A worker's process."""
        pid = self._members[name].process.pid
        assert pid is not None
        return pid

    def signal(self, name: str, what: signal.Signals) -> float:
        """Send a signal to a worker; return when."""
        os.kill(self.pid(name), what)
        return time.monotonic()

    def died(self, name: str, patience: float = 0.0) -> float | None:
        """When a worker said that it dies or stops, see ``die``."""
        return self._members[name].died(patience)

    def bury(self, name: str) -> None:
        """End a worker, if it has not, and expect it no more."""
        self._members.pop(name).bury()

    def replace(self, name: str) -> None:
        """Start a new worker in the place of one that was buried."""
        (number,) = (number for number, known in self._names.items() if known == name)
        self._epoch += 1
        member = _Member(name, number, self._secret, self._options, self._epoch)
        try:
            member.start([self.worker.part(Node).peers.own.record, *(m.record for m in self._members.values())])
            meet(member.record)
            for other in self._members:
                rpc_sync(other, meet, args=(member.record,))
        except BaseException:
            member.bury()
            raise
        self._members[name] = member

    def exams(self, *, thorough: bool = False) -> dict[str, Exam]:
        """Look at all workers."""
        asked = [rpc_async(name, examine, args=(thorough,)) for name in self._members]
        found = wait_all(asked)
        del asked
        return {DRIVER: examine(thorough), **dict(zip(self._members, found, strict=True))}

    def leftovers(self, *, patience: float, ignored: tuple[str, ...] = ()) -> list[str]:
        """What is left although nothing runs, once that has not changed to nothing in ``patience`` seconds."""
        forget_states()
        for name in self._members:
            rpc_sync(name, forget_states)
        deadline = time.monotonic() + patience
        for pause in _pauses():
            left = []
            for name, exam in self.exams(thorough=True).items():
                counts = {what: n for what, n in exam.left.items() if what not in ignored}
                # A reference that is left may wait for its value.
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
