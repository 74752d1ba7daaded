"""The producer's end of a stream: a generator, and the requests for its items.

The consumer numbers its requests, one for each item. Each is a call, and calls may begin in any order, so each waits
for its turn. How many requests are under way is the consumer's credit.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, Generic, TypeVar

from backhaul._rpc.futures import Future
from backhaul._wire.callables import label_of

T = TypeVar("T")


class ItemSource(Generic[T]):
    """A generator that one consumer asks for items. Lives on the producer. Thread-safe.

    Args:
        func: Makes the items: a generator function, an async one, or one that returns something to iterate over.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        made = func(*args, **kwargs)
        self._items: Iterator[T] | AsyncIterator[T]
        if hasattr(made, "__aiter__"):
            self._items = aiter(made)
        elif hasattr(made, "__iter__") or hasattr(made, "__getitem__"):
            self._items = iter(made)
        else:
            if inspect.iscoroutine(made):
                made.close()
            raise TypeError(
                f"{label_of(func)} returned {type(made).__name__}; a stream needs a generator, an async generator, "
                "or something else to iterate over"
            )
        self._lock = threading.Lock()  # guards what follows
        self._turn = 0  # the number of the request that may take an item
        self._waiting: dict[int, Future[None]] = {}
        self._skipped: set[int] = set()  # requests that were cancelled before their turn
        self._taking = False
        self._closed = False
        self._over = False

    def take(self, number: int) -> tuple[T] | Coroutine[Any, Any, tuple[T] | None] | None:
        """Make the item of the request with this number. None if there are no more."""
        if isinstance(self._items, AsyncIterator):
            return self._take_later(number)
        try:
            with self._ends_if_cancelled():
                self._turn_of(number).wait()
            if self._over or self._closed:
                return None
            with self._ends_with_an_error():
                return (next(self._items),)
            return None
        finally:
            self._end_turn(number)
            if self._is_to_be_closed():
                self._close_items()

    async def _take_later(self, number: int) -> tuple[T] | None:
        assert isinstance(self._items, AsyncIterator)
        try:
            with self._ends_if_cancelled():
                await self._turn_of(number)
            if self._over or self._closed:
                return None
            with self._ends_with_an_error():
                return (await anext(self._items),)
            return None
        finally:
            self._end_turn(number)
            if self._is_to_be_closed():
                await self._close_items_later()

    @contextlib.contextmanager
    def _ends_if_cancelled(self) -> Iterator[None]:
        """Inside, a request waits for its turn. It is cancelled if the consumer closes the stream, or is lost."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._closed = True
            raise

    @contextlib.contextmanager
    def _ends_with_an_error(self) -> Iterator[None]:
        """Inside, the next item is made. If that fails, or there is none, the generator has ended."""
        try:
            yield
        except (StopIteration, StopAsyncIteration):
            self._over = True
        except BaseException:
            self._over = True
            raise

    def close(self) -> Coroutine[Any, Any, None] | None:
        """Make no more items, and run the ``finally`` blocks of the generator."""
        with self._lock:
            self._closed = True
        if not self._is_to_be_closed():
            return None
        if isinstance(self._items, AsyncIterator):
            return self._close_items_later()
        self._close_items()
        return None

    def _turn_of(self, number: int) -> Future[None]:
        """A future that is done when the request with this number has its turn."""
        turn: Future[None] = Future()
        with self._lock:
            if number > self._turn:
                self._waiting[number] = turn
                return turn
            self._taking = True
        turn.set_result(None)
        return turn

    def _end_turn(self, number: int) -> None:
        """A request has had its turn, or is cancelled before it."""
        with self._lock:
            self._waiting.pop(number, None)
            self._skipped.add(number)
            if number != self._turn:
                return
            while self._turn in self._skipped:
                self._skipped.remove(self._turn)
                self._turn += 1
            following = self._waiting.pop(self._turn, None)
            self._taking = following is not None
        if following is not None:
            following.set_result(None)

    def _is_to_be_closed(self) -> bool:
        """Whether the caller has to close the generator."""
        with self._lock:
            if not self._closed or self._taking or self._over:
                return False
            self._over = True
            return True

    def _close_items(self) -> None:
        if inspect.isgenerator(self._items):
            self._items.close()

    async def _close_items_later(self) -> None:
        if inspect.isasyncgen(self._items):
            await self._items.aclose()
