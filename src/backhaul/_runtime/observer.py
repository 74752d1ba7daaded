"""The interface through which a profiler or a monitor sees what a worker does. Knows neither.

A worker has an observer while a profile is open or a monitor watches. The rest of the time each observed place costs
one test of an attribute that is None.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

Sessions = tuple[int, ...]
"""Ids of the profiles that record something."""

GradientKey = tuple[int, int, int, int]
"""Identifies a gradient message: context, driver, number of the pass, number of the message."""


class CallTrace(Protocol):
    """Records a call at the caller. The methods are called in this order, and ``done`` is called in every case."""

    def encoded(self) -> bytes:
        """The arguments are encoded. Returns a note that is sent with them; empty: there is none."""

    def sent(self, nbytes: int) -> None:
        """The channel has taken the request."""

    def received(self, nbytes: int) -> None:
        """The reply has arrived. It may wait for a thread to decode it."""

    def opened(self) -> None:
        """A thread starts to decode the reply."""

    def done(self, error: BaseException | None) -> None:
        """The call is over."""


class ServeTrace(Protocol):
    """Records a call at the callee."""

    def decoded(self, label: str) -> None:
        """The arguments are decoded. The function starts to run."""

    def ran(self) -> None:
        """The function has returned. If it returned a future or a coroutine, the result comes later."""

    def resumed(self) -> None:
        """The result is known. A thread starts to make the reply."""

    def replied(self, nbytes: int) -> None:
        """The channel has taken the reply."""


class ArrivedCall(Protocol):
    """A request that has arrived, as its callee keeps it. ``function``: once the request is decoded."""

    function: Any
    trace: ServeTrace | None


class Observer(Protocol):
    """Sees what a worker does. Its methods are short. They never block, except those that say so."""

    def now(self) -> int:
        """Return the time in nanoseconds."""

    def arrived(self, call: ArrivedCall) -> int:
        """A request has arrived. Returns the time. May set the trace of the call."""

    def call(self, mode: str, label: str, callee: int) -> CallTrace | None:
        """A call starts. May block, to ask the callee to observe too."""

    def serve(self, note: bytes, caller: int, arrived: int) -> ServeTrace | None:
        """This thread is about to decode a request that came with a note, at the time ``arrived``."""

    def waiting(self, inner: contextlib.AbstractContextManager[None]) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a wait of this thread. It enters ``inner``."""

    def going_on(self) -> contextlib.AbstractContextManager[None]:
        """This thread continues a call whose function has returned: a callback, or a step of a coroutine."""

    def sessions(self) -> Sessions:
        """Return the profiles that record what this thread does."""

    def drive(self, sessions: Sessions, context: int, number: int) -> contextlib.AbstractContextManager[None]:
        """A backward pass at its driver. ``number`` is the number that the driver gave it."""

    def group(
        self, sessions: Sessions, key: GradientKey, sender: int, arrived: int
    ) -> contextlib.AbstractContextManager[None]:
        """This thread runs the groups that became ready through gradients. These came from ``sender`` at the time
        ``arrived``; -1: they are the gradients of the roots.
        """

    def gradient(self, sessions: Sessions, key: GradientKey, to: int, begun: int, nbytes: int) -> None:
        """This worker has sent a gradient message. It started to make the message at the time ``begun``."""

    def prepare(self, sessions: Sessions, worker: int) -> None:
        """This worker is about to send gradients to ``worker``. May block."""

    def report(self, sessions: Sessions, worker: int, *, out: bool) -> None:
        """A report on a pass was sent to its driver, or came from a worker."""
