"""Sets the flags of processes that have ended, from a separate process.

A stream may wait for a flag that another process is to set (see ``pages``). If that process is killed, somebody else
has to set the flag, and no thread of this process can be relied on: torch holds the interpreter's lock while it waits
for a device, for instance to load a kernel or to queue one more than fits. So a stream that waits forever may block all
threads.

This file, run as a program, is that separate process. It imports the standard library only, learns from a socket which
flags belong to which process, and ends with the process that started it.
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

_MESSAGE = struct.Struct("=5I")  # number of the watch, process, and a span; a span without flags ends the watch


class Span(NamedTuple):
    """Where the flags of one process lie in a segment. A flag is two numbers: its target, and the number reached."""

    start: int  # offset in bytes
    flags: int  # how many
    lost: int  # offset of one byte for each flag, which says whether the flag had to be set for its process


def set_flags(memory: memoryview, span: Span) -> None:
    """Set flags that their process is never going to set."""
    words = memory.cast("I")
    for index in range(span.flags):
        place = span.start // 4 + 2 * index
        if words[place] != words[place + 1]:
            memory[span.lost + index] = 1
            words[place + 1] = words[place]  # in one store, not byte by byte


class ProcessWatch:
    """Flags are watched as long as this object exists."""

    __slots__ = ("_number", "_process", "_socket")

    def __init__(self, number: int, process: int, ours: socket.socket) -> None:
        self._number = number
        self._process = process
        self._socket = ours

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(_MESSAGE.pack(self._number, self._process, 0, 0, 0))


class FlagReaper:
    """The separate process, as seen by the process that uses it. Starts it at the first watch. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._numbers = itertools.count(1)
        self._socket: socket.socket | None = None

    def watch(self, file: int, process: int, span: Span) -> ProcessWatch | None:
        """Set flags in a file when ``process`` has ended; None if they cannot be watched."""
        with self._lock:
            number = next(self._numbers)
            message = _MESSAGE.pack(number, process, *span)
            try:
                ours = self._socket = self._socket or _start()
                socket.send_fds(ours, [message], [file])
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    self._close()  # the next watch starts it again; earlier watches are lost
                log.warning("cannot release streams that wait for a killed worker: %s", str(error))
                return None
            return ProcessWatch(number, process, ours)

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __del__(self) -> None:
        self._close()


def _start() -> socket.socket:
    """Run this file as a program."""
    if not sys.executable:
        raise OSError("sys.executable is empty, so no Python process can be started")
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
        os.waitpid(child, 0)  # it has forked the actual process, for which nobody has to wait
    return ours


shared = FlagReaper()
"""The one of this process."""


def _renew() -> None:
    global shared
    shared = FlagReaper()  # the old one is the parent's


os.register_at_fork(after_in_child=_renew)


# In the separate process.


class _Watcher:
    def __init__(self, parent: int) -> None:
        self._inbox = socket.socket(fileno=0)
        self._poll = select.poll()
        self._watched: dict[int, dict[int, tuple[memoryview, Span]]] = {}  # by process and number of the watch
        self._processes: dict[int, int] = {}  # by pidfd
        self._parent = os.pidfd_open(parent)
        for source in (self._inbox.fileno(), self._parent):
            self._poll.register(source, select.POLLIN)

    def run(self) -> None:
        while True:
            ready = {source for source, _ in self._poll.poll()}
            if self._parent in ready or not self._receive_all():
                return
            for source in ready & self._processes.keys():
                self._set_flags_of(source)

    def _receive_all(self) -> bool:
        """Receive all messages that have come; False if the socket is closed."""
        while True:
            try:
                message, files, *_ = socket.recv_fds(self._inbox, _MESSAGE.size, 1)
            except BlockingIOError:
                return True
            if not message:
                return False
            with contextlib.suppress(OSError, IndexError):  # no descriptor is left: go on with the other watches
                self._receive(message, files)

    def _receive(self, message: bytes, files: list[int]) -> None:
        number, process, *place = _MESSAGE.unpack(message)
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
                set_flags(memory, span)
                return
            self._watched[process] = {}
            self._processes[source] = process
            self._poll.register(source, select.POLLIN)
        self._watched[process][number] = memory, span

    def _set_flags_of(self, source: int) -> None:
        for memory, span in self._watched.pop(self._processes.pop(source)).values():
            set_flags(memory, span)
        self._poll.unregister(source)
        os.close(source)


def _main() -> None:
    if os.fork():
        os._exit(0)
    os.setsid()  # Ctrl-C is not meant for this process
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each mapped file takes a descriptor
    _Watcher(int(sys.argv[1])).run()


if __name__ == "__main__":
    _main()
