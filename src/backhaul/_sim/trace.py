"""The record of what happened in a simulation."""

from __future__ import annotations

import hashlib

_BATCH_LINES = 512  # hashed at once


class Trace:
    """Lines of text, one for each event. Two runs were the same if their digests are equal.

    Args:
        keep: Whether to keep the lines too, and not only their hash.
    """

    def __init__(self, keep: bool = False) -> None:
        self.lines: list[str] | None = [] if keep else None
        self._fresh: list[str] = []  # not hashed yet
        self._hash = hashlib.blake2b(digest_size=16)

    def note(self, line: str) -> None:
        """Add an event."""
        self._fresh.append(line)
        if len(self._fresh) >= _BATCH_LINES:
            self._flush()

    def _flush(self) -> None:
        self._hash.update("\n".join((*self._fresh, "")).encode())
        if self.lines is not None:
            self.lines += self._fresh
        self._fresh.clear()

    @property
    def digest(self) -> str:
        """The hash of all events so far."""
        self._flush()
        return self._hash.hexdigest()
