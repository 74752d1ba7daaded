"""When a channel is parked, and that it is readable again soon."""

from __future__ import annotations

import threading

import pytest

from backhaul._transport.base import Received
from backhaul._transport.sockets.channel import SocketChannel
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._wire.frames import Frame


def test_a_timer_that_expires_while_a_burst_is_sent_unparks(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = SocketEndpoint(secret=b"s" * 16), SocketEndpoint(secret=b"s" * 16)
    came: list[Received] = []

    def let_in() -> None:
        while not came:
            event = there.poll(30.0)
            if isinstance(event, Received):
                came.append(event)

    host = threading.Thread(target=let_in)
    host.start()
    try:
        channel = here.connect(there.addresses[0], timeout=30.0)
        channel.send(Frame(40, 1))
        host.join(10)
        flush_soon = here.flush_soon

        def flush_soon_and_be_slow(channel: SocketChannel) -> None:
            flush_soon(channel)
            while here.unflushed:  # as another thread does while this one waits for the interpreter
                here.poll(30.0)

        monkeypatch.setattr(here, "flush_soon", flush_soon_and_be_slow)
        channel.send_soon(Frame(40, 2))
        came[0].channel.send(Frame(41, 3))
        event = here.poll(30.0)
        assert isinstance(event, Received)
        assert [frame.number for frame in event.frames] == [3]
    finally:
        here.close()
        there.close()
