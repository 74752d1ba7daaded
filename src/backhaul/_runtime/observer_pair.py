"""Parts of observers: two that act as one, since a profile may be open while a monitor watches; and one that sees
nothing, from which observers are derived that see a part. Knows no profile and no monitor.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from backhaul._runtime.observer import ArrivedCall, CallTrace, GradientKey, Observer, ServeTrace, Sessions


def of_all(observers: Sequence[Observer]) -> Observer | None:
    """One observer that stands for all of them; None if there is none."""
    made: Observer | None = None
    for observer in observers:
        made = observer if made is None else ObserverPair(made, observer)
    return made


def both_traces(one: ServeTrace | None, other: ServeTrace | None) -> ServeTrace | None:
    """One trace that stands for both."""
    if one is None or other is None:
        return one or other
    return _ServeTracePair(one, other)


class _CallTracePair:
    """Implements ``CallTrace``. Only one of the two has a note."""

    __slots__ = ("_one", "_other")

    def __init__(self, one: CallTrace, other: CallTrace) -> None:
        self._one, self._other = one, other

    def encoded(self) -> bytes:
        one, other = self._one.encoded(), self._other.encoded()
        return one or other

    def sent(self, nbytes: int) -> None:
        self._one.sent(nbytes)
        self._other.sent(nbytes)

    def received(self, nbytes: int) -> None:
        self._one.received(nbytes)
        self._other.received(nbytes)

    def opened(self) -> None:
        self._one.opened()
        self._other.opened()

    def done(self, error: BaseException | None) -> None:
        self._one.done(error)
        self._other.done(error)


class _ServeTracePair:
    """Implements ``ServeTrace``."""

    __slots__ = ("_one", "_other")

    def __init__(self, one: ServeTrace, other: ServeTrace) -> None:
        self._one, self._other = one, other

    def decoded(self, label: str) -> None:
        self._one.decoded(label)
        self._other.decoded(label)

    def ran(self) -> None:
        self._one.ran()
        self._other.ran()

    def resumed(self) -> None:
        self._one.resumed()
        self._other.resumed()

    def replied(self, nbytes: int) -> None:
        self._one.replied(nbytes)
        self._other.replied(nbytes)


class ObserverPair:
    """Implements ``Observer``: tells both observers."""

    def __init__(self, one: Observer, other: Observer) -> None:
        self._one, self._other = one, other

    def now(self) -> int:
        return self._one.now()

    def arrived(self, call: ArrivedCall) -> int:
        at = self._one.arrived(call)
        self._other.arrived(call)
        return at

    def call(self, mode: str, label: str, callee: int) -> CallTrace | None:
        other = self._other.call(mode, label, callee)  # first: a profile asks the callee to join, by a call of its own
        one = self._one.call(mode, label, callee)
        return one or other if one is None or other is None else _CallTracePair(one, other)

    def serve(self, note: bytes, caller: int, arrived: int) -> ServeTrace | None:
        return both_traces(self._one.serve(note, caller, arrived), self._other.serve(note, caller, arrived))

    def waiting(self, inner: contextlib.AbstractContextManager[None]) -> contextlib.AbstractContextManager[None]:
        return self._one.waiting(self._other.waiting(inner))

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        with self._one.going_on(), self._other.going_on():
            yield

    def sessions(self) -> Sessions:
        one = self._one.sessions()
        return (*one, *(session for session in self._other.sessions() if session not in one))

    @contextlib.contextmanager
    def drive(self, sessions: Sessions, context: int, number: int) -> Iterator[None]:
        with self._one.drive(sessions, context, number), self._other.drive(sessions, context, number):
            yield

    @contextlib.contextmanager
    def group(self, sessions: Sessions, key: GradientKey, sender: int, arrived: int) -> Iterator[None]:
        with self._one.group(sessions, key, sender, arrived), self._other.group(sessions, key, sender, arrived):
            yield

    def gradient(self, sessions: Sessions, key: GradientKey, to: int, begun: int, nbytes: int) -> None:
        self._one.gradient(sessions, key, to, begun, nbytes)
        self._other.gradient(sessions, key, to, begun, nbytes)

    def prepare(self, sessions: Sessions, worker: int) -> None:
        self._one.prepare(sessions, worker)
        self._other.prepare(sessions, worker)

    def report(self, sessions: Sessions, worker: int, *, out: bool) -> None:
        self._one.report(sessions, worker, out=out)
        self._other.report(sessions, worker, out=out)


class IdleObserver:
    """Implements ``Observer``: sees nothing."""

    def now(self) -> int:
        return time.time_ns()

    def arrived(self, call: ArrivedCall) -> int:
        return time.time_ns()

    def call(self, mode: str, label: str, callee: int) -> CallTrace | None:
        return None

    def serve(self, note: bytes, caller: int, arrived: int) -> ServeTrace | None:
        return None

    def waiting(self, inner: contextlib.AbstractContextManager[None]) -> contextlib.AbstractContextManager[None]:
        return inner

    def going_on(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def sessions(self) -> Sessions:
        return ()

    def group(
        self, sessions: Sessions, key: GradientKey, sender: int, arrived: int
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def drive(self, sessions: Sessions, context: int, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gradient(self, sessions: Sessions, key: GradientKey, to: int, begun: int, nbytes: int) -> None:
        pass

    def prepare(self, sessions: Sessions, worker: int) -> None:
        pass

    def report(self, sessions: Sessions, worker: int, *, out: bool) -> None:
        pass
