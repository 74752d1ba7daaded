"""Decides whether an asynchronous call to one peer is sent at once or together with the calls that follow it."""

from __future__ import annotations

CLOSE_SECONDS = 0.0002  # calls to one peer within this time are worth sending together
BURST_CALLS = 4  # this many calls must follow each other closely before one is held back


class SendPacing:
    """The recent asynchronous calls to one peer. Threads may race here: a race only changes how calls are batched."""

    __slots__ = ("_called_at", "_close_calls", "_sent_at")

    def __init__(self) -> None:
        self._called_at = 0.0  # when the last call was made
        self._close_calls = 0  # how many calls followed each other closely
        self._sent_at = 0.0  # when a call was last sent at once

    def sends_at_once(self, now: float) -> bool:
        """Count a call that is made now; whether to send it at once."""
        self._close_calls = self._close_calls + 1 if now < self._called_at + CLOSE_SECONDS else 0
        self._called_at = now
        if self._close_calls < BURST_CALLS or now >= self._sent_at + CLOSE_SECONDS:
            self._sent_at = now
            return True
        return False
