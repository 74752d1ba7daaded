"""Decides whether an asynchronous call is sent at once, or together with calls to any workers that follow it. Gradients
that are sent while the engine goes on are paced in the same way.
"""

from __future__ import annotations

CLOSE_SECONDS = 0.0002  # calls within this time are worth sending together
BURST_CALLS = 4  # this many calls must follow each other closely before one is held back
WINDOW_SECONDS = 0.0005  # what is held back goes out after this time, if calls go on so long


class SendPacing:
    """The recent asynchronous calls of one worker. Threads may race here: a race only changes how calls are batched."""

    __slots__ = ("_called_at", "_close_calls", "_sent_at")

    def __init__(self) -> None:
        self._called_at = 0.0  # when the last call was made
        self._close_calls = 0  # how many calls followed each other closely
        self._sent_at = 0.0  # when calls that were held back were last sent

    def holds_back(self, now: float) -> bool:
        """Count a call that is made now; whether to hold it back."""
        close = now < self._called_at + CLOSE_SECONDS
        self._called_at = now
        if not close:
            self._close_calls = 0
            return False
        self._close_calls += 1
        if self._close_calls == BURST_CALLS:
            self._sent_at = now
        return self._close_calls >= BURST_CALLS

    def ends_window(self, now: float) -> bool:
        """Whether what was held back goes out now."""
        if now < self._sent_at + WINDOW_SECONDS:
            return False
        self._sent_at = now
        return True
