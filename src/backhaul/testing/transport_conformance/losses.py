"""Tests of the end of a channel and of an endpoint."""

from __future__ import annotations

import contextlib
import threading

import pytest

from backhaul._transport.base import ChannelClosedError, EndpointFactory
from backhaul._wire.frames import Frame
from backhaul.testing.transport_conformance.lines import (
    KIB,
    MIB,
    PATIENCE,
    Aside,
    Line,
    Pollers,
    assert_nothing,
    assert_same,
    carry,
    count_descriptors,
    join,
    next_event,
    pattern,
    send_all,
    until_lost,
)
from backhaul.testing.transport_conformance.suite import ConformanceSuite


class LossConformance(ConformanceSuite):
    """Frames that were sent come before the loss, and every loss is reported once."""

    def test_what_was_sent_comes_before_the_loss(self, line: Line) -> None:
        for number in range(5):
            line.near.send(Frame(3, number, pattern(1000 * number)))
        line.near.close()
        assert [frame.number for frame in until_lost(line.there, line.far)] == list(range(5))
        assert until_lost(line.here, line.near) == []
        assert_nothing(line.here)
        assert_nothing(line.there)

    def test_a_large_frame_comes_before_the_loss(self, line: Line) -> None:
        sent = [Frame(3, number, b"", [pattern(3 * MIB, number)]) for number in range(3)]

        def send_and_close() -> None:
            send_all(line.near, sent)
            line.near.close()

        sending = Aside(send_and_close)
        assert_same(until_lost(line.there, line.far), sent)
        sending.result()
        assert until_lost(line.here, line.near) == []

    def test_closing_keeps_what_a_slow_peer_has_not_read(self, line: Line) -> None:
        sent = [Frame(3, number, b"", [pattern(MIB, number)]) for number in range(24)]
        send_all(line.near, sent, timeout=0)
        line.near.close()
        with Pollers(line.here) as here, Pollers(line.there) as there:
            there.wait_for(losses=1)
            here.wait_for(losses=1)
            assert_same(there.frames(), sent)

    def test_closing_keeps_what_has_come(self, line: Line) -> None:
        for number in range(3):
            line.near.send(Frame(3, number))
        line.far.close()
        assert [frame.number for frame in until_lost(line.there, line.far)] == [0, 1, 2]
        assert until_lost(line.here, line.near) == []

    def test_closing_while_held(self, line: Line) -> None:
        line.near.send(Frame(3, 1))
        event = next_event(line.there)
        event.channel.close()
        event.channel.release()
        assert until_lost(line.there, line.far) == []
        assert until_lost(line.here, line.near) == []

    def test_both_ends_closing_is_one_loss_each(self, line: Line) -> None:
        for channel in (line.near, line.far, line.near, line.far):
            channel.close()
        assert until_lost(line.here, line.near) == []
        assert until_lost(line.there, line.far) == []
        line.near.close()  # closing a lost channel does no harm
        assert_nothing(line.here)
        assert_nothing(line.there)

    def test_one_channel_ends_alone(self, line: Line) -> None:
        other = join(line.here, line.there)
        line.near.close()
        assert until_lost(line.there, line.far) == []
        assert until_lost(line.here, line.near) == []
        assert [frame.number for frame in carry(other, [Frame(3, 1)])] == [1]
        assert [frame.number for frame in carry(other.turned(), [Frame(3, 2)])] == [2]

    def test_nothing_can_be_sent_on_a_closed_channel(self, line: Line) -> None:
        line.near.close()
        for size in (0, 100 * KIB):
            with pytest.raises(ChannelClosedError):
                line.near.send(Frame(3, 1, b"", [bytes(size)]))
        assert until_lost(line.there, line.far) == []
        for timeout in (None, 0):
            with pytest.raises(ChannelClosedError):
                line.far.send(Frame(3, 1), timeout=timeout)
        assert until_lost(line.here, line.near) == []
        with pytest.raises(ChannelClosedError):
            line.near.send(Frame(3, 1))

    @pytest.mark.parametrize("who", ["this side", "peer", "peer's endpoint"])
    def test_the_end_frees_a_sender_that_waits(self, line: Line, who: str) -> None:
        some, closed = threading.Event(), threading.Event()

        def send_until_refused() -> None:
            frame = Frame(3, 1, b"", [pattern(100 * KIB)])
            for _ in range(480):  # no thread reads; a transport without back-pressure takes everything
                line.near.send(frame)
                some.set()
            closed.wait(PATIENCE)
            line.near.send(frame)

        sending = Aside(send_until_refused)
        assert some.wait(PATIENCE)
        closers = {"this side": line.near.close, "peer": line.far.close, "peer's endpoint": line.there.close}
        closers[who]()
        closed.set()
        with Pollers(line.here) as here, contextlib.ExitStack() as stack:
            if who != "peer's endpoint":
                stack.enter_context(Pollers(line.there))
            with pytest.raises(ChannelClosedError):
                sending.result()
            here.wait_for(losses=1)

    # The end of an endpoint.

    def test_closing_an_endpoint_is_a_loss_for_its_peers(self, line: Line) -> None:
        other = join(line.here, line.there)
        line.near.send(Frame(3, 1, pattern(1000)))
        line.here.close()
        with Pollers(line.there) as there:
            there.wait_for(frames=1, losses=2)
            assert [frame.number for frame in there.frames(line.far)] == [1]
        assert_nothing(line.there)
        assert sorted(map(id, there.losses())) == sorted(map(id, (line.far, other.far)))
        with pytest.raises(ChannelClosedError):
            line.near.send(Frame(3, 1))

    def test_closing_an_endpoint_frees_everything(self, endpoints: EndpointFactory) -> None:
        before = count_descriptors()
        threads = threading.active_count()
        here, there = endpoints(), endpoints()
        idle, held, closed, stalled = (join(here, there) for _ in range(4))
        held.near.send(Frame(3, 1))
        assert next_event(there).channel is held.far
        closed.near.close()
        for channel in (stalled.near, stalled.far):
            send_all(channel, [Frame(3, 1, b"", [pattern(MIB)])] * 12, timeout=0)
        idle.near.send(Frame(3, 1, pattern(1000)))
        there.close()
        here.close()
        here.close()  # closing twice does no harm
        for line in (idle, held, closed, stalled):
            for channel in (line.near, line.far):
                channel.close()
                with pytest.raises(ChannelClosedError):
                    channel.send(Frame(3, 1))
        assert count_descriptors() == before
        assert threading.active_count() == threads
