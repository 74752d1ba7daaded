"""Tests of ``poll`` and ``receive``: how long they wait, and what ends the wait."""

from __future__ import annotations

from backhaul._transport.base import EndpointFactory, Received
from backhaul._wire.frames import Frame
from backhaul.testing.transport_conformance.lines import MIB, Aside, Line, Pollers, next_frames, pattern, send_all
from backhaul.testing.transport_conformance.suite import ConformanceSuite


class PollingConformance(ConformanceSuite):
    """A poll ends after its timeout, or when another thread wakes it."""

    def test_poll_gives_up_after_its_timeout(self, line: Line) -> None:
        for timeout in (0, 0.001):
            for _ in range(3):
                assert line.here.poll(timeout) is None

    def test_wake_ends_the_next_poll(self, make: EndpointFactory) -> None:
        endpoint = make()
        for _ in range(50):
            endpoint.wake()
            polling = Aside(lambda: endpoint.poll(None))
            assert polling.result() is None

    def test_wake_ends_polls_that_wait(self, make: EndpointFactory) -> None:
        endpoint = make()
        polling = [Aside(lambda: endpoint.poll(None)) for _ in range(4)]
        with Pollers(endpoint, threads=2):  # several threads wait; leaving the block wakes them all
            pass
        while not all(aside.done for aside in polling):
            endpoint.wake()
        assert [aside.result() for aside in polling] == [None] * 4

    def test_wake_takes_no_event_away(self, line: Line) -> None:
        for number in range(100):
            line.near.send(Frame(3, number))
            line.there.wake()
            assert [frame.number for frame in next_frames(line.there, 1)] == [number]

    def test_wake_soon_ends_a_poll_too(self, make: EndpointFactory) -> None:
        endpoint = make()
        for _ in range(20):
            polling = Aside(lambda: endpoint.poll(None))
            endpoint.wake_soon()
            assert polling.result() is None

    def test_timeouts_may_be_long(self, line: Line) -> None:
        years = 1e9
        line.near.send(Frame(3, 1), timeout=years)
        event = None
        while event is None:
            event = line.there.poll(years)
        event.channel.release()
        sending = Aside(lambda: send_all(line.near, [Frame(3, 2, b"", [pattern(8 * MIB)])], timeout=years))
        next_frames(line.there, 1)
        sending.result()

    def test_receive_may_wait_long(self, line: Line) -> None:
        self.hold_or_skip(line.far)
        line.near.send(Frame(3, 1))
        assert isinstance(line.far.receive(1e9), Received)
        line.far.release()
