"""Tests of back-pressure, and of many threads that send on one channel."""

from __future__ import annotations

import functools
import random

import pytest

from backhaul._transport.base import Received
from backhaul._wire.frames import Frame
from backhaul.testing.transport_conformance.lines import (
    KIB,
    MIB,
    PATIENCE,
    SIZES,
    Aside,
    Line,
    Pollers,
    assert_same,
    content,
    join,
    next_event,
    pattern,
    send_all,
)
from backhaul.testing.transport_conformance.suite import ConformanceSuite


class SendingConformance(ConformanceSuite):
    """Senders wait for a slow peer, or do not; no frame gets lost or mixed with another."""

    def test_send_without_waiting_never_blocks_and_loses_nothing(self, line: Line) -> None:
        draw = random.Random(1)
        sizes = [draw.choice([0, 200, 20 * KIB, 60 * KIB, 500 * KIB, 2 * MIB]) for _ in range(60)]
        sent = [Frame(3, number, b"", [pattern(size, number)]) for number, size in enumerate(sizes)]
        Aside(lambda: send_all(line.near, sent, timeout=0)).result()
        with Pollers(line.here), Pollers(line.there) as there:
            there.wait_for(frames=len(sent))
            assert_same(there.frames(), sent)

    def test_send_that_gave_up_waiting_loses_nothing(self, line: Line) -> None:
        sent = [Frame(3, number, b"", [pattern(3 * MIB, number)]) for number in range(8)]
        Aside(lambda: send_all(line.near, sent, timeout=0.001)).result()
        with Pollers(line.here), Pollers(line.there) as there:
            there.wait_for(frames=len(sent))
            assert_same(there.frames(), sent)

    def test_waiting_and_hurried_senders_keep_their_order(self, line: Line) -> None:
        hurried = [Frame(3, number, b"", [pattern(MIB, number)]) for number in range(16)]
        patient = [Frame(4, number, b"", [pattern(MIB, number)]) for number in range(16)]
        send_all(line.near, hurried[:8], timeout=0)
        waiting = Aside(lambda: send_all(line.near, patient))
        send_all(line.near, hurried[8:], timeout=0)
        with Pollers(line.here), Pollers(line.there) as there:
            there.wait_for(frames=32)
            waiting.result()
            for stream in (hurried, patient):
                came = [frame for frame in there.frames() if frame.kind == stream[0].kind]
                assert_same(came, stream)

    def test_small_frames_do_not_wait_for_the_end_of_a_large_one(self, line: Line) -> None:
        """They arrive before it, and in order. What the thread of the large frame sends next arrives after it."""
        if not self.overtakes:
            pytest.skip("frames of this transport do not overtake each other")
        large = Frame(3, 0, b"", [pattern(MIB, number) for number in range(24)])
        small = [Frame(4, number, b"", [pattern(number * KIB, number)]) for number in range(1, 20)]
        before = line.near.bytes_sent
        sending = Aside(functools.partial(send_all, line.near, [large, Frame(3, 20, b"next")]))
        while line.near.bytes_sent == before:  # the peer does not read, so the thread waits in the middle of the frame
            pass
        Aside(lambda: send_all(line.near, small)).result()
        with Pollers(line.here), Pollers(line.there) as there:
            there.wait_for(frames=len(small) + 2)
            sending.result()
            assert_same(there.frames(), [*small, large, Frame(3, 20, b"next")])

    def test_a_frame_that_gave_up_waiting_is_not_overtaken(self, line: Line) -> None:
        """``send`` has returned, so what is sent then comes later."""
        large = Frame(3, 0, b"", [pattern(24 * MIB)])
        small = [Frame(4, number) for number in range(1, 9)]
        send_all(line.near, [large, *small], timeout=0)
        with Pollers(line.here), Pollers(line.there) as there:
            there.wait_for(frames=len(small) + 1)
            assert_same(there.frames(), [large, *small])

    def test_small_frames_between_many_large_ones(self, line: Line) -> None:
        """Nothing gets lost or mixed, with threads that wait and threads that do not."""

        def sequence(thread: int) -> list[Frame]:
            draw = random.Random(thread)
            sizes = (0, 100, 3 * KIB, 60 * KIB) if thread % 2 else (MIB - 1, MIB + 1, 3 * MIB)
            return [
                Frame(thread, number, b"body", [pattern(draw.choice(sizes), number)])
                for number in range(100 if thread % 2 else 8)
            ]

        sequences = [sequence(thread) for thread in range(6)]
        with Pollers(line.here), Pollers(line.there, threads=2) as there:
            senders = [
                Aside(functools.partial(send_all, line.near, frames, (None, None, 0, 0)[thread % 4]))
                for thread, frames in enumerate(sequences)
            ]
            for sender in senders:
                sender.result()
            there.wait_for(frames=sum(map(len, sequences)))
            for thread, frames in enumerate(sequences):
                assert_same([frame for frame in there.frames() if frame.kind == thread], frames)

    def test_threads_that_share_a_channel_do_not_mix_their_frames(self, line: Line) -> None:
        threads, count = 8, 60
        sizes = (0, 10, 3000, 40 * KIB, 90 * KIB, 400 * KIB)

        def sequence(thread: int) -> list[Frame]:
            draw = random.Random(thread)
            return [
                Frame(thread, number, pattern(number, thread), [pattern(draw.choice(sizes), number)])
                for number in range(count)
            ]

        sequences = [sequence(thread) for thread in range(threads)]
        with Pollers(line.here), Pollers(line.there, threads=2) as there:
            # Every second frame does not wait for the peer.
            senders = [
                Aside(functools.partial(send_all, line.near, frames, None if thread % 2 else 0))
                for thread, frames in enumerate(sequences)
            ]
            for sender in senders:
                sender.result()
            there.wait_for(frames=threads * count)
            for thread, frames in enumerate(sequences):
                came = [frame for frame in there.frames() if frame.kind == thread]
                assert_same(came, frames)

    def test_both_directions_full_of_large_frames_do_not_block_each_other(self, line: Line) -> None:
        count, size = 5, 2 * MIB
        with Pollers(line.here) as here, Pollers(line.there) as there:
            senders = []
            for channel in (line.near, line.far):
                for timeout in (0, None, None):
                    frames = [Frame(3, number, b"", [pattern(size, number)]) for number in range(count)]
                    senders.append(Aside(functools.partial(send_all, channel, frames, timeout)))
            for sender in senders:
                sender.result()
            here.wait_for(frames=3 * count)
            there.wait_for(frames=3 * count)
            for frame in (*here.frames(), *there.frames()):
                assert content(frame) == (3, frame.number, b"", [pattern(size, frame.number)])

    @pytest.mark.parametrize("attempt", range(3))  # the race does not show every time
    def test_a_sender_that_waits_does_not_stop_a_poller(self, line: Line, attempt: int) -> None:
        other = join(line.here, line.there)
        size = (8 + attempt) * MIB
        send_all(line.near, [Frame(3, number, b"", [bytes(size)]) for number in range(3)], timeout=0)
        waiting = Aside(lambda: line.near.send(Frame(3, 3, b"", [bytes(4 * size)])))
        with Pollers(line.here) as here:
            came = 0
            while came < 3:  # then stop reading, so that the sender still waits
                if came:
                    line.far.release()
                event = next_event(line.there)
                assert isinstance(event, Received)
                came += len(event.frames)
            other.far.send(Frame(3, 9))
            here.wait_for(frames=1, patience=PATIENCE / 3)
            line.far.release()
            with Pollers(line.there) as there:
                there.wait_for(frames=4 - came)
                waiting.result()

    def test_bytes_are_counted_where_they_are_sent(self, line: Line) -> None:
        if not line.near.bytes_sent:  # the first frame has gone out
            pytest.skip("this transport does not count bytes")
        sent, silent = line.near.bytes_sent, line.far.bytes_sent
        frames = [Frame(3, number, b"body", [pattern(size)]) for number, size in enumerate(SIZES)]
        with Pollers(line.here), Pollers(line.there) as there:
            senders = [Aside(functools.partial(send_all, line.near, frames, timeout)) for timeout in (None, 0, 0.001)]
            for sender in senders:
                sender.result()
            there.wait_for(frames=3 * len(frames))
        assert line.near.bytes_sent - sent >= 3 * sum(frame.nbytes for frame in frames)
        assert line.far.bytes_sent == silent
