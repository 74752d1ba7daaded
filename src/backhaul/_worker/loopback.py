"""A worker's channel to itself. Knows nothing of calls: frames go the way that frames of other workers go."""

from __future__ import annotations

import functools
import weakref

from backhaul._transport.base import Channel
from backhaul._wire.frames import Frame
from backhaul._wire.memory import Recycler
from backhaul._worker.frame_receiver import FrameReceiver
from backhaul._worker.thread_pool import ThreadPool


class Loopback(Channel):
    """Copies values as every other channel does. Never closes."""

    def __init__(self, thread_pool: ThreadPool, receiver: FrameReceiver) -> None:
        self.peer = "itself"
        self._thread_pool = weakref.ref(
            thread_pool
        )  # weak: peers and calls may keep this channel after the worker is gone
        self._receiver = weakref.ref(receiver)
        self._recycler = Recycler()

    def send(self, frame: Frame, *, timeout: float | None = None) -> None:
        thread_pool = self._thread_pool()
        if thread_pool is not None:
            thread_pool.submit(functools.partial(self._arrive, frame.copied(self._recycler)))

    def _arrive(self, frame: Frame) -> None:
        receiver = self._receiver()
        task = None if receiver is None else receiver.route(self, frame)
        if task is not None:
            task()

    def release(self) -> None:
        """Do nothing: no thread ever holds this channel."""

    def close(self) -> None:
        """Do nothing: this channel never closes."""
