"""Sets the flags of processes that have ended, from a process of its own.

A stream may wait for a flag that another process is to set, see ``segments``. If that process is killed somebody else
has to, and no thread of this process can be counted on: torch keeps the interpreter's lock while it waits for a device,
be it to load a kernel or to queue one more than fit, so that a stream which waits for good may stop all of them.

What does it is this file, run as a program: it imports nothing but the standard library, learns from a socket which
flags are whose, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import resource
import select
import socket
import struct
import sys
import threading
from typing import NamedTuple

log = logging.getLogger("backhaul")

_MESSAGE = struct.Struct("=5I")  # number, process, and a span; a span without flags: it is over


class Span(NamedTuple):
    """Where flags are in a file: pairs of numbers, the one that is going to be reached and the one that is."""

    start: int
    flags: int  # how many
    lost: int  # where a byte for each says whether it had to be set


def settle(memory: memoryview, span: Span) -> None:
    """Nobody is going to reach these: set them."""
    words = memory.cast("I")
    for index in range(span.flags):
        place = span.start // 4 + 2 * index
        if words[place] != words[place + 1]:
            memory[span.lost + index] = 1
            words[place + 1] = words[place]  # at once, not byte by byte


class ProcessWatch:
    """Flags are watched as long as this is there."""

    __slots__ = ("_number", "_process", "_socket")

    def __init__(self, number: int, process: int, ours: socket.socket) -> None:
        self._number = number
        self._process = process
        self._socket = ours

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(_MESSAGE.pack(self._number, self._process, 0, 0, 0))


class FlagReaper:
    """The process, as the one sees it that has it; started when there is something to watch. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._numbers = itertools.count(1)
        self._socket: socket.socket | None = None

    def watch(self, file: int, process: int, span: Span) -> ProcessWatch | None:
        """Set flags in a file when a process has ended; None if that cannot be done."""
        with self._lock:
            number = next(self._numbers)
            message = _MESSAGE.pack(number, process, *span)
            try:
                ours = self._socket = self._socket or _start()
                socket.send_fds(ours, [message], [file])
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    self._close()  # to be started again next time; what it watched is watched no longer
                log.warning("nobody lets streams go on that wait for a worker which is killed: %s", str(error))
                return None
            return ProcessWatch(number, process, ours)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        self._close()


def _start() -> socket.socket:
    """Run this file."""
    if not sys.executable:
        raise OSError("there is no interpreter to start")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    null = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    inbox = (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    try:
        child = os.posix_spawn(sys.executable, command, os.environ, file_actions=[inbox, *null])
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)  # it has made another, which nobody has to wait for
    return ours


shared = FlagReaper()
"""This process's."""


def _renew() -> None:
    global shared
    shared = FlagReaper()  # the other is the parent's


os.register_at_fork(after_in_child=_renew)


# In the process that is started.


class _Watcher:
    def __init__(self, master: int) -> None:
        self._inbox = socket.socket(fileno=0)
        self._poll = select.poll()
        self._watched: dict[int, dict[int, tuple[memoryview, Span]]] = {}  # by process and number
        self._processes: dict[int, int] = {}  # by descriptor
        self._master = os.pidfd_open(master)
        for source in (self._inbox.fileno(), self._master):
            self._poll.register(source, select.POLLIN)

    def run(self) -> None:
        while True:
            ready = {source for source, _ in self._poll.poll()}
            if self._master in ready or not self._listen():
                return
            for source in ready & self._processes.keys():
                self._bury(source)

    def _listen(self) -> bool:
        """Hear all that was said; False: there is nobody any more."""
        while True:
            try:
                said, files, *_ = socket.recv_fds(self._inbox, _MESSAGE.size, 1)
            except BlockingIOError:
                return True
            if not said:
                return False
            with contextlib.suppress(OSError, IndexError):  # no descriptor is left: the others are still watched
                self._hear(said, files)

    def _hear(self, said: bytes, files: list[int]) -> None:
        number, process, *place = _MESSAGE.unpack(said)
        span = Span(*place)
        if not span.flags:
            self._watched.get(process, {}).pop(number, None)
            return
        memory = memoryview(mmap.mmap(files[0], 0))
        os.close(files[0])
        if process not in self._watched:
            try:
                source = os.pidfd_open(process)
            except ProcessLookupError:
                settle(memory, span)
                return
            self._watched[process] = {}
            self._processes[source] = process
            self._poll.register(source, select.POLLIN)
        self._watched[process][number] = memory, span

    def _bury(self, source: int) -> None:
        for memory, span in self._watched.pop(self._processes.pop(source)).values():
            settle(memory, span)
        self._poll.unregister(source)
        os.close(source)


def _main() -> None:
    if os.fork():
        os._exit(0)
    os.setsid()  # Ctrl-C is not meant for it
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each file that is mapped takes one
    _Watcher(int(sys.argv[1])).run()


if __name__ == "__main__":
    _main()
