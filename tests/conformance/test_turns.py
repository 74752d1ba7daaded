"""A peer that is as fast as this end: one large frame keeps no thread, and what arrives is seen to arrive."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from backhaul._transport.base import Received
from backhaul._transport.shm import host_memory
from backhaul._transport.sockets.channel import SocketChannel
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul.testing.transport_conformance import Line, Pollers, join

SECRET = b"the tests' own"
MIB = 1 << 20


class FastSocket:
    """A socket whose peer never makes this end wait.

    Attributes:
        head: The first bytes that can be read. There are always more, which are 0.
        reads: How many bytes were asked for each time.
        room: How many bytes the socket takes.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.head: Buffer = b""
        self.reads: list[int] = []
        self.room = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def recv_into(self, memory: memoryview) -> int:
        if self.head:
            count = len(self.head)
            memory[:count], self.head = self.head, b""
            return count
        self.reads.append(len(memory))
        memory[:] = bytes(len(memory))
        return len(memory)

    def sendmsg(self, parts: Sequence[Buffer]) -> int:
        count = min(sum(map(len, parts)), self.room)
        if not count:
            raise BlockingIOError
        self.room -= count
        return count


@pytest.fixture
def line() -> Iterator[Line]:
    ends = SocketEndpoint(secret=SECRET), SocketEndpoint(secret=SECRET)
    yield join(*ends)
    for end in ends:
        end.close()


@pytest.fixture
def channel(line: Line) -> SocketChannel:
    """One that is not polled."""
    assert isinstance(line.near, SocketChannel)
    return line.near


@pytest.fixture
def fast(channel: SocketChannel, monkeypatch: pytest.MonkeyPatch) -> FastSocket:
    """The channel's socket."""
    made = FastSocket(channel._connection.sock)
    monkeypatch.setattr(channel._connection, "sock", made)
    return made


def size_of(frame: Frame) -> int:
    """How many bytes are written, with what lies between the pieces of a large frame."""
    return sum(map(len, frame.parts()))


def frame_of(size: int) -> Frame:
    return Frame(3, 7, b"body", [mmap.mmap(-1, size)])


def test_a_large_frame_is_read_in_turns(channel: SocketChannel, fast: FastSocket) -> None:
    sent = frame_of(256 * MIB)
    fast.head = sent.parts()[0]
    assert channel.acquire()
    before, seen = channel.bytes_received, []
    while not isinstance(event := channel.take(), Received):
        assert event is None
        seen.append(channel.bytes_received - before)
    assert event.frames[0].nbytes == sent.nbytes
    assert channel.bytes_received - before == size_of(sent)
    assert len(seen) >= 8, "the thread looks after other things in between"
    assert seen == sorted(set(seen)), "and bytes are seen to arrive"
    assert max(fast.reads) <= 16 * MIB, "no system call reads on and on"


def test_a_long_queue_is_written_in_turns(channel: SocketChannel, fast: FastSocket) -> None:
    before, sent = channel.bytes_sent, frame_of(64 * MIB)
    channel.send(sent, timeout=0)
    fast.room = 1 << 40
    backlogs = [channel.backlog]
    while channel.backlog:
        channel._writer.write_on()
        backlogs.append(channel.backlog)
    assert len(backlogs) > 4
    assert backlogs == sorted(set(backlogs), reverse=True)
    assert channel.bytes_sent - before == size_of(sent)


def test_a_long_queue_is_copied_once(channel: SocketChannel, fast: FastSocket) -> None:
    """However often the socket is full: each copy keeps the interpreter's lock, or the memory, busy for long."""
    channel.send(frame_of(64 * MIB), timeout=0)
    copy = memoryview(channel._writer.queue.parts[0]).obj
    while channel.backlog > 8 * MIB:
        fast.room = MIB
        channel._writer.write_on()
        assert all(memoryview(part).obj is copy for part in channel._writer.queue.parts)


def test_a_heartbeat_does_not_write_a_long_queue(channel: SocketChannel, fast: FastSocket) -> None:
    channel.send(frame_of(64 * MIB), timeout=0)
    fast.room = 1 << 40
    channel.send(Frame(3), timeout=0)
    assert channel.backlog > 16 * MIB


def test_nothing_is_counted_as_sent_while_it_is_copied(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that sees nothing of a frame has to be sent heartbeats."""
    frame = Frame(3, 1, b"", [bytes(host_memory.THRESHOLD)] * 5)
    copy_into, counts = host_memory.copy_into, []

    def count(block: Any, buffer: Buffer) -> None:
        counts.append(line.near.bytes_sent)
        copy_into(block, buffer)

    monkeypatch.setattr(host_memory, "copy_into", count)
    with Pollers(line.here), Pollers(line.there) as there:
        for sent in range(1, 50):
            before, copied = line.near.bytes_sent, len(counts)
            line.near.send(frame)
            there.wait_for(frames=sent)
            assert counts[copied:] == [before] * len(counts[copied:])
            assert line.near.bytes_sent - before >= frame.nbytes
            if len(counts) - copied == 5:  # all in slots
                return
    pytest.fail("buffers never went through slots")
