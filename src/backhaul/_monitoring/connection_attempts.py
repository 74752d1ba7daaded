"""Opens the connections of a monitor, several at a time. Knows no worker: each attempt has a key of the monitor's."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, KeysView

from backhaul._transport.base import Channel, Endpoint
from backhaul.errors import BackhaulError

_CONNECT_SECONDS = 1.0
_RETRY_SECONDS = 1.0  # between two attempts with the same key
_MAX_CONNECTING = 8  # connections that are opened at the same time


class ConnectionAttempts:
    """Attempts to connect. Used by one thread; attempts run on others."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._running: dict[str, concurrent.futures.Future[Channel]] = {}
        self._began: dict[str, float] = {}  # when the last attempt with a key began
        self._threads = concurrent.futures.ThreadPoolExecutor(_MAX_CONNECTING, thread_name_prefix="backhaul-monitor")

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def keys(self) -> KeysView[str]:
        """The keys of the attempts that have not been taken yet."""
        return self._running.keys()

    def is_due(self, key: str, now: float) -> bool:
        """Whether it is time for an attempt. If so, the next one is due a moment later."""
        due = key not in self._began or now - self._began[key] >= _RETRY_SECONDS
        if due:
            self._began[key] = now
        return due

    def begin(self, key: str, address: str) -> None:
        """Begin an attempt. Its end wakes a thread that polls the endpoint."""
        self._running[key] = attempt = self._threads.submit(self._endpoint.connect, address, timeout=_CONNECT_SECONDS)
        attempt.add_done_callback(lambda _: self._endpoint.wake())

    def take(self) -> Iterator[tuple[str, Channel | Exception]]:
        """The attempts that have ended, each once: the channel, or why there is none."""
        for key in [key for key, attempt in self._running.items() if attempt.done()]:
            try:
                yield key, self._running.pop(key).result()
            except (OSError, ValueError, BackhaulError) as error:
                yield key, error

    def close(self) -> None:
        """Wait for the attempts that run, a second at most, and close what they have opened."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for attempt in self._running.values():
            if not attempt.cancelled() and attempt.exception() is None:
                attempt.result().close()
        self._running.clear()
