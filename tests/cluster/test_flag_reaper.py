"""Flags of processes that were killed are set, by a process apart."""

from __future__ import annotations

import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from backhaul._devices import flag_reaper
from backhaul._devices.flag_reaper import FlagReaper, Span
from backhaul._devices.segments import HEAD, span_of_done, span_of_ready
from backhaul._transport.shm import shared_memory

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open")

COUNT = 8
LIMIT = 60.0  # seconds


def wait_for(true: Callable[[], bool]) -> bool:
    over = time.monotonic() + LIMIT
    while not true():
        if time.monotonic() > over:
            return False
        time.sleep(0.01)
    return True


class Flags:
    """Such as two processes share: what is to be reached, and what is."""

    def __init__(self) -> None:
        self.file, self.mapping, _ = shared_memory.create(HEAD)

    def numbers(self, span: Span) -> list[tuple[int, int]]:
        words = (ctypes.c_uint32 * (2 * span.flags)).from_address(self.mapping.address + span.start)
        return list(zip(words[::2], words[1::2], strict=True))

    def set(self, span: Span, targets: list[int]) -> None:
        words = (ctypes.c_uint32 * (2 * span.flags)).from_address(self.mapping.address + span.start)
        words[::2] = targets

    def lost(self, span: Span) -> list[int]:
        return list((ctypes.c_ubyte * span.flags).from_address(self.mapping.address + span.lost))

    def close(self) -> None:
        os.close(self.file)


@pytest.fixture
def flags() -> Iterator[Flags]:
    made = Flags()
    yield made
    made.close()


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_flags_of_a_process_that_is_killed_are_set(flags: Flags, peer: subprocess.Popen[bytes]) -> None:
    ready, done = span_of_ready(COUNT), span_of_done(COUNT)
    targets = [0, 1, 2, 0, 2**32 - 1, 6, 7, 8]
    flags.set(ready, targets)
    flags.set(done, targets)
    under = FlagReaper()
    watch = under.watch(flags.file, peer.pid, ready)
    assert watch is not None
    assert {reached for _, reached in flags.numbers(ready)} == {0}
    peer.kill()  # nobody waits for it: it is a zombie
    assert wait_for(lambda: flags.numbers(ready) == [(target, target) for target in targets])
    assert flags.lost(ready) == [int(target > 0) for target in targets]
    assert {reached for _, reached in flags.numbers(done)} == {0}, "those of others are left alone"


def test_a_process_that_has_ended_before(flags: Flags, peer: subprocess.Popen[bytes]) -> None:
    flags.set(span_of_done(COUNT), [5] * COUNT)
    peer.kill()
    peer.wait()
    under = FlagReaper()
    watch = under.watch(flags.file, peer.pid, span_of_done(COUNT))
    assert wait_for(lambda: flags.numbers(span_of_done(COUNT)) == [(5, 5)] * COUNT)
    assert watch is not None


def test_what_is_not_watched_any_more_is_left_alone(flags: Flags, peer: subprocess.Popen[bytes]) -> None:
    other, under = Flags(), FlagReaper()
    for one in (flags, other):
        one.set(span_of_ready(COUNT), [1] * COUNT)
    watches = [under.watch(one.file, peer.pid, span_of_ready(COUNT)) for one in (flags, other)]
    del watches[0]
    peer.kill()
    assert wait_for(lambda: other.numbers(span_of_ready(COUNT)) == [(1, 1)] * COUNT)
    assert flags.numbers(span_of_ready(COUNT)) == [(1, 0)] * COUNT
    other.close()


WATCH = """
import os, sys, time
from backhaul._devices.flag_reaper import FlagReaper, Span
from backhaul._transport.shm import shared_memory
file, mapping, cookie = shared_memory.create(8192)
under = FlagReaper()
watch = under.watch(file, os.getppid(), Span(4096, 1, 4200))
if sys.argv[1] == "fork" and not os.fork():
    time.sleep(600)  # keeps the socket open
print(os.getpid(), flush=True)
time.sleep(600)
"""


def undertakers_of(master: int) -> list[int]:
    command = [flag_reaper.__file__, str(master)]
    found = []
    for place in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if place.read_bytes().decode().split("\0")[-3:-1] == command:
                found.append(int(place.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_it_ends_with_its_master(how: str) -> None:
    command = [sys.executable, "-c", WATCH, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as master:
        assert master.stdout is not None
        pid = int(master.stdout.readline())
        try:
            assert len(undertakers_of(pid)) == 1
            os.kill(pid, signal.SIGKILL)
            assert wait_for(lambda: not undertakers_of(pid))
        finally:
            os.killpg(master.pid, signal.SIGKILL)


def test_no_descriptor_is_left(flags: Flags, peer: subprocess.Popen[bytes]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    under = FlagReaper()
    watches = [under.watch(flags.file, peer.pid, span_of_ready(COUNT)) for _ in range(20)]
    assert None not in watches
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del watches, under
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_was_killed_is_started_again(flags: Flags, peer: subprocess.Popen[bytes]) -> None:
    under = FlagReaper()
    watches = [under.watch(flags.file, peer.pid, span_of_ready(COUNT))]
    for pid in undertakers_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)

    def watched_again() -> bool:
        watches.append(under.watch(flags.file, peer.pid, span_of_ready(COUNT)))
        return len(undertakers_of(os.getpid())) == 1 and None in watches and watches[-1] is not None

    assert wait_for(watched_again)
    flags.set(span_of_ready(COUNT), [3] * COUNT)
    peer.kill()
    assert wait_for(lambda: flags.numbers(span_of_ready(COUNT)) == [(3, 3)] * COUNT)


def test_where_it_cannot_be_started(
    flags: Flags, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert FlagReaper().watch(flags.file, os.getppid(), span_of_ready(COUNT)) is None
    assert "nobody lets streams go on" in caplog.text
