"""Where a profiler looks on. A worker has an observer while a profile is open; the rest of the time each of these
places costs one look at an attribute that is None.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

Sessions = tuple[int, ...]
"""Ids of the profiles that something belongs to."""

GradientKey = tuple[int, int, int, int]
"""Names a gradient message: context, driver, number of the pass, number of the message."""


class CallTrace(Protocol):
    """A call, at the caller. Methods are called in this order; ``done`` always is."""

    def encoded(self) -> bytes:
        """The arguments are bytes now. Returns a note that goes with them."""

    def sent(self, nbytes: int) -> None:
        """The request was handed to the channel."""

    def received(self, nbytes: int) -> None:
        """The reply has come; it may wait for a thread to read it."""

    def opened(self) -> None:
        """A thread begins to read the reply."""

    def done(self, error: BaseException | None) -> None:
        """The call is over."""


class ServeTrace(Protocol):
    """A call, at the callee."""

    def decoded(self, label: str) -> None:
        """The arguments are there; the function begins to run."""

    def ran(self) -> None:
        """The function has returned. Where it returned a future or a coroutine, the result is still to come."""

    def resumed(self) -> None:
        """The result is there; it is made into a reply."""

    def replied(self, nbytes: int) -> None:
        """The reply was handed to the channel."""


class Observer(Protocol):
    """Sees what a worker does. Its methods are short and never block, but for those that say so."""

    def now(self) -> int:
        """The time, in nanoseconds."""

    def call(self, mode: str, label: str, callee: int) -> CallTrace | None:
        """A call begins. May block: the callee is asked to look on, too."""

    def serve(self, note: bytes, caller: int, arrived: int) -> ServeTrace | None:
        """A request with a note, which came at that time, is about to be decoded by this thread."""

    def waiting(self, inner: contextlib.AbstractContextManager[None]) -> contextlib.AbstractContextManager[None]:
        """A thread is about to wait."""

    def going_on(self) -> contextlib.AbstractContextManager[None]:
        """This thread goes on with a call whose function has returned: a callback, or a step of a coroutine."""

    def sessions(self) -> Sessions:
        """The profiles that what this thread does belongs to."""

    def drive(self, sessions: Sessions, context: int, number: int) -> contextlib.AbstractContextManager[None]:
        """A backward pass, at its driver; ``number`` is the driver's."""

    def group(
        self, sessions: Sessions, key: GradientKey, sender: int, arrived: int
    ) -> contextlib.AbstractContextManager[None]:
        """This thread does what gradients made possible that came at that time. ``sender`` -1: they are the roots'."""

    def gradient(self, sessions: Sessions, key: GradientKey, to: int, begun: int, nbytes: int) -> None:
        """A gradient message was sent; making it took since ``begun``."""

    def prepare(self, sessions: Sessions, worker: int) -> None:
        """Gradients are about to go there. May block."""

    def report(self, sessions: Sessions, worker: int, *, out: bool) -> None:
        """A report on a pass went to its driver, or came from a worker."""
