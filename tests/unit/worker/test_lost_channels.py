"""What is kept of a channel that is lost."""

from __future__ import annotations

import gc
import threading
import weakref

from backhaul._runtime.runtime import Runtime
from backhaul._transport.base import Lost, Received
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._wire.frames import Frame
from backhaul._worker.frame_receiver import FrameReceiver


class Call:
    """Holds a channel, and refers to the objects of the user that it has sent."""


def test_nothing_is_kept_of_a_lost_channel_that_a_thread_has_waited_for() -> None:
    here, there = SocketEndpoint(secret=b"s" * 16), SocketEndpoint(secret=b"s" * 16)
    runtime, came = Runtime(), threading.Event()
    receiver = FrameReceiver(here, runtime)

    def let_in() -> None:
        for _ in range(10):
            if isinstance(there.poll(30.0), Received):
                came.set()
                return

    threading.Thread(target=let_in, daemon=True).start()
    try:
        channel = here.connect(there.addresses[0], timeout=30.0)
        channel.send(Frame(40, 1))
        assert came.wait(30)
        assert channel.acquire()
        assert not receiver.attend([channel], runtime.one_shot(), 0.001, ())
        call = Call()
        assert channel.acquire(call)
        there.close()
        event = channel.receive(5.0)
        assert isinstance(event, Lost)
        receiver.deliver(event)
        sent = weakref.ref(call)
        del channel, event, call
        gc.collect()
        assert sent() is None
    finally:
        here.close()
        there.close()
