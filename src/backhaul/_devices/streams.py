"""The streams of this process that Backhaul has seen, and whether CUDA still works. Knows no message and no memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from backhaul._devices.backend import DeviceEvent, Key, Stream, StreamBackend

log = logging.getLogger("backhaul")


class Streams:
    """Thread-safe and without locks: destructors come here too, from anywhere.

    Attributes:
        trouble: What CUDA said when a device had failed, after which nothing can be done on it; empty: nothing.
    """

    def __init__(self, backend: StreamBackend) -> None:
        self.trouble = ""
        self._backend = backend
        self._known: dict[Key, Stream] = {}

    def know(self, stream: Stream) -> None:
        """Remember a stream that lives as long as the process."""
        self._known.setdefault(stream.key, stream)

    def known(self) -> dict[Key, Stream]:
        """All streams that were ever current where Backhaul asked."""
        return dict(self._known)

    def current(self, device: int) -> Stream:
        """The calling thread's stream."""
        stream = self._backend.current(device)
        key = stream.key
        if key not in self._known and self._backend.lasting(stream):
            self._known.setdefault(key, stream)
        return stream

    def are_idle(self) -> bool:
        """Whether no known stream has work."""
        return bool(self.attempt(lambda: all(stream.query() for stream in list(self._known.values()))))

    def failed(self) -> bool:
        """Whether nothing can be done on the devices any more."""
        if not self.trouble:
            try:
                for device in self._backend.devices():
                    self._backend.default(device).query()
            except RuntimeError as error:
                self.trouble = (str(error) or type(error).__name__).splitlines()[0]
                log.error("CUDA has failed in this process: %s", self.trouble)
        return bool(self.trouble)

    def attempt(self, act: Callable[[], Any]) -> Any:
        """Call ``act``. Where a device has failed, log that and return None: messages go on, to report the failure."""
        try:
            return act()
        except RuntimeError as error:
            if not self.failed():
                log.warning("CUDA could not order streams that others may wait for: %s", error)
            return None

    def follow_events(self, stream: Stream, events: Iterable[tuple[Key, DeviceEvent]]) -> None:
        """What is queued on ``stream`` from now on starts after these events of other streams."""
        key = stream.key
        for origin, event in events:
            if origin != key:
                self._backend.wait(stream, event)

    def follow_stream(self, stream: Stream, other: Stream) -> None:
        """What is queued on ``stream`` from now on starts after all that ``other`` has now."""
        backend = self._backend
        key = other.key
        if key == stream.key or other.query():
            return
        event = backend.event(key[0])
        backend.record(event, other)
        backend.wait(stream, event)
