"""All contexts of one worker, and new ids of contexts and messages."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable
from typing import cast

from backhaul._autograd.context import Context
from backhaul._autograd.ids import COUNTER_BITS, PLAIN, ContextId, MessageId
from backhaul._autograd.plain_graph import PlainGraph
from backhaul._types import first_number
from backhaul.errors import UnknownContextError

_MAX_RELEASED = 4096  # ids of released contexts that are remembered


class Container:
    """All contexts of one worker. Thread-safe.

    Attributes:
        plain: The graph of messages outside contexts.
        find: The context of an id; None if it is not here.
        new_message: Makes an id that no other message in the cluster has.
    """

    find: Callable[[int], Context | None]
    new_message: Callable[[], MessageId]

    def __init__(self, worker: int, incarnation: str = "") -> None:
        self.plain = PlainGraph()
        self._contexts: dict[int, Context] = {PLAIN: self.plain}
        self._lock = threading.Lock()  # guards _contexts and _released together
        self._released: collections.OrderedDict[int, None] = collections.OrderedDict()
        first = worker << COUNTER_BITS | first_number(incarnation)
        self._new_id = itertools.count(first).__next__
        # Bound methods of C objects: each message uses them.
        self.find = self._contexts.get
        self.new_message = cast(Callable[[], MessageId], itertools.count(first).__next__)

    def new(self) -> Context:
        """A context with an id that no other context in the cluster has."""
        made = Context(ContextId(self._new_id()))
        with self._lock:
            self._contexts[made.id] = made
        return made

    def get(self, number: int) -> Context:
        """The context of that id. Raises ``UnknownContextError``."""
        context = self._contexts.get(number)
        if context is None:
            raise self.unknown(number)
        return context

    def was_released(self, number: int) -> bool:
        """Whether a context of that id was released, as far as this worker remembers."""
        return number in self._released

    def unknown(self, number: int) -> UnknownContextError:
        """The error for an id that names no context here."""
        if self.was_released(number):
            text = f"context {number} was released; use it inside its `with bh.context()` block"
        else:
            text = f"context {number} is not known here: no call of the context has reached this worker"
        return UnknownContextError(text, context=number)

    def get_or_create(self, number: ContextId) -> Context | None:
        """The context of a message that arrived; None if the context was released already."""
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
            # Remembered even if it is not here: another thread may be about to handle a message of the context.
            self._released[number] = None
            while len(self._released) > _MAX_RELEASED:
                self._released.popitem(last=False)
            return self._contexts.pop(number, None)

    def select(self, wanted: Callable[[Context], bool]) -> list[Context]:
        """The contexts for which ``wanted`` is true, with the plain graph among them."""
        return [context for context in list(self._contexts.values()) if wanted(context)]

    def __len__(self) -> int:
        return len(self._contexts) - 1  # the plain graph is always there
