"""Tests of channels that a thread holds: no other thread reads them meanwhile."""

from __future__ import annotations

import pytest

from backhaul._transport.base import Lost, Received
from backhaul._wire.frames import Frame
from backhaul.testing.transport_conformance.lines import (
    MIB,
    PATIENCE,
    Aside,
    Line,
    Pollers,
    assert_nothing,
    assert_same,
    content,
    join,
    next_event,
    next_frames,
    pattern,
    until_lost,
)
from backhaul.testing.transport_conformance.suite import ConformanceSuite


class HoldingConformance(ConformanceSuite):
    """A channel that has delivered frames is held until its ``release``."""

    def test_a_channel_that_delivered_is_silent_until_it_is_released(self, line: Line) -> None:
        other = join(line.here, line.there)
        line.near.send(Frame(3, 1))
        event = next_event(line.there)
        assert isinstance(event, Received)
        assert event.channel is line.far
        for number in (2, 3, 4):
            line.near.send(Frame(3, number))
        other.near.send(Frame(3, 9))
        marker = next_event(line.there)
        assert marker.channel is other.far
        assert_nothing(line.there)
        line.far.release()
        assert [frame.number for frame in next_frames(line.there, 3)] == [2, 3, 4]
        other.far.release()

    def test_a_held_channel_still_sends(self, line: Line) -> None:
        line.near.send(Frame(3, 1))
        event = next_event(line.there)
        event.channel.send(Frame(4, 1, b"reply"))
        assert [content(frame) for frame in next_frames(line.here, 1)] == [(4, 1, b"reply", [])]
        event.channel.release()

    def test_a_held_channel_reports_its_loss_only_when_it_is_released(self, line: Line) -> None:
        other = join(line.here, line.there)
        line.near.send(Frame(3, 1))
        next_event(line.there)
        line.near.send(Frame(3, 2))
        line.near.close()
        other.near.send(Frame(3, 9))
        assert next_event(line.there).channel is other.far
        assert_nothing(line.there)
        line.far.release()
        assert [frame.number for frame in until_lost(line.there, line.far)] == [2]

    def test_release_races_with_arrival(self, line: Line) -> None:
        count = 2000
        with Pollers(line.there, threads=2) as there:
            for number in range(count):
                line.near.send(Frame(3, number))
            there.wait_for(frames=count)
            assert [frame.number for frame in there.frames()] == list(range(count))

    # ``park``.

    def test_a_parked_channel_goes_on_after_unpark(self, line: Line) -> None:
        line.near.send(Frame(3, 1))
        assert isinstance(next_event(line.there), Received)
        line.near.send(Frame(3, 2))
        line.far.park()
        line.near.send(Frame(3, 3))
        line.there.unpark()
        assert [frame.number for frame in next_frames(line.there, 2)] == [2, 3]

    def test_a_parked_channel_reports_its_loss_after_unpark(self, line: Line) -> None:
        line.near.send(Frame(3, 1))
        assert isinstance(next_event(line.there), Received)
        line.far.park()
        line.near.close()
        line.there.unpark()
        assert until_lost(line.there, line.far) == []

    def test_whoever_acquires_a_parked_channel_has_it_alone(self, line: Line) -> None:
        line.near.send(Frame(3, 1))
        assert isinstance(next_event(line.there), Received)
        line.far.park()
        self.hold_or_skip(line.far)
        assert not line.far.acquire()
        line.there.unpark()  # it is parked no more
        line.near.send(Frame(3, 2))
        assert_nothing(line.there)
        event = line.far.receive(PATIENCE)
        assert isinstance(event, Received)
        assert [frame.number for frame in event.frames] == [2]
        line.far.release()
        line.near.send(Frame(3, 3))
        assert [frame.number for frame in next_frames(line.there, 1)] == [3]

    def test_parking_races_with_unpark_and_arrival(self, line: Line) -> None:
        count = 1000
        with Pollers(line.there, threads=2) as there:
            for number in range(count):
                line.near.send_soon(Frame(3, number))
                line.near.flush()
                if line.far.acquire():
                    line.far.park()
                line.there.unpark()
            there.wait_for(frames=count)
            assert [frame.number for frame in there.frames()] == list(range(count))

    # ``acquire`` and ``receive``, where offered.

    def test_hold_is_refused_where_it_is_not_offered(self, line: Line) -> None:
        if self.can_hold:
            pytest.skip("this transport offers hold")
        assert not line.near.acquire()
        with pytest.raises(NotImplementedError):
            line.near.receive(0)

    def test_the_holder_receives_and_pollers_do_not(self, line: Line) -> None:
        other = join(line.here, line.there)
        line.near.send(Frame(3, 1))  # may arrive before the hold
        self.hold_or_skip(line.far)
        for number in (2, 3):
            line.near.send(Frame(3, number))
        other.near.send(Frame(3, 9))
        assert next_event(line.there).channel is other.far
        assert_nothing(line.there)
        came: list[Frame] = []
        while len(came) < 3:
            event = line.far.receive(PATIENCE)
            assert isinstance(event, Received)
            assert event.channel is line.far
            came += event.frames
        assert [frame.number for frame in came] == [1, 2, 3]
        line.near.send(Frame(3, 4))
        other.far.release()
        other.near.send(Frame(3, 10))
        assert next_event(line.there).channel is other.far
        assert_nothing(line.there)  # the channel is still held
        line.far.release()
        assert [frame.number for frame in next_frames(line.there, 1)] == [4]
        other.far.release()

    def test_receive_gives_up_after_its_timeout_and_stays_held(self, line: Line) -> None:
        self.hold_or_skip(line.far)
        assert line.far.receive(0) is None
        assert line.far.receive(0.001) is None
        assert not line.far.acquire()
        line.near.send(Frame(3, 1))
        event = line.far.receive(PATIENCE)
        assert isinstance(event, Received)
        line.far.release()

    def test_a_held_channel_cannot_be_held_again(self, line: Line) -> None:
        self.hold_or_skip(line.far)
        assert not line.far.acquire()
        line.far.release()
        line.near.send(Frame(3, 1))
        event = next_event(line.there)
        assert not event.channel.acquire()
        event.channel.release()
        assert line.far.acquire()
        line.far.release()

    def test_receive_waits_for_what_comes_later(self, line: Line) -> None:
        self.hold_or_skip(line.far)
        receiving = Aside(lambda: line.far.receive(None))
        sent = Frame(3, 1, b"large", [pattern(3 * MIB)])
        line.near.send(sent)
        event = receiving.result()
        assert isinstance(event, Received)
        assert_same(event.frames, [sent])
        line.far.release()

    @pytest.mark.parametrize("who", ["peer", "this side"])
    def test_receive_reports_the_loss_and_ends_the_hold(self, line: Line, who: str) -> None:
        holder = object()
        self.hold_or_skip(line.far, holder)
        receiving = Aside(lambda: line.far.receive(None))
        (line.near if who == "peer" else line.far).close()
        event = receiving.result()
        assert isinstance(event, Lost)
        assert event.channel is line.far
        assert_nothing(line.there)
        assert not line.far.acquire()
        assert not line.far.acquire(holder), "nor by who held it then"

    def test_an_interrupt_after_the_loss_does_no_harm_to_others(self, line: Line) -> None:
        holder = object()
        self.hold_or_skip(line.far, holder)
        line.far.abort("over")
        assert isinstance(line.far.receive(PATIENCE), Lost)
        assert isinstance(next_event(line.here), Lost)
        others = [
            join(line.here, line.there) for _ in range(4)
        ]  # some get what the lost one had, such as its descriptor
        line.far.recover_after_interrupt(holder, whole=True)
        for other in others:
            other.near.send(Frame(3, 1))
            assert next_event(line.there).channel is other.far
            other.far.release()

    def test_holders_and_pollers_lose_nothing_between_them(self, line: Line) -> None:
        self.hold_or_skip(line.near)
        line.near.release()
        replies: dict[int, int] = {}

        def note(event: Received) -> None:
            for frame in event.frames:
                replies[frame.number] = replies.get(frame.number, 0) + 1

        def reply(event: Received) -> None:
            for frame in event.frames:
                event.channel.send(Frame(4, frame.number, frame.body))

        count = 500
        with Pollers(line.here, threads=2, act=note), Pollers(line.there, act=reply):
            for number in range(count):
                line.near.send(Frame(3, number, pattern(number % 100)))
                while number not in replies:
                    if line.near.acquire():
                        while number not in replies:
                            event = line.near.receive(PATIENCE)
                            assert isinstance(event, Received)
                            note(event)
                        line.near.release()
        assert replies == dict.fromkeys(range(count), 1)
