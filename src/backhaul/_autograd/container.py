"""All contexts of one worker, and the ids that are unique in the cluster."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable

from backhaul._autograd.context import Context
from backhaul._autograd.forward.functions import ContextId, MessageId
from backhaul._types import first_number
from backhaul.errors import UnknownContextError

_COUNTER_BITS = 48


def split(number: int) -> tuple[int, int]:
    """The worker that made the id of a context or a message, and how that worker counts it."""
    return number >> _COUNTER_BITS, number & (1 << _COUNTER_BITS) - 1


_REMEMBERED = 4096  # ids of released contexts that are still recognised


class Container:
    """Thread-safe."""

    def __init__(self, worker: int, incarnation: str = "") -> None:
        self._worker = worker
        self._high = worker << _COUNTER_BITS
        self._contexts: dict[int, Context] = {}
        self._lock = threading.Lock()  # guards _contexts and _released together
        self._released: collections.OrderedDict[int, None] = collections.OrderedDict()
        first = first_number(incarnation)
        self._context_numbers = itertools.count(first)
        self._message_numbers = itertools.count(first)

    def new(self) -> Context:
        """A context with an id that no other context of the cluster has."""
        made = Context(ContextId(self._high | next(self._context_numbers)))
        with self._lock:
            self._contexts[made.id] = made
        return made

    def new_message(self) -> MessageId:
        """An id that no other message of the cluster has."""
        return MessageId(self._high | next(self._message_numbers))

    def get(self, number: int) -> Context:
        """The context of that id. Raises ``UnknownContextError``."""
        context = self._contexts.get(number)
        if context is None:
            raise self.unknown(number)
        return context

    def find(self, number: int) -> Context | None:
        """The context of that id; None if it is not here."""
        return self._contexts.get(number)

    def was_released(self, number: int) -> bool:
        """Whether a context of that id is over, as far as is remembered."""
        return number in self._released

    def unknown(self, number: int) -> UnknownContextError:
        """The error for an id that names no context here."""
        what = "was released" if self.was_released(number) else "is not known here"
        return UnknownContextError(f"context {number} {what}", context=number)

    def get_or_create(self, number: ContextId) -> Context | None:
        """The context of a message that arrived; None if it was released already."""
        context = self._contexts.get(number)
        if context is not None:
            return context
        with self._lock:
            if number in self._released:
                return None
            return self._contexts.setdefault(number, Context(number))

    def pop(self, number: int) -> Context | None:
        """Forget a context; None if it is not here."""
        with self._lock:
            # Remembered even if it is not here: a message of it may be on its way through another thread.
            self._released[number] = None
            while len(self._released) > _REMEMBERED:
                self._released.popitem(last=False)
            return self._contexts.pop(number, None)

    def select(self, wanted: Callable[[Context], bool]) -> list[Context]:
        """The contexts for which ``wanted`` is true."""
        return [context for context in list(self._contexts.values()) if wanted(context)]

    def __len__(self) -> int:
        return len(self._contexts)
