"""Torch's profiler (Kineto), of which a process has one, shared by all profiles that look at it."""

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
_RECV = {  # what received tensors hang on, see ``autograd.native``
    "torch::autograd::DelayedError": "backhaul::recv",
    "torch::autograd::Error": "backhaul::RecvBackward",
}


class Kineto:
    """Runs while somebody holds it. Thread-safe.

    Example:
        >>> import torch
        >>> kineto = Kineto()
        >>> kineto.hold((1, 0), shapes=False, memory=False)
        ''
        >>> _ = torch.ones(1) + 1
        >>> ops, problem = kineto.take((1, 0))
        >>> "aten::add" in [op.name for op in ops]
        True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the rest
        self._running: profile | None = None
        self._options = (False, False)
        self._problem = ""  # why operations are missing
        self._held: dict[_Key, list[list[OpRecord]]] = {}

    def hold(self, key: _Key, *, shapes: bool, memory: bool) -> str:
        """Record from now on. Returns why that cannot be done, "" if it can. ``shapes`` and ``memory`` add to what is
        recorded for everybody.
        """
        with self._lock:
            options = (self._options[0] or shapes, self._options[1] or memory)
            if self._running is not None and options != self._options:
                self._share_out()
            self._options = options
            if self._running is None:
                problem = self._start()
                if problem:
                    return problem
            self._held[key] = []
            return ""

    def take(self, key: _Key) -> tuple[list[OpRecord], str]:
        """Stop recording for ``key``; return all operations of the process since it began to hold, and what kept others
        from being recorded, if anything.
        """
        with self._lock:
            if key not in self._held:
                return [], ""
            self._share_out()
            mine = self._held.pop(key)
            problem, self._problem = self._problem, ""
            if self._held:
                self._problem = problem or self._start()
            else:
                self._options = (False, False)
            return [op for chunk in mine for op in chunk], problem

    def _share_out(self) -> None:
        """Stop, and hand what was recorded to all who hold."""
        ops = self._stop()
        for chunks in self._held.values():
            chunks.append(ops)

    def _start(self) -> str:
        if is_profiled():
            return "another profiler was running in the process"
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        running = profile(record_shapes=self._options[0], profile_memory=self._options[1], experimental_config=config)
        try:
            with _hushed():
                running.start()
        except RuntimeError as error:
            return f"torch.profiler could not be started: {error}"
        self._running = running
        return ""

    def _stop(self) -> list[OpRecord]:
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


_greeted = False


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Kineto reads its log level when it is first used. By default it tells everybody that it starts and stops; and to
    be used off the main thread it calls an error whatever the level, though it does no harm to what we ask of it.
    Up to torch 2.12 every first profile warns once about several cycles, which ours do not have.
    """
    global _greeted
    if _greeted:
        yield
        return
    _greeted = True
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "6"
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            if before is None:
                del os.environ["KINETO_LOG_LEVEL"]
            said.seek(0)
            for line in said:  # of other threads, too
                if b"External init callback must run in same thread" not in line:
                    os.write(2, line)


def is_profiled() -> bool:
    """Whether a profiler of torch's runs in the process, on whatever thread."""
    return torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


def operations(stopped: profile) -> list[OpRecord]:
    """What a profiler that has stopped recorded, in the clock of ``time.time_ns``."""
    core = stopped.profiler
    results: Any = core.kineto_results if core is not None else None
    return [_record(event) for event in results.events()] if results is not None else []


def _record(event: Any) -> OpRecord:
    device = event.device_type().name.lower()
    name = event.name()
    for private, public in _RECV.items():
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
"""The one of this process."""
