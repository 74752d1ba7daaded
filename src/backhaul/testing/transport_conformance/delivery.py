"""Tests that frames arrive in order and intact, each at one thread that polls."""

from __future__ import annotations

import ctypes
import functools
import mmap
import random

import pytest

from backhaul._transport.base import EndpointFactory
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Buffer
from backhaul.testing.transport_conformance.lines import (
    KIB,
    MIB,
    SIZES,
    Aside,
    Line,
    Pollers,
    assert_nothing,
    assert_same,
    carry,
    content,
    join,
    pattern,
    send_all,
)
from backhaul.testing.transport_conformance.suite import ConformanceSuite


class DeliveryConformance(ConformanceSuite):
    """Frames arrive in order and intact."""

    @pytest.mark.parametrize("size", SIZES)
    def test_any_size_arrives_intact_both_ways(self, line: Line, size: int) -> None:
        one, two = pattern(size, 1), pattern(size, 2)
        frames = [
            Frame(3, 1, one),
            Frame(3, 2, b"", [one]),
            Frame(3, 3, one, [two, b"", one[:7]]),
            Frame(3, 4, b"tail"),
        ]
        for way in (line, line.turned()):
            assert_same(carry(way, frames), frames)

    @pytest.mark.parametrize("count", [1, 2, 511, 512, 513, 1024, 1025, 5000])
    def test_many_buffers_some_of_them_empty(self, line: Line, count: int) -> None:
        frames = [
            Frame(3, 1, b"body", [pattern(index % 3 * 11, index) for index in range(count)]),
            Frame(3, 2, b"", [b""] * count),
            Frame(3, 3, b"tail"),
        ]
        for way in (line, line.turned()):
            assert_same(carry(way, frames), frames)

    def test_many_large_buffers(self, line: Line) -> None:
        frame = Frame(3, 1, b"body", [pattern(size, size) for size in (*SIZES, *reversed(SIZES))])
        assert_same(carry(line, [frame]), [frame])

    def test_kind_and_number_use_their_full_range(self, line: Line) -> None:
        frames = [Frame(kind, number) for kind in (0, 1, 255) for number in (0, 1, (1 << 64) - 1)]
        assert_same(carry(line, frames), frames)

    def test_buffers_may_be_any_memory(self, line: Line) -> None:
        size = 200 * KIB
        with mmap.mmap(-1, size) as mapped:
            mapped[:] = pattern(size)
            array = (ctypes.c_ubyte * size).from_buffer_copy(pattern(size, 1))
            view = memoryview(bytearray(pattern(2 * size, 2)))[17 : 17 + size]
            buffers: list[Buffer] = [mapped, array, view, bytearray(pattern(size, 3)), bytes(view[:9]), view[:0]]
            sent = Frame(3, 1, memoryview(b"body")[1:], buffers)
            (came,) = carry(line, [sent])
            assert content(came) == content(sent)

    def test_what_arrives_is_the_receivers_own_memory(self, line: Line) -> None:
        sent = Frame(3, 1, b"body", [bytearray(pattern(size, size)) for size in (10, 40 * KIB, 300 * KIB)])
        before = content(sent)
        (came,) = carry(line, [sent])
        for buffer in came.buffers:
            memoryview(buffer).cast("B")[:] = bytes(len(buffer))  # fails if the memory is read-only
        assert content(sent) == before

    def test_long_streams_both_ways_at_once(self, line: Line) -> None:
        streams = []
        for seed in (1, 2):
            draw = random.Random(seed)
            sizes = [draw.choice([0, 5, 700, 9 * KIB, 33 * KIB, 70 * KIB, 150 * KIB]) for _ in range(400)]
            streams.append([Frame(3, n, pattern(size % 977, n), [pattern(size, n)]) for n, size in enumerate(sizes)])
        with Pollers(line.here) as here, Pollers(line.there) as there:
            sending = [
                Aside(functools.partial(send_all, channel, stream))
                for channel, stream in zip((line.near, line.far), streams, strict=True)
            ]
            there.wait_for(frames=len(streams[0]))
            here.wait_for(frames=len(streams[1]))
            for aside in sending:
                aside.result()
            for stream, came in zip(streams, (there.frames(line.far), here.frames(line.near)), strict=True):
                assert_same(came, stream)

    # Once ``send`` has returned, the memory may be changed.

    @pytest.mark.parametrize("size", [1, 1000, 40 * KIB, 100 * KIB, 2 * MIB])
    def test_memory_may_change_once_sent(self, line: Line, size: int) -> None:
        with Pollers(line.there) as there:
            memory = bytearray(size)
            for round_ in range(20):
                memory[:] = bytes([round_]) * size
                line.near.send(Frame(3, round_, memory[:1], [memory, memoryview(memory)[: size // 2]]))
            memory[:] = b"x" * size
            there.wait_for(frames=20)
            for round_, frame in enumerate(there.frames()):
                fill = bytes([round_])
                assert content(frame) == (3, round_, fill, [fill * size, fill * (size // 2)])

    @pytest.mark.parametrize("size", [1000, 40 * KIB, 100 * KIB, 2 * MIB])
    def test_memory_may_change_although_the_peer_has_not_read(self, line: Line, size: int) -> None:
        memory = bytearray(size)
        count = max(3, 8 * MIB // size)
        for number in range(count):
            memory[:] = bytes([number % 251]) * size
            line.near.send(Frame(3, number, b"", [memory]), timeout=0)
        memory[:] = b"x" * size
        with Pollers(line.here), Pollers(line.there) as there:
            there.wait_for(frames=count)
            for number, frame in enumerate(there.frames()):
                assert content(frame) == (3, number, b"", [bytes([number % 251]) * size])

    # Each event goes to one thread that polls.

    def test_each_event_goes_to_exactly_one_poller(self, make: EndpointFactory) -> None:
        here, there = make(), make()
        lines = [join(here, there) for _ in range(8)]
        count = 60
        with Pollers(here, threads=3) as ours, Pollers(there, threads=4) as theirs:
            senders = []
            for line in lines:
                for channel in (line.near, line.far):
                    frames = [Frame(3, number, pattern(number * 37 % 900, number)) for number in range(count)]
                    senders.append(Aside(functools.partial(send_all, channel, frames)))
            for sender in senders:
                sender.result()
            ours.wait_for(frames=len(lines) * count)
            theirs.wait_for(frames=len(lines) * count)
            for line in lines:
                assert [frame.number for frame in ours.frames(line.near)] == list(range(count))
                assert [frame.number for frame in theirs.frames(line.far)] == list(range(count))
            closers = [
                Aside(channel.close)
                for index, line in enumerate(lines)
                for channel in ((line.near,), (line.far,), (line.near, line.far))[index % 3]
            ]
            for closer in closers:
                closer.result()
            ours.wait_for(losses=len(lines))
            theirs.wait_for(losses=len(lines))
        assert_nothing(here)
        assert_nothing(there)
        assert sorted(map(id, ours.losses())) == sorted(id(line.near) for line in lines)
        assert sorted(map(id, theirs.losses())) == sorted(id(line.far) for line in lines)
