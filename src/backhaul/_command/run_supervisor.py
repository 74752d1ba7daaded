"""Starts the hosts of ``backhaul run``, prints what their workers print, and carries out the orders of
``run_progress``. Knows processes, pipes and signals.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from backhaul._command.run_progress import KILL_SECONDS, TERMINATE_SECONDS, Order, RunProgress

_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # of names, by rank
_READ_BYTES = 1 << 16
_ENOUGH = "enough"  # what the selector has for that descriptor
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class RunningHost:
    """One host: the process that runs its workers, and what it has not yet said to the end.

    Attributes:
        name: The name of the host.
        process: The process there, or the ssh that leads to it.
        ranks: The workers of the host.
        rest: By descriptor, the bytes since the last line break.
        said: What it wrote that is no event: why ssh failed, for example.
    """

    name: str
    process: subprocess.Popen[bytes]
    ranks: list[int]
    rest: dict[int, bytes] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


class LinePrinter:
    """Prints whole lines with the name of the worker in front, in color where the output is a terminal.

    Args:
        names: The names of the workers.
        only_errors: Print all lines to the standard error.
    """

    def __init__(self, names: Sequence[str], *, only_errors: bool = False) -> None:
        self._streams = (sys.stderr if only_errors else sys.stdout, sys.stderr)
        width = max(map(len, names))
        self._plain = [f"{name:<{width}} | " for name in names]
        self._colored = [f"\033[{_COLORS[rank % len(_COLORS)]}m{text}\033[0m" for rank, text in enumerate(self._plain)]
        self._has_color = [
            stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
            for stream in self._streams
        ]

    def print(self, rank: int, text: str, *, is_error: bool) -> None:
        """One write for each line, so that lines of the two streams do not mix either."""
        prefix = (self._colored if self._has_color[is_error] else self._plain)[rank]
        stream = self._streams[is_error]
        try:
            stream.write(f"{prefix}{text}\n")
            stream.flush()
        except BrokenPipeError:  # the reader has enough; the workers go on
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Supervisor:
    """One run. Used by one thread.

    Args:
        names: The names of the workers.
        enough: A descriptor. Once it can be read, the workers are ended, which is no failure. The standard output is
            then not for what they print.

    Attributes:
        progress: What has happened.
        unanswered: The hosts that did not confirm that their workers have ended.
    """

    def __init__(self, names: Sequence[str], enough: int | None = None) -> None:
        self.progress = RunProgress(names)
        self.unanswered: list[str] = []
        self._printer = LinePrinter(names, only_errors=enough is not None)
        self._hosts: list[RunningHost] = []
        self._selector = selectors.DefaultSelector()
        if enough is not None:
            self._selector.register(enough, selectors.EVENT_READ, _ENOUGH)

    def start(self, name: str, command: list[str], job: dict[str, Any]) -> None:
        """Start a host: the process in which ``run_host`` runs, and what it shall do."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this process only
        )
        host = RunningHost(name, process, [rank for rank, _ in job["workers"]])
        self._hosts.append(host)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            host.rest[pipe.fileno()] = b""
            self._selector.register(pipe.fileno(), selectors.EVENT_READ, host)
        self._tell(host, job)

    def run(self) -> None:
        """Until all workers have ended, or their hosts do not answer."""
        while not self.progress.done:
            wake_at = self.progress.wake_at
            limit = None if wake_at is None else max(wake_at - time.monotonic(), 0.0)
            for key, _ in self._selector.select(limit):
                if key.data is None:
                    for number in os.read(key.fd, _READ_BYTES):
                        if number in _SIGNALS:
                            self._order(self.progress.on_signal(signal.Signals(number), time.monotonic()))
                elif key.data is _ENOUGH:
                    self._selector.unregister(key.fd)
                    self._order(self.progress.on_enough(time.monotonic()))
                else:
                    self._read(key.data, key.fd)
            self._order(self.progress.on_time(time.monotonic()))

    def close(self) -> None:
        """End the processes that run the hosts. Their workers have ended; else the end of the input ends them."""
        for host in self._hosts:
            for pipe in (host.process.stdin, host.process.stdout, host.process.stderr):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            if host.name in self.unanswered:
                host.process.kill()
            try:
                host.process.wait(TERMINATE_SECONDS + KILL_SECONDS)
            except subprocess.TimeoutExpired:
                host.process.kill()
                host.process.wait()
        self._selector.close()

    @contextlib.contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Signals end the workers, and not this process. They become bytes in a pipe, which ``run`` waits for."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before_wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        self._selector.register(reading, selectors.EVENT_READ, None)
        try:
            yield
        finally:
            self._selector.unregister(reading)
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_wakeup)
            os.close(reading)
            os.close(writing)

    def _read(self, host: RunningHost, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        *lines, host.rest[descriptor] = (host.rest[descriptor] + data).split(b"\n")
        for line in lines:
            self._take(host, line)
        if not data:
            self._selector.unregister(descriptor)
            if host.rest.pop(descriptor):
                self._take(host, b"")
            if not host.rest:
                self._lose(host)

    def _take(self, host: RunningHost, line: bytes) -> None:
        """An event; or something else, such as the greeting of a shell, or an error of ssh."""
        now = time.monotonic()
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        match event:
            case ["line", int() as rank, bool() as is_error, str() as text]:
                self.progress.on_line(rank, text, is_error=is_error, now=now)
                self._printer.print(rank, text, is_error=is_error)
            case ["end", int() as rank, int() as status]:
                self.progress.on_end(rank, status, now)
            case _:
                host.said.append(line.decode(errors="replace").rstrip())

    def _lose(self, host: RunningHost) -> None:
        """The process of a host has ended. Workers of which it has not said so are lost."""
        status = host.process.poll()
        how = f" with status {status}" if status else ""
        said = host.said or [f"what runs its workers has ended{how}; they are ended, too"]
        for rank in host.ranks:
            self.progress.on_host_lost(rank, [f"{host.name}: {line}" for line in said], time.monotonic())

    def _order(self, order: Order | None) -> None:
        if order is None:
            return
        for host in self._hosts:
            if order is Order.GIVE_UP:
                left = [rank for rank in host.ranks if self.progress.workers[rank].status is None]
                if left:
                    self.unanswered.append(host.name)
                for rank in left:
                    self.progress.on_host_lost(rank, [f"{host.name} did not answer"], time.monotonic())
            else:
                self._tell(host, order.value)

    @staticmethod
    def _tell(host: RunningHost, message: Any) -> None:
        assert host.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its output says so
            host.process.stdin.write(json.dumps(message).encode() + b"\n")
            host.process.stdin.flush()
