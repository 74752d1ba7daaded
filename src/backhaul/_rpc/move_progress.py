"""Tells the user how far a long move of tensors has come: one line on the terminal, which goes away with the move.

It reads counters that channels keep anyway. Where the standard error is no terminal, a move costs one look at it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TextIO

from backhaul._rpc.node import Node
from backhaul._worker.worker import current_worker

VARIABLE = "BACKHAUL_PROGRESS"
"""``0`` in this variable of the environment: no move is shown."""

SHOWN_AFTER_SECONDS = 1.0
_STEP_SECONDS = 0.2  # between two looks
_CLEAR_LINE = "\r\033[K"
_MAX_NAMES = 4  # of workers in a line
_LEAST_BYTES = 100_000  # that are shown


@contextlib.contextmanager
def shown_move(what: str, workers: Sequence[str], nbytes: int = 0) -> Iterator[None]:
    """Show a move on the terminal while the block runs, if it takes longer than a second.

    A move that begins within a second after the one before, with the same ``what``, goes on with its line: a state is
    loaded module by module.

    Args:
        what: What is done, as in ``"moving 3 modules to"``. The names of the workers follow.
        workers: The workers to or from which tensors move; none: nothing is shown.
        nbytes: How many bytes the move has; 0: that is not known.
    """
    if not workers or not is_wanted(sys.stderr, os.environ) or not _one_at_a_time.acquire(blocking=False):
        yield
        return
    try:
        with _MoveLine(sys.stderr, what, workers, nbytes):
            yield
    finally:
        _one_at_a_time.release()


def is_wanted(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether moves are shown: on a terminal that can clear a line, unless the user has turned it off.

    Example:
        >>> import io
        >>> is_wanted(io.StringIO(), {})  # a log
        False
    """
    if environ.get(VARIABLE) == "0" or environ.get("TERM", "dumb") == "dumb":
        return False
    return stream is not None and not stream.closed and stream.isatty()


def describe(what: str, workers: Sequence[str], moved: int, nbytes: int, seconds: float) -> str:
    """The line.

    Example:
        >>> describe("moving 2 modules to", ["w1", "w2"], 1_300_000_000, 4_200_000_000, 6.2)
        'backhaul: moving 2 modules to w1, w2: 1.3 GB of 4.2 GB, 6 s'
        >>> describe("saving state of", ["w1"], 0, 0, 1.0)
        'backhaul: saving state of w1: 1 s'
    """
    names = ", ".join(workers[:_MAX_NAMES])
    if len(workers) > _MAX_NAMES:
        names += f" and {len(workers) - _MAX_NAMES} more"
    bytes_text = f"{_size(moved)}, " if moved >= _LEAST_BYTES else ""
    if nbytes >= _LEAST_BYTES:  # headers are not in the sum, so a little more may have moved at the end
        bytes_text = f"{_size(min(moved, nbytes))} of {_size(nbytes)}, "
    return f"backhaul: {what} {names}: {bytes_text}{seconds:.0f} s"


def _size(nbytes: int) -> str:
    value, unit = (nbytes / 1e9, "GB") if nbytes >= 1e9 else (nbytes / 1e6, "MB")
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


_one_at_a_time = threading.Lock()  # held while a move has the line
_last: tuple[str, float, float, int] = "", 0.0, 0.0, 0
"""Of the move before: what it was, when its line began and ended, and how many bytes had moved. Guarded by the lock."""


class _MoveLine:
    """The line of one move. A thread of its own writes it."""

    def __init__(self, stream: TextIO, what: str, workers: Sequence[str], nbytes: int) -> None:
        self._stream, self._what, self._workers, self._nbytes = stream, what, workers, nbytes
        self._peers = current_worker().part(Node).peers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backhaul-progress", daemon=True)
        now = time.monotonic()
        before, began, ended, moved = _last
        continues = before == what and now - ended < SHOWN_AFTER_SECONDS
        self._began, self._moved_before = (began, moved) if continues else (now, 0)
        self._at_first = self._count()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clear the line."""
        global _last
        self._over.set()
        self._thread.join()
        _last = self._what, self._began, time.monotonic(), self._moved()

    def _run(self) -> None:
        shown = False
        left = self._began + SHOWN_AFTER_SECONDS - time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            while not self._over.wait(max(left, 0.0)):
                text = describe(self._what, self._workers, self._moved(), self._nbytes, time.monotonic() - self._began)
                columns = shutil.get_terminal_size().columns
                self._stream.write(f"{_CLEAR_LINE}{text[: columns - 1]}")
                self._stream.flush()
                shown, left = True, _STEP_SECONDS
            if shown:
                self._stream.write(_CLEAR_LINE)
                self._stream.flush()

    def _moved(self) -> int:
        return self._moved_before + max(self._count() - self._at_first, 0)

    def _count(self) -> int:
        """The bytes that went to these workers and came from them. One direction has nearly all."""
        channels = [peer.channel for peer in self._peers if peer.info.name in self._workers]
        return sum(each.bytes_sent - each.backlog + (each.bytes_received or 0) for each in channels if each is not None)
