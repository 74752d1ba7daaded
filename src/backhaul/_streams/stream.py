"""The consumer's end of a stream."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, Generic, TypeVar

from backhaul._rpc.call_types import Named, Positional, Target
from backhaul._rpc.futures import Future
from backhaul._rpc.node import Node
from backhaul._rref.handle import RRef
from backhaul._rref.remote import remote
from backhaul._runtime.compile_marks import graph_break
from backhaul._streams.source import ItemSource
from backhaul._worker.worker import current_worker
from backhaul.errors import BackhaulError

T = TypeVar("T")


class RemoteIterator(Generic[T]):
    """Items that a generator makes on another worker; see ``stream``. For ``for`` and ``async for``.

    One thread or task may iterate over it at a time. Closing it, at the end of a ``with`` block for instance, ends the
    generator. A stream that nothing refers to any more is closed too.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(2), bh.stream("worker1", range, args=(5,)) as numbers:
        ...     next(numbers), list(numbers)
        (0, [1, 2, 3, 4])
    """

    def __init__(self, source: RRef[ItemSource[T]], ahead: int, timeout: float | None) -> None:
        self._source: RRef[ItemSource[T]] | None = source
        self._owner = source.owner_name()
        self._timeout = timeout
        self._number = 0  # of the next request
        self._requests = collections.deque[Future[tuple[T] | None]]()
        for _ in range(ahead):
            self._ask()

    def __repr__(self) -> str:
        return f"<RemoteIterator from '{self._owner}'; {'closed' if self._source is None else 'open'}>"

    def __iter__(self) -> RemoteIterator[T]:
        return self

    def __aiter__(self) -> RemoteIterator[T]:
        return self

    def __enter__(self) -> RemoteIterator[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> T:
        if not self._requests:
            raise StopIteration
        future = self._requests[0]
        try:
            future.wait(self._timeout)
        except BaseException:
            if not future.done():  # too late, or interrupted; the iteration may go on
                raise
        found = self._take(future)
        if found is None:
            raise StopIteration
        return found[0]

    async def __anext__(self) -> T:
        if not self._requests:
            raise StopAsyncIteration
        future = self._requests[0]
        async with asyncio.timeout(self._timeout):
            await _done(future)
        found = self._take(future)
        if found is None:
            raise StopAsyncIteration
        return found[0]

    def _take(self, future: Future[tuple[T] | None]) -> tuple[T] | None:
        """What the first request has brought."""
        self._requests.popleft()
        try:
            found = future.wait()
        except BaseException:
            self.close()
            raise
        if found is None:
            self._source = None
            self._requests.clear()  # these bring nothing either
        else:
            self._ask()
        return found

    def _ask(self) -> None:
        assert self._source is not None
        self._requests.append(self._source.rpc_async(timeout=0).take(self._number))
        self._number += 1

    def close(self) -> None:
        """End the generator, and iterate no further. Items that are here already are dropped.

        The generator ends as if ``close`` were called on it here: its ``finally`` blocks run. If it waits for a call of
        its own, the call is cancelled.

        Example:
            >>> import itertools, backhaul as bh
            >>> with bh.cluster(2), bh.stream("worker1", itertools.count) as numbers:
            ...     next(numbers), next(numbers)
            (0, 1)
            >>> list(numbers)
            []
        """
        source, self._source = self._source, None
        requests = list(self._requests)
        self._requests.clear()
        if source is None:
            return
        for future in requests:
            future.cancel()
        try:
            source.rpc_async(timeout=0).close()
        except BackhaulError:
            return  # the worker is lost, or this one has ended


async def _done(future: Future[Any]) -> None:
    """Wait for a future. If this task is cancelled meanwhile, the future is not, as it would be if it were awaited."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    await done.wait()


@graph_break
def stream(
    to: Target,
    func: Callable[..., Iterable[T] | AsyncIterable[T]],
    args: Positional = None,
    kwargs: Named | None = None,
    *,
    ahead: int = 8,
    timeout: float | None = None,
) -> RemoteIterator[T]:
    """Run a generator on another worker, and iterate over its items here.

    Each item is part of the autograd graph, as the result of a call would be. What the generator raises is raised here,
    after the items before it.

    A loop may run a backward pass for each item. If ``args`` need gradients too, all of these passes go back through
    the message with ``args``, so all but the last need ``retain_graph=True``.

    Args:
        to: The worker that makes the items.
        func: A generator function, an async one, or a function that returns something to iterate over.
        args: As for ``rpc_sync``.
        kwargs: As for ``rpc_sync``.
        ahead: How many items may be made before they are asked for here, at least 1. The generator waits while so many
            are not.
        timeout: How long to wait for an item, in seconds; 0: no limit; None: the worker's default (60). After a
            ``TimeoutError`` the iteration may go on.

    Example:
        >>> import torch, backhaul as bh
        >>> def halves(x):
        ...     while True:
        ...         x = x / 2
        ...         yield x
        >>> x = torch.ones(1, requires_grad=True)
        >>> with bh.cluster(2), bh.stream("worker1", halves, args=(x,)) as found:
        ...     (next(found) + next(found)).backward()
        >>> x.grad
        tensor([0.7500])
    """
    if ahead < 1:
        raise ValueError(f"at least one item must be made ahead, got ahead={ahead}")
    node = current_worker().part(Node)
    limit = node.client.timeout if timeout is None else timeout
    source: RRef[Any] = remote(to, ItemSource, args=[func, tuple(args or ()), dict(kwargs or {})], timeout=0)
    return RemoteIterator(source, ahead, limit or None)
