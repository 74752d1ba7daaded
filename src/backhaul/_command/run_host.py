"""Runs the workers of one host for ``backhaul run``, as a process of its own: on this host, or started there by ssh.

It reads orders from its standard input, one JSON value a line: first the workers, then ``"terminate"`` and ``"kill"``.
It writes what happens to its standard output: ``["line", rank, is_error, text]``, ``["end", rank, status]``. If its
input ends, the command is gone, and so the workers are ended. The secret comes by the input, so no list of processes
shows it.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from backhaul._command.run_progress import TERMINATE_SECONDS, Order

_MAX_LINE_BYTES = 1 << 16  # a longer line is passed on in parts
_READ_BYTES = 1 << 16
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


@dataclass(slots=True)
class LinePipe:
    """One output of a worker: its pipe, and the bytes that came since the last line break."""

    rank: int
    is_error: bool
    descriptor: int
    rest: bytes = b""

    def take(self, data: bytes) -> list[str]:
        """Whole lines. A progress bar prints a line many times, with carriage returns; the last one counts."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _MAX_LINE_BYTES:
            lines, self.rest = [*lines, self.rest], b""
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]


class HostProcesses:
    """The workers of one host. Used by one thread.

    Attributes:
        lost: Whether the input has ended, so nobody reads what happens.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pipes: list[LinePipe] = []
        self._input = b""
        self._kill_at: float | None = None
        self.lost = False
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Until all workers have ended."""
        started = False
        while not started or self._processes:
            limit = None if self._kill_at is None else max(self._kill_at - time.monotonic(), 0.0)
            for key, _ in self._selector.select(limit):
                if key.data is None:
                    for order in self._read_orders():
                        started = True
                        self._obey(order)
                    started |= self.lost
                elif isinstance(key.data, LinePipe):
                    self._read_lines(key.data)
                else:
                    self._end(key.data, key.fd)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = None
                self._signal(signal.SIGKILL)

    def _read_orders(self) -> list[Any]:
        data = os.read(0, _READ_BYTES)
        if not data:
            self._selector.unregister(0)
            self.lost = True
            self._signal(signal.SIGTERM)
            self._kill_at = time.monotonic() + TERMINATE_SECONDS
            return []
        *lines, self._input = (self._input + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _obey(self, order: Any) -> None:
        if order == Order.TERMINATE.value:
            self._signal(signal.SIGTERM)
        elif order == Order.KILL.value:
            self._signal(signal.SIGKILL)
        else:
            # Threads of torch that share processors slow each other down.
            threads = max(1, len(os.sched_getaffinity(0)) // len(order["workers"]))
            for rank, environment in order["workers"]:
                self._start(rank, order["command"], {"OMP_NUM_THREADS": str(threads), **os.environ, **environment})

    def _start(self, rank: int, command: list[str], environment: dict[str, str]) -> None:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # its process group is ended as a whole
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (there is one thread)
            )
        except OSError as error:
            self._say("line", rank, True, f"cannot start {command[0]}: {error}")
            self._say("end", rank, 127)
            return
        self._processes[rank] = process
        for pipe, is_error in ((process.stdout, False), (process.stderr, True)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            lines = LinePipe(rank, is_error, pipe.fileno())
            self._pipes.append(lines)
            self._selector.register(lines.descriptor, selectors.EVENT_READ, lines)
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, rank)

    def _read_lines(self, pipe: LinePipe) -> bool:
        """Pass on what has come. False: nothing more comes now, or ever."""
        try:
            data = os.read(pipe.descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        for line in pipe.take(data):
            self._say("line", pipe.rank, pipe.is_error, line)
        if not data and pipe in self._pipes:
            if pipe.rest:
                self._say("line", pipe.rank, pipe.is_error, *pipe.take(b"\n"))
            self._pipes.remove(pipe)
            self._selector.unregister(pipe.descriptor)
        return bool(data)

    def _end(self, rank: int, descriptor: int) -> None:
        """A worker has ended. First its last lines. A process that it has left may hold the pipes, so they may not end;
        all of its process group is killed.
        """
        self._selector.unregister(descriptor)
        os.close(descriptor)
        process = self._processes.pop(rank)
        _signal_group(process.pid, signal.SIGKILL)  # before the id is free again
        status = process.wait()
        for pipe in [each for each in self._pipes if each.rank == rank]:
            while self._read_lines(pipe):
                pass
            if pipe in self._pipes:
                self._selector.unregister(pipe.descriptor)
                self._pipes.remove(pipe)
        for file in (process.stdout, process.stderr):
            assert file is not None
            file.close()
        self._say("end", rank, status)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            _signal_group(process.pid, number)

    def _say(self, *event: Any) -> None:
        if not self.lost:
            try:
                print(json.dumps(event), flush=True)
            except OSError:  # the command is gone; the end of the input says so
                pass


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def _die_with_parent() -> None:
    """In a new worker: the kernel kills it if this process is killed."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))


def main() -> None:
    """Run the workers until they have ended. Ctrl-C and hangups reach the command, which decides."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # workers would inherit SIG_IGN
    HostProcesses().run()


if __name__ == "__main__":
    main()
