"""Listeners of one kind of event: the one way to subscribe to something that happens on a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Listeners(Generic[P, R]):
    """The functions to call when one kind of event happens. Thread-safe.

    An attribute named ``on_<event>`` holds them. Calling the attribute subscribes: ``worker.on_close(function)``. The
    comment at the attribute says on which thread listeners run and whether they may block.

    Args:
        newest_first: Whether the last listener that subscribed is called first.

    Example:
        >>> on_close = Listeners()
        >>> stop = on_close(print)
        >>> _ = on_close.notify("closing")
        closing
        >>> stop()
        >>> on_close.notify("closing")
        []
    """

    __slots__ = ("_listeners", "_newest_first")

    def __init__(self, *, newest_first: bool = False) -> None:
        self._listeners: list[Callable[P, R]] = []
        self._newest_first = newest_first

    def __call__(self, listener: Callable[P, R]) -> Callable[[], None]:
        """Call ``listener`` at each event from now on; return a function that ends this."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call all listeners, one after the other, and return what they returned."""
        listeners = self._listeners[::-1] if self._newest_first else self._listeners[:]
        return [listener(*args, **kwargs) for listener in listeners]
