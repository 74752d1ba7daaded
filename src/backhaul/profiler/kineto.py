"""Torch's profiler, Kineto. A process has only one, so all profiles in the process share it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import profile

from backhaul.profiler.records import OpRecord

_Key = tuple[int, int]
_RECV_NODE_NAMES = {  # torch's names for the nodes that received tensors come from; see ``_autograd.torch_engine``
    "torch::autograd::DelayedError": "backhaul::recv",
    "torch::autograd::Error": "backhaul::RecvBackward",
}


class Kineto:
    """Runs torch's profiler while at least one profile records operations. Thread-safe.

    Example:
        >>> import torch
        >>> kineto = Kineto()
        >>> kineto.start((1, 0), shapes=False, memory=False)
        ''
        >>> _ = torch.ones(1) + 1
        >>> ops, problem = kineto.stop((1, 0))
        >>> "aten::add" in [op.name for op in ops]
        True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all other attributes
        self._running: profile | None = None
        self._options = (False, False)  # whether shapes and memory are recorded
        self._problem = ""  # why operations are missing
        self._recorded: dict[_Key, list[list[OpRecord]]] = {}  # one list for each run of torch's profiler

    def start(self, key: _Key, *, shapes: bool, memory: bool) -> str:
        """Record operations for ``key``. Returns "", or why operations cannot be recorded.

        ``shapes`` and ``memory`` add to what is recorded, also for the other keys.
        """
        with self._lock:
            options = (self._options[0] or shapes, self._options[1] or memory)
            if self._running is not None and options != self._options:
                self._stop_and_distribute()
            self._options = options
            if self._running is None:
                problem = self._start_profiler()
                if problem:
                    return problem
            self._recorded[key] = []
            return ""

    def stop(self, key: _Key) -> tuple[list[OpRecord], str]:
        """Stop recording for ``key``.

        Returns:
            All operations of the process since ``start``, and why operations are missing ("" if none are).
        """
        with self._lock:
            if key not in self._recorded:
                return [], ""
            self._stop_and_distribute()
            chunks = self._recorded.pop(key)
            problem, self._problem = self._problem, ""
            if self._recorded:
                self._problem = problem or self._start_profiler()
            else:
                self._options = (False, False)
            return [op for chunk in chunks for op in chunk], problem

    def _stop_and_distribute(self) -> None:
        """Stop torch's profiler and add the recorded operations to those of all keys."""
        ops = self._stop_profiler()
        for chunks in self._recorded.values():
            chunks.append(ops)

    def _start_profiler(self) -> str:
        if is_profiled():
            return "no operations were recorded, because another profiler was running in the process"
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        running = profile(record_shapes=self._options[0], profile_memory=self._options[1], experimental_config=config)
        try:
            with _quiet_first_start():
                running.start()
        except RuntimeError as error:
            return f"no operations were recorded, because torch.profiler could not be started: {error}"
        self._running = running
        return ""

    def _stop_profiler(self) -> list[OpRecord]:
        running, self._running = self._running, None
        if running is None:
            return []
        if not is_profiled():
            self._problem = "another profiler was started in the process, which ended the recording of operations"
        try:
            running.stop()
        except RuntimeError as error:  # up to torch 2.11, if another profiler has ended this one
            self._problem = self._problem or f"torch.profiler could not be stopped: {error}"
            return []
        return operations(running)


_was_started = False


@contextlib.contextmanager
def _quiet_first_start() -> Iterator[None]:
    """Suppress messages that Kineto prints when it is first started.

    Kineto reads its log level at that time. By default it logs every start and stop. At any log level it prints an
    error if it is first started on a thread other than the main thread, although it then works for our purposes. Up to
    torch 2.12, the first profile warns about several cycles, which our profiles do not have.
    """
    global _was_started
    if _was_started:
        yield
        return
    _was_started = True
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "6"
    sys.stderr.flush()
    with tempfile.TemporaryFile() as captured, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        stderr = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            if before is None:
                del os.environ["KINETO_LOG_LEVEL"]
            captured.seek(0)
            for line in captured:  # other threads may have printed lines, too
                if b"External init callback must run in same thread" not in line:
                    os.write(2, line)


def is_profiled() -> bool:
    """Whether a profiler of torch runs in the process, on any thread."""
    return torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


def operations(stopped: profile) -> list[OpRecord]:
    """The operations that a stopped profiler recorded. Times are those of ``time.time_ns``."""
    core = stopped.profiler
    results: Any = core.kineto_results if core is not None else None
    return [_record(event) for event in results.events()] if results is not None else []


def _record(event: Any) -> OpRecord:
    device = event.device_type().name.lower()
    name = event.name()
    for private, public in _RECV_NODE_NAMES.items():
        name = name.replace(private, public)
    start = event.start_ns()
    return OpRecord(
        name,
        event.device_resource_id(),
        start,
        start + event.duration_ns(),
        "" if device == "cpu" else f"{device}:{event.device_index()}",
        event.shapes() or None,
        event.nbytes(),
        event.is_user_annotation(),
    )


process = Kineto()
"""The profiler of this process."""
