"""Records one backward pass of a program that ``backhaul graph`` has started: from the start of its workers on.

The command has set a variable for the workers (``pass_inbox``). Each worker opens a profile of its own when it starts.
The first worker that ends a pass with the wanted number collects its profile and leaves it in a file.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from backhaul._monitoring.pass_inbox import FAILED, PIPE, RECORDED
from backhaul._rpc.node import Node
from backhaul._runtime.observer import Sessions
from backhaul._runtime.observer_pair import IdleObserver
from backhaul.profiler.session import profile


def begin(node: Node, setting: str) -> None:
    """Record the passes that this worker drives. Called before the worker can make a call."""
    number, _, folder = setting.partition(":")
    recorder = PassRecorder(node, int(number), Path(folder))
    node.worker.observe(recorder)  # before the profile, so that a pass ends there first
    node.worker.run(recorder.start)


class PassRecorder(IdleObserver):
    """Implements ``Observer`` for one worker: counts its passes, and ends the profile after one. Thread-safe."""

    def __init__(self, node: Node, number: int, folder: Path) -> None:
        self._worker = node.worker
        self._number, self._folder = number, folder
        self._profile = profile(ops=False)
        self._lock = threading.Lock()  # guards _ended
        self._ended = 0

    def start(self) -> None:
        """Open the profile."""
        self._profile.start()

    @contextlib.contextmanager
    def drive(self, sessions: Sessions, context: int, number: int) -> Iterator[None]:
        yield
        with self._lock:
            self._ended += 1
            wanted = self._ended == self._number
        if wanted:
            self._worker.stop_observing(self)
            self._hand_over()

    def _hand_over(self) -> None:
        """Collect the profile on the thread that drove the pass, so that the program cannot end meanwhile."""
        try:
            self._profile.stop()
            ending, body = RECORDED, msgspec.msgpack.encode(self._profile.timeline, enc_hook=repr)
        except Exception as error:
            reason = f"worker '{self._worker.name}' could not collect its records: {type(error).__name__}: {error}"
            ending, body = FAILED, reason.encode()
        with contextlib.suppress(OSError):  # the command is gone
            written = self._folder / f"{self._worker.name}.part"
            written.write_bytes(body)
            written.rename(written.with_suffix(ending))
            pipe = os.open(self._folder / PIPE, os.O_WRONLY | os.O_NONBLOCK)
            os.write(pipe, b".")
            os.close(pipe)
