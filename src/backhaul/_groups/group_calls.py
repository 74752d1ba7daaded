"""Calls of a group that are under way. Knows futures only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from backhaul._rpc.futures import Future
from backhaul._rpc.several_futures import as_completed

T = TypeVar("T")


class GroupCalls(Generic[T]):
    """Several calls of one kind. Their results come in order from ``wait``, or as they come from ``as_completed``.

    Args:
        parts: Futures, and which results each will have: one result, or a list of several.
        names: Where each result comes from, for errors.
        what: What was called, for errors.

    Example:
        >>> import backhaul as bh
        >>> with bh.cluster(3):
        ...     calls = bh.group("*").map_async(abs, [-1, -2, -3, -4])
        ...     len(calls), calls.wait()
        (4, [1, 2, 3, 4])
    """

    def __init__(
        self, parts: Sequence[tuple[Future[Any], int | Sequence[int]]], names: Sequence[str], what: str
    ) -> None:
        self._parts: dict[Future[Any], list[int | Sequence[int]]] = {}
        for future, places in parts:  # two references of this worker to one value have one future
            self._parts.setdefault(future, []).append(places)
        self._names = names
        self._what = what

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        missing = sum(not future.done() for future in self._parts)
        return f"<{len(self)} calls of {self._what}; {missing} under way>"

    def wait(self, timeout: float | None = None) -> list[T]:
        """Wait for all results, and return them in order. If a call fails, cancel the others and raise its error.

        Args:
            timeout: Give up after so many seconds with ``TimeoutError``; the calls themselves go on.

        Example:
            >>> import torch, backhaul as bh
            >>> with bh.cluster(3):
            ...     bh.group("worker[12]").call_async(torch.add, args=(torch.ones(1), 2)).wait()
            [tensor([3.]), tensor([3.])]
        """
        results: dict[int, T] = dict(self.as_completed(timeout))
        return [results[number] for number in range(len(self))]

    def as_completed(self, timeout: float | None = None) -> Iterator[tuple[int, T]]:
        """Yield the number and the value of each result as it comes. If a call fails, cancel the others and raise its
        error.

        Args:
            timeout: Give up after so many seconds with ``TimeoutError``; the calls themselves go on.

        Example:
            >>> import time, backhaul as bh
            >>> with bh.cluster(3):
            ...     naps = bh.group("worker[12]").map_async(time.sleep, [0.2, 0.0])
            ...     [number for number, _ in naps.as_completed()]
            [1, 0]
        """
        for future in as_completed(self._parts, timeout):
            try:
                value = future.wait()
            except BaseException as error:
                self.cancel()
                where = self._where(self._parts[future][0])
                error.add_note(f"in {self._what} on {where}, called together with {len(self) - 1} others")
                raise
            for places in self._parts[future]:
                if isinstance(places, int):
                    yield places, value
                else:
                    yield from zip(places, value, strict=True)

    def cancel(self) -> bool:
        """Cancel the calls that are not done; see ``Future.cancel``. Returns whether there were any."""
        return any([future.cancel() for future in self._parts])

    def _where(self, places: int | Sequence[int]) -> str:
        numbers = [places] if isinstance(places, int) else places
        return ", ".join(f"'{self._names[number]}'" for number in numbers)
