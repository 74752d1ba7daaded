"""Frames that may wait for others are sent in the end, also if another thread writes at the same time."""

from __future__ import annotations

import threading

import pytest

from backhaul._transport.base import Received
from backhaul._transport.sockets.endpoint import SocketEndpoint
from backhaul._transport.sockets.write_queue import WriteQueue
from backhaul._wire.frames import Frame

PATIENCE = 30.0
SECRET = b"q" * 32


def test_a_queue_that_is_emptied_while_something_is_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread writes what waits just before a frame joins it: then that one is the first again."""
    append = WriteQueue.append
    here, there = SocketEndpoint(secret=SECRET), SocketEndpoint(secret=SECRET)

    def emptied(self: WriteQueue, data: bytes) -> bool:
        here.flush()
        return append(self, data)

    monkeypatch.setattr(WriteQueue, "append", emptied)
    stop, arrived, all_there = threading.Event(), [0], threading.Event()

    def listen(endpoint: SocketEndpoint) -> None:
        while not stop.is_set():
            event = endpoint.poll(0.05)
            if isinstance(event, Received):
                arrived[0] += len(event.frames)
                event.channel.release()
                if arrived[0] == 2:
                    all_there.set()

    threads = [threading.Thread(target=listen, args=(end,)) for end in (here, there)]
    for thread in threads:
        thread.start()
    try:
        channel = here.connect(there.addresses[0], timeout=PATIENCE)
        for number in range(2):
            channel.send_soon(Frame(3, number, b"x"))
        assert all_there.wait(PATIENCE)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        here.close()
        there.close()


def test_a_large_frame_that_may_wait_keeps_its_timeout() -> None:
    """It is not queued but sent at once, to a peer that does not read."""
    here, there = SocketEndpoint(secret=SECRET), SocketEndpoint(secret=SECRET)
    stop = threading.Event()

    def shake_hands() -> None:
        while not stop.is_set():
            there.poll(0.05)

    thread = threading.Thread(target=shake_hands)
    thread.start()
    try:
        channel = here.connect(there.addresses[0], timeout=PATIENCE)
        stop.set()
        thread.join()
        sender = threading.Thread(
            target=lambda: channel.send_soon(Frame(3, 0, b"", [bytes(64 << 20)]), timeout=0.05), daemon=True
        )
        sender.start()
        sender.join(PATIENCE)
        assert not sender.is_alive()
    finally:
        stop.set()
        thread.join()
        here.close()
        there.close()
