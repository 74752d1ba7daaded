"""Workers as processes of this machine: start them, run a function in each, bring back results or the first failure."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing as mp
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import pickle
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from backhaul._launch.embedded import worker_names
from backhaul._launch.pipe_store import PipeStore, Table
from backhaul._rpc.api import init, shutdown
from backhaul._rpc.arguments import keywords, positional
from backhaul._rpc.cluster.rendezvous import SECRET_VARIABLE, TLS_VARIABLE
from backhaul._runtime import interrupts
from backhaul._transport.sockets.certificates import make_certificates
from backhaul._types import Options
from backhaul._wire.codec import decode, encode
from backhaul._wire.faults import decode_fault, encode_fault
from backhaul._wire.messages import Fault, Payload
from backhaul.errors import WorkerFailedError

_GRACE = 3.0  # seconds between asking a process to end and ending it
_ANY_TIME = 1e9  # seconds; those who are done serve the others for as long as these take, which ``timeout`` may limit
_AFTERMATH = 0.5  # seconds to collect further failures, to tell cause from consequence


@dataclasses.dataclass(frozen=True, slots=True)
class _ProcessOutcome:
    """What a worker process reports: its result, or its failure."""

    at: float
    body: Payload | Fault
    buffers: list[bytes]


def launch(
    function: Callable[..., Any],
    workers: int | Sequence[str],
    *,
    args: tuple[Any, ...] | list[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Options | None = None,
    timeout: float | None = None,
    start_method: Literal["spawn", "forkserver"] = "spawn",
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` in each of several new worker processes; return the results by rank.

    Each process is a worker of one cluster when ``function`` starts, and shuts down gracefully when it has returned, so
    a worker that has nothing to do itself may simply return and serve the others. If one fails, all are ended,
    and the first failure is raised here with its remote traceback. Once this returns or raises, no process is left.

    As with any spawned process, a script that calls this must do so under ``if __name__ == "__main__":``. In a notebook
    functions of cells travel by value, so those that keep state in globals have to be put into a module.

    Args:
        function: Runs in every worker; ``get_worker_info()`` says which one.
        workers: How many (``worker0``, ``worker1``, ...), or their names.
        args: Positional arguments for all, a tuple or a list.
        kwargs: Keyword arguments for all, a dict.
        options: For all workers.
        timeout: End everything with ``TimeoutError`` after so many seconds.
        start_method: ``forkserver`` starts many workers much faster: they share one import of torch.

    Raises:
        Exception: What ``function`` raised first, on any worker.
        WorkerFailedError: A process ended without a result.
    """
    names = worker_names(workers)
    context = mp.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["__main__", "backhaul"])
    job = _dump((function, positional(args), keywords(kwargs), options))
    # Workers meet over their pipes; this one is for programs that use torch.distributed as well.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours; no worker should open one
        "WORLD_SIZE": str(len(names)),
        SECRET_VARIABLE: secrets.token_hex(32),
    }
    crowd = _WorkerProcesses(names)
    with contextlib.ExitStack() as stack:
        if options is not None and options.tls == "auto":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="backhaul-tls-"))
            make_certificates(Path(folder), names)
            environment[TLS_VARIABLE] = folder
        try:
            with _real_main_file():
                for rank, name in enumerate(names):
                    crowd.start(context, rank, (job, name, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
            return crowd.results(None if timeout is None else time.monotonic() + timeout)
        finally:
            crowd.end()
            del store  # an error keeps this frame, which should not keep the server


def _has_main_file() -> bool:
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is not None and os.path.exists(path)


@contextlib.contextmanager
def _real_main_file() -> Iterator[None]:
    """A program that was read from the standard input says that its file is ``<stdin>``, and new processes would look
    for that.
    """
    main = sys.modules["__main__"]
    if _has_main_file() or not hasattr(main, "__file__"):
        yield
        return
    path = main.__file__
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


def _dump(value: Any) -> bytes:
    if _has_main_file():
        try:
            return pickle.dumps(value)
        except Exception:  # a lambda or a closure: by value, or cloudpickle says why not
            return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    return cloudpickle.dumps(value)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal. A new one must not see it, not even while it imports: it inherits
    that the signal is blocked. Another thread of this one may take it all the same, and then it is raised afterwards:
    what is started must not be left half started.
    """
    handler, came = signal.getsignal(signal.SIGINT), []
    here = callable(handler) and threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        if here:
            signal.signal(signal.SIGINT, lambda *_: came.append(True))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        if here:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if came:
            signal.raise_signal(signal.SIGINT)


_NO_GRADIENT = (
    "this graph reaches back to a result of backhaul.launch, which carries no gradient; compute gradients inside the "
    "launched function, or detach() the result"
)


class _WorkerProcesses:
    """The processes of one launch, as their parent sees them. Used by one thread."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._processes: list[BaseProcess] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._table = Table()

    def start(self, context: Any, rank: int, job: tuple[Any, ...]) -> None:
        ours, theirs = context.Pipe()
        self._pipes.append(ours)
        process = context.Process(target=_work, args=(*job, theirs), name=f"backhaul-{self._names[rank]}")
        multiprocessing.resource_tracker.ensure_running()  # first: starting it would let interrupts through
        with _uninterrupted():
            try:
                process.start()
            finally:
                theirs.close()
            self._processes.append(process)

    def results(self, deadline: float | None) -> list[Any]:
        """Wait for all; raise the first failure as soon as there is one."""
        outcomes: dict[int, _ProcessOutcome] = {}
        dead: dict[int, float] = {}
        while len(outcomes) + len(dead) < len(self._names):
            if not self._collect(outcomes, dead, deadline):
                missing = [n for r, n in enumerate(self._names) if r not in outcomes]
                raise TimeoutError(f"launch timed out; still at work: {', '.join(missing)}")
            if dead or any(isinstance(outcome.body, Fault) for outcome in outcomes.values()):
                until = time.monotonic() + _AFTERMATH
                while self._collect(outcomes, dead, until):
                    pass
                raise self._first_failure(outcomes, dead)
        return [self._read(outcomes[rank]) for rank in range(len(self._names))]

    def _collect(self, outcomes: dict[int, _ProcessOutcome], dead: dict[int, float], deadline: float | None) -> bool:
        """Wait for news of any process that still owes an outcome; False if there was none before the deadline."""
        owing = [r for r in range(len(self._names)) if r not in outcomes and r not in dead]
        if not owing:
            return False
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        ready = _wait([self._pipes[rank] for rank in owing], left)
        for rank in owing:
            if self._pipes[rank] in ready:
                try:
                    message = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    dead[rank] = time.monotonic()
                    continue
                if isinstance(message, _ProcessOutcome):
                    outcomes[rank] = message
                else:
                    self._table.serve(self._pipes[rank], message)
        return bool(ready)

    def _first_failure(self, outcomes: dict[int, _ProcessOutcome], dead: dict[int, float]) -> BaseException:
        faults = sorted((outcome.at, rank) for rank, outcome in outcomes.items() if isinstance(outcome.body, Fault))
        if faults and not dead:  # a death comes before what follows from it
            outcome = outcomes[faults[0][1]]
            assert isinstance(outcome.body, Fault)
            return decode_fault(outcome.body, [bytearray(b) for b in outcome.buffers])
        rank = min(dead, key=lambda r: dead[r])
        process = self._processes[rank]
        process.join(_GRACE)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        name = self._names[rank]
        return WorkerFailedError(f"worker '{name}' {how} before it had a result", worker=name, exitcode=code)

    def _read(self, outcome: _ProcessOutcome) -> Any:
        assert isinstance(outcome.body, Payload)
        (result,) = decode(outcome.body, [bytearray(buffer) for buffer in outcome.buffers], why=_NO_GRADIENT)
        return result

    def end(self) -> None:
        """See to it that no process is left, whatever else the user types; that takes some seconds at most."""
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        try:
            self._end()
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)

    def _end(self) -> None:
        for pipe in self._pipes:
            if not pipe.closed:
                pipe.close()
        waiting = time.monotonic() + (0.0 if sys.exc_info()[0] else _GRACE)
        for process in self._processes:
            process.join(max(waiting - time.monotonic(), 0.0))
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        killing = time.monotonic() + _GRACE
        for process in self._processes:
            process.join(max(killing - time.monotonic(), 0.0))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


@interrupts.waits
def _wait(pipes: list[multiprocessing.connection.Connection], timeout: float | None) -> list[Any]:
    return multiprocessing.connection.wait(pipes, timeout)


@interrupts.calls_out
def _work(job: bytes, name: str, environment: dict[str, str], pipe: multiprocessing.connection.Connection) -> None:
    """What a worker process does."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # it was blocked until now
    _follow_parent()
    world_size = int(environment["WORLD_SIZE"])
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    try:
        function, args, kwargs, options = pickle.loads(job)
        store = PipeStore(pipe) if options is None or options.init_method is None else None
        init(name, rank=int(environment["RANK"]), world_size=world_size, store=store, options=options)
        result = function(*args, **kwargs)
        shutdown(timeout=_ANY_TIME)
        encoded = encode([result], names=[f"the result of worker '{name}'"])
        outcome = _ProcessOutcome(time.monotonic(), encoded.payload, [bytes(b) for b in encoded.buffers])
        pipe.send_bytes(pickle.dumps(outcome))
    except BaseException as error:
        at = time.monotonic()
        fault, carried = encode_fault(error, name)
        buffers = [bytes(b) for b in carried.buffers] if carried is not None else []
        try:
            pipe.send_bytes(pickle.dumps(_ProcessOutcome(at, fault, buffers)))
        except OSError:  # the parent has heard enough
            pass
        shutdown(graceful=False, timeout=1.0)
        sys.exit(1)


def _follow_parent() -> None:
    """End this process when its parent is gone, however that ended."""
    parent = mp.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="backhaul-parent", daemon=True).start()
