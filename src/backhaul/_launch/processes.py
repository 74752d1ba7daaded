"""Workers as processes of this machine: starts them, runs a function in each, and returns results or raises the first
failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing as mp
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import pickle
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, Literal, TypeVar, TypeVarTuple, overload

import cloudpickle
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from backhaul._launch.embedded import worker_names
from backhaul._launch.pipe_store import PipeStore, Table
from backhaul._options import Options, Tls
from backhaul._rpc.api import init
from backhaul._rpc.arguments import keywords, positional
from backhaul._rpc.cluster.own_endpoint import SECRET_VARIABLE
from backhaul._rpc.ending import shutdown
from backhaul._runtime import interrupts
from backhaul._transport.sockets.certificates import issue
from backhaul._wire.codec import decode, encode
from backhaul._wire.faults import decode_fault, encode_fault
from backhaul._wire.messages import Fault, Payload
from backhaul.errors import WorkerFailedError, WorkersLostError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = logging.getLogger("backhaul")

_NOTICE_SECONDS = 5.0  # after which the parent logs which workers have not started; each further wait is twice as long
_TERMINATE_SECONDS = 3.0  # between asking a process to end and killing it
_SERVE_SECONDS = 1e9  # workers that are done serve the others for as long as those take; ``timeout`` may limit that
_TORCHRUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")
_MORE_FAILURES_SECONDS = 0.5  # to collect further failures after the first, and to tell cause from consequence


@dataclasses.dataclass(frozen=True, slots=True)
class _ProcessOutcome:
    """What a worker process reports: its result or its failure, and when it ended."""

    at: float
    body: Payload | Fault
    buffers: list[bytes]


# fmt: off
@overload
def launch(function: Callable[..., T], workers: int | Sequence[str], *, args: list[Any],
           kwargs: Mapping[str, Any] | None = ..., options: Options | None = ..., timeout: float | None = ...,
           start_method: Literal["spawn", "forkserver"] = ..., torchrun_variables: bool = ...) -> list[T]: ...
@overload
def launch(function: Callable[[*Ts], T], workers: int | Sequence[str], *, args: tuple[*Ts],
           kwargs: None = ..., options: Options | None = ..., timeout: float | None = ...,
           start_method: Literal["spawn", "forkserver"] = ..., torchrun_variables: bool = ...) -> list[T]: ...
@overload
def launch(function: Callable[[], T], workers: int | Sequence[str], *, args: tuple[()] = ...,
           kwargs: None = ..., options: Options | None = ..., timeout: float | None = ...,
           start_method: Literal["spawn", "forkserver"] = ..., torchrun_variables: bool = ...) -> list[T]: ...
@overload
def launch(function: Callable[..., T], workers: int | Sequence[str], *, args: tuple[Any, ...] = ...,
           kwargs: Mapping[str, Any], options: Options | None = ..., timeout: float | None = ...,
           start_method: Literal["spawn", "forkserver"] = ..., torchrun_variables: bool = ...) -> list[T]: ...
# fmt: on


def launch(
    function: Callable[..., Any],
    workers: int | Sequence[str],
    *,
    args: tuple[Any, ...] | list[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Options | None = None,
    timeout: float | None = None,
    start_method: Literal["spawn", "forkserver"] = "spawn",
    torchrun_variables: bool = True,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` in each of several new worker processes; return the results by rank.

    Each process is a worker of one cluster when ``function`` starts, and shuts down gracefully when it has returned. So
    a worker that has nothing to do itself may simply return: it then serves the others. If one worker fails, all are
    ended, and the first failure is raised here with its remote traceback. Once this returns or raises, no process is
    left.

    As with any spawned process, a script must call this under ``if __name__ == "__main__":``. In a notebook, functions
    of cells are sent by value, so functions that keep state in globals have to be put into a module.

    Args:
        function: Runs in every worker; ``get_worker_info()`` says which worker it runs in.
        workers: The number of workers (``worker0``, ``worker1``, ...), or their names.
        args: Positional arguments for all workers, a tuple or a list.
        kwargs: Keyword arguments for all workers, a dict.
        options: The options of all workers. With ``Security(tls="auto", trusted=False)`` each worker gets a certificate
            that proves its name, and no worker can make one.
        timeout: After this many seconds, end all processes and raise ``TimeoutError``.
        start_method: ``forkserver`` starts many workers much faster: they share one import of torch.
        torchrun_variables: Whether each process gets the environment variables that torchrun sets (``RANK``,
            ``WORLD_SIZE``, ``MASTER_ADDR`` and so on), for programs that also use ``torch.distributed``. Give False if
            one worker trains with accelerate, Lightning or the HF Trainer. From these variables they start a process
            group of all workers, and wait for the others.

    Raises:
        Exception: What ``function`` raised first, on any worker.
        WorkerFailedError: A process ended without a result.

    Example:
        >>> import operator, backhaul as bh
        >>> bh.launch(operator.add, workers=2, args=(1, 2), start_method="forkserver")  # doctest: +SKIP
        [3, 3]
    """
    names = worker_names(workers)
    context = mp.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["__main__", "backhaul._public"])
    job = _dump((function, positional(args), keywords(kwargs), options))
    # Workers meet over their pipes; this store is for programs that also use torch.distributed.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process serves the store; no worker should open one
        "WORLD_SIZE": str(len(names)),
    }
    if not torchrun_variables:
        environment.clear()
    environment[SECRET_VARIABLE] = secrets.token_hex(32)
    # Every worker knows the secret, and could make a certificate of any name from it. So workers that do not trust each
    # other get certificates of another authority, whose key stays here.
    untrusted = options is not None and options.security.tls == "auto" and not options.security.trusted
    authority = secrets.token_bytes(32) if untrusted else None
    processes = _WorkerProcesses(names)
    try:
        with _real_main_file():
            for rank, name in enumerate(names):
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if torchrun_variables else {}
                tls = None if authority is None else _certificate(authority, name)
                processes.start(context, rank, (job, name, rank, len(names), {**environment, **ranks}, tls))
        return processes.results(None if timeout is None else time.monotonic() + timeout)
    finally:
        processes.end()
        del store  # an error keeps this frame alive, and the frame must not keep the server alive


def _certificate(authority: bytes, name: str) -> Tls:
    """A new certificate for one worker."""
    made = issue(authority, name)
    return Tls(certificate=made.certificate, key=made.key, authority=made.authority)


def _has_main_file() -> bool:
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path is not None and os.path.exists(path)


@contextlib.contextmanager
def _real_main_file() -> Iterator[None]:
    """Hide the file name ``<stdin>`` of a program that was read from the standard input: new processes would look for
    that file.
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
        except Exception:  # a lambda or a closure: cloudpickle sends it by value, or says why it cannot
            return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    return cloudpickle.dumps(value)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block SIGINT while a process is started. Ctrl-C goes to all processes of a terminal. A new process must not see
    it, not even while it imports, so it inherits the blocked signal. Another thread of this process may still receive
    the signal; then it is raised afterwards, so that no process is left half started.
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
        self._silent = set(range(len(names)))  # the ranks of processes that have not reached ``init``

    def start(self, context: Any, rank: int, job: tuple[Any, ...]) -> None:
        ours, theirs = context.Pipe()
        self._pipes.append(ours)
        process = context.Process(target=_work, args=(*job, theirs), name=f"backhaul-{self._names[rank]}")
        multiprocessing.resource_tracker.ensure_running()  # now: starting the tracker later would unblock SIGINT
        with _uninterrupted():
            try:
                process.start()
            finally:
                theirs.close()
            self._processes.append(process)

    def results(self, deadline: float | None) -> list[Any]:
        """Wait for all results; raise the first failure as soon as there is one."""
        outcomes: dict[int, _ProcessOutcome] = {}
        dead: dict[int, float] = {}
        pause = _NOTICE_SECONDS
        notice = time.monotonic() + pause
        while len(outcomes) + len(dead) < len(self._names):
            until = notice if self._silent and (deadline is None or notice < deadline) else deadline
            if not self._collect(outcomes, dead, until):
                if until is not deadline:
                    log.warning(
                        "waits for workers to start: %s", ", ".join(self._names[r] for r in sorted(self._silent))
                    )
                    pause *= 2
                    notice = time.monotonic() + pause
                    continue
                missing = [n for r, n in enumerate(self._names) if r not in outcomes]
                raise TimeoutError(f"launch timed out; still at work: {', '.join(missing)}")
            if dead or any(isinstance(outcome.body, Fault) for outcome in outcomes.values()):
                until = time.monotonic() + _MORE_FAILURES_SECONDS
                while self._collect(outcomes, dead, until):
                    pass
                raise self._first_failure(outcomes, dead)
        return [self._read(outcomes[rank]) for rank in range(len(self._names))]

    def _collect(self, outcomes: dict[int, _ProcessOutcome], dead: dict[int, float], deadline: float | None) -> bool:
        """Wait for a message of any process that has no outcome yet. False: none came before the deadline."""
        waiting_for = [r for r in range(len(self._names)) if r not in outcomes and r not in dead]
        if not waiting_for:
            return False
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        ready = _wait([self._pipes[rank] for rank in waiting_for], left)
        for rank in waiting_for:
            if self._pipes[rank] in ready:
                try:
                    message = pickle.loads(self._pipes[rank].recv_bytes())
                    self._silent.discard(rank)
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
        if faults and not dead:  # a process that died is the cause of the other failures
            outcome = outcomes[faults[0][1]]
            assert isinstance(outcome.body, Fault)
            return decode_fault(outcome.body, [bytearray(b) for b in outcome.buffers])
        rank = min(dead, key=lambda r: dead[r])
        process = self._processes[rank]
        process.join(_TERMINATE_SECONDS)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        name = self._names[rank]
        return WorkerFailedError(f"worker '{name}' {how} before it had a result", worker=name, exitcode=code)

    def _read(self, outcome: _ProcessOutcome) -> Any:
        assert isinstance(outcome.body, Payload)
        (result,) = decode(outcome.body, [bytearray(buffer) for buffer in outcome.buffers], why=_NO_GRADIENT)
        return result

    def end(self) -> None:
        """End all processes, even if the user presses Ctrl-C again. Takes some seconds at most."""
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
        waiting = time.monotonic() + (0.0 if sys.exc_info()[0] else _TERMINATE_SECONDS)
        for process in self._processes:
            process.join(max(waiting - time.monotonic(), 0.0))
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        killing = time.monotonic() + _TERMINATE_SECONDS
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
def _work(  # noqa: PLR0917 (given by position)
    job: bytes,
    name: str,
    rank: int,
    world_size: int,
    environment: dict[str, str],
    tls: Tls | None,
    pipe: multiprocessing.connection.Connection,
) -> None:
    """What a worker process does."""
    for variable in _TORCHRUN_VARIABLES:
        os.environ.pop(variable, None)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by _uninterrupted until now
    _follow_parent()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    try:
        function, args, kwargs, options = pickle.loads(job)
        if tls is not None:
            options = dataclasses.replace(options, security=dataclasses.replace(options.security, tls=tls))
        store = PipeStore(pipe) if options is None or options.init_method is None else None
        init(name, rank=rank, world_size=world_size, store=store, options=options)
        result = function(*args, **kwargs)
        with contextlib.suppress(WorkersLostError):  # the parent knows which process has ended
            shutdown(timeout=_SERVE_SECONDS)
        encoded = encode([result], names=[f"the result of worker '{name}'"])
        outcome = _ProcessOutcome(time.monotonic(), encoded.payload, [bytes(b) for b in encoded.buffers])
        pipe.send_bytes(pickle.dumps(outcome))
    except BaseException as error:
        at = time.monotonic()
        fault, carried = encode_fault(error, name)
        buffers = [bytes(b) for b in carried.buffers] if carried is not None else []
        try:
            pipe.send_bytes(pickle.dumps(_ProcessOutcome(at, fault, buffers)))
        except OSError:  # the parent has closed the pipe after another failure
            pass
        shutdown(graceful=False, timeout=1.0)
        sys.exit(1)


def _follow_parent() -> None:
    """End this process when its parent is gone, however the parent ended."""
    parent = mp.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="backhaul-parent", daemon=True).start()
