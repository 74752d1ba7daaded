"""The bytes of a channel that wait to be written. Knows no socket."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence

from backhaul._wire.memory import Buffer

MAX_COPIED_BYTES = 1 << 16
"""A frame up to this size may be copied into the queue, so that its sender need not wait for another writer."""

MAX_PARTS = 512
"""Parts to write in one system call. The kernel takes 1024."""

_MAX_QUEUED_BYTES = 16 << 20  # copied frames that a channel queues before senders wait


class WriteQueue:
    """Parts in the order in which they are written. The memory is the queue's own. Thread-safe.

    Attributes:
        parts: What waits. Empty: nothing does.
        nbytes: How many bytes wait.
    """

    __slots__ = ("_lock", "nbytes", "parts")

    def __init__(self) -> None:
        self.parts: collections.deque[Buffer] = collections.deque()
        self.nbytes = 0
        self._lock = threading.Lock()  # guards the two above, and is held only while they change

    def accepts(self, parts: Sequence[Buffer]) -> bool:
        """Whether parts may be copied into the queue so that their sender need not wait."""
        return self.nbytes < _MAX_QUEUED_BYTES and len(parts) <= MAX_PARTS and sum(map(len, parts)) <= MAX_COPIED_BYTES

    def append(self, data: Buffer) -> bool:
        """Add data at the end. Returns whether the queue was empty, so that the caller must see to it."""
        with self._lock:
            empty = not self.parts
            self.parts.append(data)
            self.nbytes += len(data)
            return empty

    def put_back(self, parts: Sequence[Buffer]) -> None:
        """Put parts at the head of the queue."""
        with self._lock:
            self.parts.extendleft(reversed(parts))
            self.nbytes += sum(map(len, parts))

    def take_whole(self, most: int) -> list[Buffer]:
        """Remove and return the next parts that fit into ``most`` bytes. Parts are whole frames, unless the queue is
        stalled.
        """
        batch: list[Buffer] = []
        if self.parts:
            with self._lock:
                while self.parts and len(batch) < MAX_PARTS and len(self.parts[0]) <= most:
                    part = self.parts.popleft()
                    batch.append(part)
                    most -= len(part)
                    self.nbytes -= len(part)
        return batch

    def take(self, most: int) -> list[Buffer]:
        """Remove and return the next parts, ``most`` bytes at most."""
        batch: list[Buffer] = []
        left = most
        with self._lock:
            while self.parts and len(batch) < MAX_PARTS and left:
                part = self.parts.popleft()
                if len(part) > left:
                    whole = memoryview(part)
                    part, rest = whole[:left], whole[left:]
                    self.parts.appendleft(rest)
                batch.append(part)
                left -= len(part)
            self.nbytes -= most - left
        return batch


def without(parts: Sequence[Buffer], count: int) -> list[Buffer]:
    """The parts without their first ``count`` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *parts[index + 1 :]]
        count -= len(part)
    return []
