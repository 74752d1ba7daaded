"""Several futures at once: all of them, or each as soon as it is done."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast, overload

import torch.futures

from backhaul._devices import seam
from backhaul._rpc.futures import Future, call_when_done, is_done, reading
from backhaul._runtime.compile_marks import graph_break
from backhaul._runtime.runtime import OneShotEvent
from backhaul._worker import deadlines
from backhaul._worker.worker import blocking, runtime_here

T = TypeVar("T")


@overload
def collect_all(futures: Sequence[torch.futures.Future[T]]) -> Future[list[torch.futures.Future[T]]]: ...
@overload
def collect_all(futures: Sequence[torch.futures.Future[Any]]) -> Future[list[torch.futures.Future[Any]]]: ...
@graph_break
def collect_all(futures: Sequence[torch.futures.Future[Any]]) -> Future[list[torch.futures.Future[Any]]]:
    """Return a future of ``futures`` that is done when all of them are.

    It fails if one of them failed, with the exception of the first in the list that did.

    Example:
        >>> one, two = Future(), Future()
        >>> both = collect_all([one, two])
        >>> one.set_result(1)
        >>> two.set_result(2)
        >>> [future.value() for future in both.wait()]
        [1, 2]
    """
    members = list(futures)
    made: Future[list[torch.futures.Future[Any]]] = Future()
    made._cancel = lambda: any([member.cancel() for member in members if isinstance(member, Future)])

    def finish() -> None:
        for member in members:
            try:
                member.wait()
            except BaseException as error:
                made.set_exception(error)
                return
        made.set_result(members)

    _count_down(members, finish)
    return made


def _count_down(futures: Sequence[torch.futures.Future[Any]], finish: Callable[[], None]) -> None:
    """Call ``finish`` when all futures are done; at once if they are."""
    left = len(futures) + 1
    lock = threading.Lock()  # guards left

    def count(_: Any) -> None:
        nonlocal left
        with lock:
            left -= 1
            over = not left
        if over:
            finish()

    for future in futures:
        call_when_done(future, count)
    count(None)


@overload
def wait_all(futures: Sequence[torch.futures.Future[T]]) -> list[T]: ...
@overload
def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]: ...
@graph_break
def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """Wait for all and return their values in order; raise the first exception in that order.

    Example:
        >>> one, two = Future(), Future()
        >>> one.set_result(1), two.set_result(2)
        (None, None)
        >>> wait_all([one, two])
        [1, 2]
    """
    members = list(futures)
    missing = [member for member in members if not is_done(member)]
    if missing:
        one_shot = runtime_here().one_shot()
        _count_down(missing, one_shot.open)
        with blocking():
            deadlines.wait(one_shot, None, "not all futures were done", reading(missing))
    return list(map(seam.streams.value_of, members))


@graph_break
def as_completed(futures: Iterable[torch.futures.Future[T]], timeout: float | None = None) -> Iterator[Future[T]]:
    """Yield each future as soon as it is done, whether it has a value or failed.

    Args:
        futures: The futures. Each is yielded once.
        timeout: Seconds to wait in all; None: no limit.

    Raises:
        TimeoutError: Some futures were not done within ``timeout``.

    Example:
        >>> one, two = Future(), Future()
        >>> two.set_result(2)
        >>> done = as_completed([one, two])
        >>> next(done).value()
        2
        >>> one.set_result(1)
        >>> next(done).value()
        1
    """
    missing = list(dict.fromkeys(futures))
    return _as_completed(missing, timeout)


def _as_completed(missing: list[torch.futures.Future[T]], timeout: float | None) -> Iterator[Future[T]]:
    end = None if timeout is None else time.monotonic() + timeout
    done = collections.deque[torch.futures.Future[T]]()
    bell: list[OneShotEvent] = []  # of the thread that waits

    def note(future: torch.futures.Future[T]) -> Callable[[Any], None]:
        def add(_: Any) -> None:
            done.append(future)
            for event in bell:
                event.open()

        return add

    for future in missing:
        call_when_done(future, note(future))
    while missing:
        if not done:
            event = runtime_here().one_shot()
            bell[:] = [event]
            if done:  # since it was looked at
                event.open()
            left = None if end is None else max(end - time.monotonic(), 0.0)
            with blocking():
                found = deadlines.wait(event, left, "not all futures were done", reading(missing))
            bell.clear()
            if not found and not done:
                raise TimeoutError(f"{len(missing)} futures were not done within {timeout:g} s")
        future = done.popleft()
        missing.remove(future)
        yield cast("Future[T]", future)
